"""The dialogue of one episode: what was said and called, in tau2-bench's own messages, and whose turn it is.

Rules of speaking:

- What the policy says reaches the user without hidden reasoning and without tau2-bench's stop markers: only the user
  ends a dialogue.
- The user may call tools of their own before they say something; the policy does not see that.
- A stop marker in what the user says ends the dialogue at once, as in tau2-bench. With `let_agent_finish`, one that
  stands beside other words ends it at the policy's next message, so that a policy that was just told "yes, do it" can.
- Markers inside `<think>` of the user are no markers.
"""

import copy
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestra_envs.live.chat import ChatReply, ChatToolCall
from orchestra_envs.tau2 import library

Requestor = Literal["user", "assistant"]
Ask = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], Awaitable[ChatReply]]
"""Asks the user's model: messages and tools in OpenAI's form."""

MAX_USER_MOVES = 20
"""Tool calls and empty answers of the user in one turn, before the episode is given up."""

MAX_EXPERT_CALLS = 6
"""Tool calls that are taken from one answer of an expert."""

_MARKER = re.compile(r"\s*###(?:STOP|TRANSFER|OUT-OF-SCOPE)###")
_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_OPENED_BEFORE = re.compile(r"\A.*</think>", re.DOTALL)


@dataclass
class Dialogue:
    """The state of one dialogue; `trajectory` is what tau2-bench's evaluator reads.

    `state` is "open"; "closing" after a stop that lets the agent finish; "over" when the user has left. `failure` is
    what made the user fall silent; `num_errors` counts failed tool calls of the user and of experts; `unpaid_usd` is
    what the user's words cost since the last reply.
    """

    environment: Any
    trajectory: list[Any]
    agent_prompt: str
    user_prompt: str = ""
    user_tools: Sequence[Mapping[str, Any]] = ()
    let_agent_finish: bool = False
    state: Literal["open", "closing", "over"] = "open"
    failure: BaseException | None = None
    num_errors: int = 0
    num_calls: int = 0
    is_expert_at_work: bool = False
    unpaid_usd: float = 0.0


def begin(world: library.World, task: Any, *, let_agent_finish: bool) -> Dialogue:
    """A fresh environment in the task's initial state, and the dialogue as far as the task brings it along."""
    task = task.model_copy(deep=True)
    environment = library.make_environment(world, task)
    initial = task.initial_state
    trajectory = list((initial and initial.message_history) or [])
    library.restore(environment, task, trajectory)
    if world.solo:
        return Dialogue(environment, trajectory, library.agent_prompt(environment))
    if not trajectory:
        trajectory = [copy.deepcopy(library.load().DEFAULT_FIRST_AGENT_MESSAGE)]
    prompt, tools = library.user_prompt(task, environment)
    return Dialogue(environment, trajectory, library.agent_prompt(environment), prompt, tools, let_agent_finish)


def call(dialogue: Dialogue, requestor: Requestor, name: str, arguments: Mapping[str, Any], words: str = "") -> Any:
    """Run one tool call on the environment and enter it with its result, which is returned (a `ToolMessage`)."""
    lib = library.load()
    dialogue.num_calls += 1
    tool_call = lib.ToolCall(
        id=f"episode_call_{dialogue.num_calls}",
        name=name,
        arguments=copy.deepcopy(dict(arguments)),
        requestor=requestor,
    )
    kind = lib.UserMessage if requestor == "user" else lib.AssistantMessage
    message = kind(role=requestor, content=words or None, tool_calls=[copy.deepcopy(tool_call)])
    result = dialogue.environment.get_response(tool_call)
    dialogue.trajectory += [message, result]
    return result


def agent_says(dialogue: Dialogue, text: str) -> None:
    """Enter what the agent says to the user."""
    dialogue.trajectory.append(library.load().AssistantMessage(role="assistant", content=text))


def without_markers(text: str) -> str:
    """`text` without tau2-bench's stop markers."""
    return _MARKER.sub("", text).strip()


def is_users_turn(dialogue: Dialogue) -> bool:
    """Whether the user is to say something before the agent can."""
    last = dialogue.trajectory[-1]
    if last.role == "tool":
        return last.requestor == "user"
    return last.role == "assistant"


