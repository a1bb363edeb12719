"""The environments without our trainer: any OpenAI-compatible model as the policy, by the plain OpenAI client.

    pip install ./envs 'openai[aiohttp]'          # no JAX
    python benchmarks/openai_client.py --model gpt-5-mini --env orchestra/Market-v0 --episodes 32
    python benchmarks/openai_client.py --model Qwen/Qwen3-8B --base-url http://127.0.0.1:8000/v1 --api-key-env ''

Prints accuracy, cost and latency of the tools that the model called (what the model itself costs is not in it). An
episode in which the endpoint failed (an error that its own retries did not mend, or an answer without a message) gets
no further, counts as unsolved and is told. A refused key ends the run.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import sys
from typing import Any

import openai
import orchestra_envs
from orchestra_envs import ToolCall, render_call
from orchestra_envs.baselines import Episode
from orchestra_envs.loop import run_on_loop
from orchestra_envs.runner import run_episodes

SYSTEM = (
    "Solve the task with the tools. Every call costs money and time. When you know the answer, reply without a tool "
    'call and end with "Answer: " and the answer.'
)


NO_ANSWER = "(The endpoint gave no usable answer.)"


class EndpointError(Exception):
    """The endpoint will answer no episode."""


class ClientPolicy:
    """One episode as a chat: the environment's text goes in, the model's text and tool calls come out.

    What the endpoint did wrong is counted in `failures`.
    """

    def __init__(self, client: openai.AsyncOpenAI, model: str, failures: collections.Counter[str]) -> None:
        self.client = client
        self.model = model
        self.failures = failures
        self.has_failed = False
        self.messages: list[dict[str, Any]] = []

    def reset(self, env, observation, info, rng):
        """Begin: the tools as the API wants them; the first observation comes to `act`."""
        self.tools = [{"type": "function", "function": spec["function"]} for spec in json.loads(info["tools_json"])]
        self.messages = [{"role": "system", "content": info["instructions"] or SYSTEM}]
        self.open_calls: list[str] = []

    async def act(self, observation, info):
        """The model's next turn as the text that the environment reads; NO_ANSWER once the endpoint has failed.

        Raises:
            EndpointError: the key is refused, or there is no such model or address.
        """
        if self.has_failed:
            return NO_ANSWER
        # The environment answers the calls of a turn in one text; the API wants a message for each call.
        for call_id in self.open_calls:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": observation})
        if not self.open_calls:
            self.messages.append({"role": "user", "content": observation})
        try:
            completion = await self.client.chat.completions.create(
                model=self.model, messages=self.messages, tools=self.tools or openai.omit
            )
            message = _message(completion)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise EndpointError(_one_line(error)) from error
        except (openai.OpenAIError, ValueError) as error:
            self.failures[_one_line(error)] += 1
            self.has_failed = True
            return NO_ANSWER
        calls = message.tool_calls or []
        self.open_calls = [call.id for call in calls]
        said: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
        self.messages.append(said | ({"tool_calls": [call.model_dump() for call in calls]} if calls else {}))
        # Arguments that are no JSON are handed on as they are, for the environment to say what is wrong with them.
        blocks = [_block(call.function.name, call.function.arguments) for call in calls]
        return "\n".join(filter(None, [message.content if not calls else "", *blocks]))


def _message(completion: Any) -> Any:
    """The message of an answer; ValueError if it has none (a web page, say)."""
    choices = getattr(completion, "choices", None)
    message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
    if message is None:
        raise ValueError(f"the answer has no message: {_cut(repr(completion))}")
    return message


def _one_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else None
    return _cut(f"{type(error).__name__}: {error}" + (f" ({cause})" if cause else ""))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def _block(name: str, arguments: str) -> str:
    try:
        return render_call(ToolCall(name, json.loads(arguments or "{}")))
    except (ValueError, TypeError):
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def main() -> None:
    """Runs the episodes and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--base-url")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", help="'' for a local server without keys")
    parser.add_argument("--env", default="orchestra/Market-v0")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="the environment's arguments, as JSON")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--timeout-s", type=_seconds, default=120.0, help="of a request; the client tries twice more")
    options = parser.parse_args()
    if options.api_key_env and options.api_key_env not in os.environ:
        parser.error(f"the environment variable {options.api_key_env} is not set (--api-key-env '' for none)")
    key = os.environ[options.api_key_env] if options.api_key_env else "none"
    client = openai.AsyncOpenAI(
        api_key=key,
        base_url=options.base_url,
        timeout=options.timeout_s,
        http_client=openai.DefaultAioHttpClient(timeout=options.timeout_s),
    )
    failures: collections.Counter[str] = collections.Counter()
    try:
        episodes = run_episodes(
            lambda: orchestra_envs.make(options.env, **options.kwargs),
            lambda: ClientPolicy(client, options.model, failures),
            range(options.episodes),
            concurrency=options.concurrency,
        )
    except EndpointError as error:
        sys.exit(f"error: {client.base_url} refuses the requests: {error}")
    finally:
        run_on_loop(client.close())  # where the episodes used it
    for failure, times in failures.most_common(10):
        print(f"{client.base_url} failed {times} times: {failure}", file=sys.stderr)
    count = len(episodes)
    solved = [0.0 if _has_failed(episode) else episode.outcome for episode in episodes]
    print(f"accuracy   {sum(solved) / count:.1%} of {count}")
    print(f"cost       {100 * sum(episode.cost_usd for episode in episodes) / count:.3f} cents a task")
    print(f"latency    {sum(episode.latency_s for episode in episodes) / count:.1f} s a task")
    print(f"calls      {sum(sum(episode.tool_counts.values()) for episode in episodes) / count:.2f} a task")
    if num_failed := sum(map(_has_failed, episodes)):
        print(f"failed     {num_failed} of {count}: the endpoint gave no usable answer")
        sys.exit(int(num_failed == count))


def _has_failed(episode: Episode) -> bool:
    return any(message["content"] == NO_ANSWER for message in episode.messages)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return seconds


if __name__ == "__main__":
    main()