async def user_turn(dialogue: Dialogue, ask: Ask) -> str:
    """Let the user speak, after tool calls of theirs if they make some; what the agent hears of it.

    Raises:
        RuntimeError: the user's model says nothing, again and again.
    """
    for _ in range(MAX_USER_MOVES):
        reply = await ask(view(dialogue, "user"), dialogue.user_tools)
        words = _without_reasoning(reply.text)
        calls = [asked for asked in reply.tool_calls if asked.arguments is not None and asked.name]
        for asked in calls:
            result = call(dialogue, "user", asked.name, asked.arguments or {}, words)
            dialogue.num_errors += bool(result.error)
            words = ""
        if not calls and words:
            dialogue.trajectory.append(library.load().UserMessage(role="user", content=words))
            return _heard(dialogue, words)
    raise RuntimeError(f"the simulated user said nothing in {MAX_USER_MOVES} moves")


async def expert_move(dialogue: Dialogue, reply: ChatReply, ask: Ask) -> str:
    """Make an expert's answer the agent's move; what came of it, for the policy to read.

    Raises:
        ValueError: the answer holds neither a tool call nor words.
    """
    if reply.tool_calls:
        return "\n\n".join(_expert_call(dialogue, asked) for asked in reply.tool_calls[:MAX_EXPERT_CALLS])
    words = without_markers(_without_reasoning(reply.text))
    if not words:
        raise ValueError("it gave neither a tool call nor a message")
    agent_says(dialogue, words)
    if dialogue.state == "closing":
        dialogue.state = "over"
    answer = "" if dialogue.state == "over" else await user_turn(dialogue, ask)
    parts = [f"It said to the user:\n{words}"]
    if answer:
        parts.append(f"The user answered:\n{answer}")
    if dialogue.state == "over":
        parts.append("The user has left the conversation.")
    return "\n\n".join(parts)


def view(dialogue: Dialogue, who: Requestor) -> list[dict[str, Any]]:
    """The dialogue as one side sees it, in OpenAI's form: own messages are the assistant's, the other's the user's.

    Neither side sees the tool calls of the other. The agent does not see the user's stop markers.
    """
    prompt = dialogue.user_prompt if who == "user" else dialogue.agent_prompt
    messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}]
    for message in dialogue.trajectory:
        if message.role == "tool":
            if message.requestor == who:
                messages.append({"role": "tool", "tool_call_id": message.id, "content": message.content or ""})
        elif message.role == who:
            own: dict[str, Any] = {"role": "assistant", "content": message.content}
            if message.tool_calls:
                own["tool_calls"] = [_wire_form(tool_call) for tool_call in message.tool_calls]
            messages.append(own)
        elif not message.tool_calls:
            content = message.content or ""
            messages.append({"role": "user", "content": content if who == "user" else without_markers(content)})
    return messages


def transcript(messages: Sequence[Any], *, of_agent: bool = True) -> str:
    """Messages as text. `of_agent`: what the agent knows, so without the user's tool calls and stop markers."""
    lines = []
    for message in messages:
        side = message.requestor if message.role == "tool" else message.role
        name = "Agent" if side == "assistant" else "User"
        is_of_tools = message.role == "tool" or bool(message.tool_calls)
        if of_agent and side == "user" and is_of_tools:
            continue
        if message.role == "tool":
            lines.append(f"Result: {message.content}")
        elif message.tool_calls:
            lines += [f"{name} called {_shown(each.name, each.arguments)}" for each in message.tool_calls]
        else:
            content = message.content or ""
            lines.append(f"{name}: {without_markers(content) if of_agent else content}")
    return "\n".join(lines)


def _heard(dialogue: Dialogue, words: str) -> str:
    """The words without markers; a marker changes the state of the dialogue."""
    spoken = without_markers(words)
    if _MARKER.search(words):
        dialogue.state = "closing" if dialogue.let_agent_finish and spoken else "over"
    return spoken


def _expert_call(dialogue: Dialogue, asked: ChatToolCall) -> str:
    if asked.arguments is None:
        return f"It called {asked.name} with arguments that are no JSON object."
    result = call(dialogue, "assistant", asked.name, asked.arguments)
    dialogue.num_errors += bool(result.error)
    return f"It called {_shown(asked.name, asked.arguments)}:\n{result.content}"


def _without_reasoning(text: str) -> str:
    text = _REASONING.sub("", text)
    return _OPENED_BEFORE.sub("", text).strip()


def _wire_form(tool_call: Any) -> dict[str, Any]:
    arguments = json.dumps(tool_call.arguments, ensure_ascii=False, default=str)
    return {"id": tool_call.id, "type": "function", "function": {"name": tool_call.name, "arguments": arguments}}


def _shown(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
