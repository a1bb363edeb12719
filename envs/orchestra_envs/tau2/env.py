"""`Tau2Env`: a task of tau2-bench as a `ToolEnv`."""

import asyncio
import copy
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestra_envs.env import Reply, Task, ToolEnv
from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.chat import ChatReply
from orchestra_envs.parse import ToolCall, render_call
from orchestra_envs.prices import model_price
from orchestra_envs.tau2 import dialogue as talk
from orchestra_envs.tau2 import library
from orchestra_envs.tau2.speaker import Speaker, read_speaker
from orchestra_envs.tools import Price, Tool, ToolArgumentError, ToolResult

logger = logging.getLogger(__name__)

TRANSFER_TOOL = "transfer_to_human_agents"

_EXPERT_FIELDS = ("name", "description", "latency_s", "clock")
_EXPERT_TIMEOUT_S = 600.0
_CALL_ERRORS = frozenset({"invalid_arguments", "unknown_tool", "tool_exception"})
_NO_WORDS = "(The user waits: your message had no words for them.)"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_INSTEAD_OF_TRANSFER = (
    "Where the policy says to transfer to a human agent, ask an expert instead: experts can transfer, you cannot."
)
_SOLO_PROMPT = """You work on the ticket of a customer, alone: nobody answers you. Follow the policy, and solve the \
ticket by calling tools. When it is solved, write one closing sentence without a tool call.

<policy>
{policy}
</policy>"""
_JUDGE_PROMPT = """You check the conversation of a customer service agent against statements about what the agent \
should have done. Answer with one line per statement: its number, a colon, and yes or no."""
_VERDICT = re.compile(r"^\W*(\d+)\W+(yes|no)\b", re.IGNORECASE | re.MULTILINE)


class Tau2Env(ToolEnv):
    """Customer service by the rules of a policy: a user with a problem, tools on a database, tau2-bench's reward.

    A turn of plain text goes to the simulated user, who replies (and may use tools of their own before, in telecom
    and mock). The episode ends when the user ends it. The outcome is the reward of tau2-bench's own evaluator: the
    product of what the task's `reward_basis` names (final database, assertions on it, golden actions, information
    told). It is 0 after `max_turns` and `max_errors`, as there.

    Args:
        domain: of tau2-bench ("mock", "retail", "airline", "telecom", ...), or of ToolScale where the tau2-bench of
            ToolOrchestra is installed.
        tasks: the name of a task set ("telecom_small"), the path of a JSON file of tasks, or a list of ids; None for
            the domain's task set.
        split: of the task set, such as "train" and "test"; None for tau2-bench's own choice ("base").
        user: the model that plays the user, with tau2-bench's own prompt: the fields of `live.chat.Endpoint` (model,
            base_url, api_key_env, timeout_s, extra) and of `Speaker` (temperature, max_output_tokens, stream, seeded,
            price, retry, limiter). Without a price the user costs the policy nothing.
        experts: models that can make a move in the policy's place, each a tool `call_expert_1`, ... without
            arguments. The expert sees the whole conversation and all tools; its tool calls are run, or its words said
            to the user. The same fields as `user`, and name, description, latency_s (10, what the policy is told to
            expect) and clock ("measured" unless "declared"). With experts the policy's own tool for transfers to
            human agents is left out, as in ToolOrchestra.
        nl_judge: for tasks whose reward includes assertions in natural language: a model, given as `user` is, or
            "ignore" to leave those assertions out of the reward.
        solo: no user; the question is the task's ticket, the user's tools are the policy's, too, and the first turn
            of plain text ends the episode. Only tasks with a ticket.
        retrieval: for banking_knowledge, how it finds its documents, such as "bm25_grep" (its own choice needs
            embeddings of OpenAI).
        let_agent_finish: a user who says stop beside other words leaves at the policy's next message, not at once;
            simulated users tend to say "yes, do it" and stop in one breath. Not tau2-bench's rule.
        max_errors: this many failed tool calls (the user's too) end the episode, end_reason "too_many_errors"; they
            are counted after turns with calls.
        tool_latency_s: declared seconds of a call of a domain's tool.
        **limits: as `ToolEnv` takes them.

    `reset(options={"task_id": "create_task_1"})` poses that task. Where the user cannot be reached, the episode ends
    with "infra_error" and is marked to be dropped. Nothing waits in the tools of a domain: they run in the caller's
    thread.

    Raises:
        ImportError: tau2-bench is not installed; the message says how to install it.
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        *,
        domain: str = "mock",
        tasks: str | Sequence[str] | None = None,
        split: str | None = None,
        user: Mapping[str, Any] | None = None,
        experts: Sequence[Mapping[str, Any]] = (),
        nl_judge: Mapping[str, Any] | str | None = None,
        solo: bool = False,
        retrieval: str | None = None,
        let_agent_finish: bool = False,
        max_errors: int = 10,
        tool_latency_s: float = 0.0,
        max_turns: int = 50,
        max_output_chars: int = 20_000,
        **limits: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, max_output_chars=max_output_chars, **limits)
        library.load()
        library.check_domain(domain)
        if isinstance(max_errors, bool) or not isinstance(max_errors, int) or max_errors < 1:
            raise ValueError(f"max_errors must be a whole number of at least 1, not {max_errors!r}")
        if user is None and not solo:
            raise ValueError("user: name the model that plays the user, {'model': ..., 'base_url': ...}, or set solo")
        self._world = library.World(domain, solo, retrieval)
        self._let_agent_finish = let_agent_finish
        self._max_errors = max_errors
        self._tool_latency_s = tool_latency_s
        self._user = None if user is None or solo else read_speaker("user", user)
        self._experts = [_read_expert(number, config) for number, config in enumerate(experts, start=1)]
        self._judge = read_speaker("nl_judge", nl_judge) if isinstance(nl_judge, Mapping) else None
        self._tasks = library.load_tasks(domain, tasks, split)
        if solo:
            self._tasks = {task_id: task for task_id, task in self._tasks.items() if library.is_for_solo(task)}
        _check_tasks(self._tasks, nl_judge, solo)
        library.make_environment(self._world, next(iter(self._tasks.values())))  # so that what it lacks is told now
        self._dialogue: talk.Dialogue | None = None

    def task_ids(self) -> tuple[str, ...]:
        """The ids of the set's tasks, in its order."""
        return tuple(self._tasks)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A random task of the set, or the one that `options["task_id"]` names."""
        task_id = options.get("task_id")
        if task_id is None:
            task_id = list(self._tasks)[int(rng.integers(len(self._tasks)))]
        if task_id not in self._tasks:
            raise ValueError(f"task_id: there is no task {task_id!r}, but {', '.join(list(self._tasks)[:5])}, ...")
        task = self._tasks[task_id]
        self._dialogue = dialogue = talk.begin(self._world, task, let_agent_finish=self._let_agent_finish)
        if self._world.solo:
            instructions = _SOLO_PROMPT.format(policy=dialogue.environment.get_policy())
        elif self._hides_transfer:
            instructions = f"{dialogue.agent_prompt}\n\n{_INSTEAD_OF_TRANSFER}"
        else:
            instructions = dialogue.agent_prompt
        return Task(
            question=task.ticket if self._world.solo else f"A user calls ({self._world.domain}, task {task_id}).",
            id=task_id,
            metadata={"domain": self._world.domain, "opening_seed": int(rng.integers(2**63))},
            instructions=instructions,
        )

    def episode_tools(self, task: Task, rng: np.random.Generator) -> Sequence[Tool]:
        """The domain's tools on this episode's database, and the experts."""
        dialogue = self._current
        environment = dialogue.environment
        offered = environment.get_tools()
        if self._world.solo:
            offered = offered + library.user_tools(self._tasks[task.id], environment)
        tools = [
            _domain_tool(dialogue, tool.openai_schema["function"], self._tool_latency_s)
            for tool in offered
            if not (self._hides_transfer and tool.name == TRANSFER_TOOL)
        ]
        return [*tools, *(self._expert_tool(dialogue, expert, speaker) for expert, speaker in self._experts)]

    async def opening(self, task: Task) -> str:
        """The user's first words; a conversation that the task brings along stands before them."""
        dialogue = self._current
        if self._world.solo:
            return task.question
        num_given = len(dialogue.trajectory)
        try:
            if talk.is_users_turn(dialogue):
                rng = np.random.default_rng(task.metadata["opening_seed"])
                await talk.user_turn(dialogue, functools.partial(self._ask_user, dialogue, rng))
        except (ToolUnavailableError, RuntimeError, OSError) as error:
            # A reset cannot end an episode; the first step does.
            logger.error("the user of task %r cannot be reached: %s", task.id, error)
            dialogue.failure = error
            return "(The line is dead.)"
        dialogue.unpaid_usd = 0.0
        said = talk.without_markers(dialogue.trajectory[-1].content or "")
        if num_given > 1:
            return f"The conversation so far:\n\n{talk.transcript(dialogue.trajectory)}"
        return said or "(The user says nothing and leaves.)"

    async def reply(self, message: str) -> Reply | None:
        """What the user answers; the end, if they have left."""
        if self._world.solo:
            return None
        dialogue = self._current
        if dialogue.failure is not None:
            raise dialogue.failure
        words = talk.without_markers(message)
        if dialogue.state == "over":
            return self._reply(dialogue, "", end=True)
        if not words:
            return self._reply(dialogue, _NO_WORDS)
        talk.agent_says(dialogue, words)
        if dialogue.state == "closing":
            dialogue.state = "over"
            return self._reply(dialogue, "", end=True)
        answer = await talk.user_turn(dialogue, functools.partial(self._ask_user, dialogue, self.episode_rng))
        return self._reply(dialogue, answer, end=dialogue.state == "over")

    def ended(self) -> tuple[str, bool] | None:
        """After calls: whether the user left during an expert's move or fell silent, or too many calls failed."""
        dialogue = self._current
        if dialogue.failure is not None:
            return "infra_error", True  # complete, so that `score` is asked, and fails
        if dialogue.state == "over":
            return "user_ended", True
        num_errors = dialogue.num_errors + sum(record.error_type in _CALL_ERRORS for record in self.history)
        return ("too_many_errors", False) if num_errors >= self._max_errors else None

    async def score(self, task: Task, answer: str) -> float:
        """The reward of tau2-bench's evaluator, times that of the judge if the task wants one."""
        dialogue, tau2_task = self._current, self._tasks[task.id]
        if dialogue.failure is not None:
            raise dialogue.failure
        messages = copy.deepcopy(dialogue.trajectory)
        reward = await asyncio.to_thread(library.evaluate, self._world, tau2_task, messages)
        if reward and self._judge is not None and library.has_assertions_in_words(tau2_task):
            assertions = tau2_task.evaluation_criteria.nl_assertions
            reward *= await _judge_assertions(self._judge, messages, assertions, self.episode_rng)
        return reward

    def demonstrate(self, task: Task, rng: np.random.Generator) -> Sequence[str]:
        """The golden actions, one a turn, then what the user is to be told. Users are asked for actions of theirs."""
        criteria = self._tasks[task.id].evaluation_criteria
        turns = []
        for action in (criteria and criteria.actions) or []:
            if action.requestor == "user" and not self._world.solo:
                turns.append(f"Please do this on your side: {action.get_func_format()}")
            else:
                turns.append(render_call(ToolCall(action.name, action.arguments)))
        told = ", ".join((criteria and criteria.communicate_info) or [])
        return [*turns, f"That is done. {told}".strip()]

    @property
    def _current(self) -> talk.Dialogue:
        assert self._dialogue is not None  # sample_task made it
        return self._dialogue

    @property
    def _hides_transfer(self) -> bool:
        return bool(self._experts)

    async def _ask_user(
        self, dialogue: talk.Dialogue, rng: np.random.Generator, messages: Sequence[Any], tools: Sequence[Any]
    ) -> ChatReply:
        assert self._user is not None
        reply = await self._user.say(messages, tools, rng)
        dialogue.unpaid_usd += self._user.cost_usd(reply)
        return reply

    def _reply(self, dialogue: talk.Dialogue, text: str, *, end: bool = False) -> Reply:
        cost_usd, dialogue.unpaid_usd = dialogue.unpaid_usd, 0.0
        return Reply(text, end, cost_usd)

    def _expert_tool(self, dialogue: talk.Dialogue, expert: Tool, speaker: Speaker) -> Tool:
        tools = [tool.openai_schema for tool in dialogue.environment.get_tools()]

        async def make_move() -> ToolResult:
            if dialogue.is_expert_at_work:
                raise ToolArgumentError("another expert is making a move; ask one expert a turn")
            dialogue.is_expert_at_work = True
            try:
                return await self._make_move(dialogue, speaker, tools)
            finally:
                dialogue.is_expert_at_work = False

        return replace(expert, function=make_move)

    async def _make_move(self, dialogue: talk.Dialogue, speaker: Speaker, tools: Sequence[Any]) -> ToolResult:
        if dialogue.state == "over" or dialogue.failure is not None:
            raise ToolArgumentError("the user has left the conversation; write a closing message")
        rng = self.episode_rng
        reply = await speaker.ask(talk.view(dialogue, "assistant"), tools, rng)
        try:
            text = await talk.expert_move(dialogue, reply, functools.partial(self._ask_user, dialogue, rng))
        except ValueError as error:
            raise ToolUnavailableError(
                str(error),
                input_tokens=reply.input_tokens,
                output_tokens=reply.output_tokens,
                cost_known=reply.usage_known,
            ) from error
        except (ToolUnavailableError, RuntimeError) as error:  # the user's; the expert is not to be asked again
            dialogue.failure = error
            text = "It spoke to the user, who does not answer any more."
        return ToolResult(
            text,
            input_tokens=reply.input_tokens,
            output_tokens=reply.output_tokens,
            cost_known=reply.usage_known,
        )


def _domain_tool(dialogue: talk.Dialogue, schema: Mapping[str, Any], latency_s: float) -> Tool:
    name = schema["name"]

    def run(**arguments: Any) -> str:
        result = talk.call(dialogue, "assistant", name, arguments)
        if result.error:
            raise ToolArgumentError(result.content.removeprefix("Error: "))
        return result.content

    parameters = {"properties": {}, **schema["parameters"], "type": "object"}
    description = schema["description"] or name
    return Tool(name, description, parameters, run, latency_s=latency_s, inline=True, source="simulated")


def _read_expert(number: int, config: Mapping[str, Any]) -> tuple[Tool, Speaker]:
    """The tool of an expert (what it does is filled in for every episode) and the model behind it."""
    where = f"experts[{number - 1}]"
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} must be a mapping such as {{'model': ..., 'price': ...}}, not {config!r}")
    fields = {name: config[name] for name in _EXPERT_FIELDS if name in config}
    speaker = read_speaker(where, {name: value for name, value in config.items() if name not in _EXPERT_FIELDS})
    price = _price_of(where, speaker)
    fields = {
        "name": f"call_expert_{number}",
        "description": (
            "Lets an expert make your next move: it reads the whole conversation and knows all tools. What it calls "
            "is called, what it says is said to the user, and you see what came of it."
        ),
        "latency_s": 10.0,
        "clock": "measured",
        **fields,
    }
    name, description = fields.pop("name"), fields.pop("description")
    try:
        tool = Tool(
            name,
            description,
            _NO_ARGUMENTS,
            _not_begun,
            price,
            retry=speaker.retry,
            limiter=speaker.limiter,
            source="live",
            backend=speaker.endpoint.identity,
            timeout_s=_EXPERT_TIMEOUT_S,
            **fields,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return tool, speaker


async def _not_begun() -> str:
    raise ToolUnavailableError("no episode is under way", transient=False)


def _price_of(where: str, speaker: Speaker) -> Price:
    if speaker.price is not None:
        return speaker.price
    try:
        return model_price(speaker.endpoint.model, provider=speaker.endpoint.base_url)
    except ValueError as error:
        raise ValueError(f"{where}.price: {error}") from error


def _check_tasks(tasks: Mapping[str, Any], nl_judge: Mapping[str, Any] | str | None, solo: bool) -> None:
    if not tasks:
        raise ValueError("solo: none of the tasks has a ticket to work on without a user")
    if isinstance(nl_judge, str) and nl_judge != "ignore":
        raise ValueError(f"nl_judge must be a mapping that names a model, 'ignore' or None, not {nl_judge!r}")
    num_judged = sum(map(library.has_assertions_in_words, tasks.values()))
    if num_judged and nl_judge is None:
        raise ValueError(
            f"nl_judge: the reward of {num_judged} of {len(tasks)} tasks includes assertions in natural language, "
            "which only a model can judge: name one, {'model': ..., 'base_url': ...}, or set 'ignore' to leave them out"
        )


async def _judge_assertions(
    speaker: Speaker, messages: Sequence[Any], assertions: Sequence[str], rng: np.random.Generator
) -> float:
    """1.0 if a model says that all assertions hold for the conversation, else 0.0; RuntimeError if it says neither."""
    numbered = "\n".join(f"{number}. {assertion}" for number, assertion in enumerate(assertions, start=1))
    question = f"Conversation:\n{talk.transcript(messages, of_agent=False)}\n\nStatements:\n{numbered}"
    reply = await speaker.say(
        [{"role": "system", "content": _JUDGE_PROMPT}, {"role": "user", "content": question}], (), rng
    )
    verdicts = {int(number): word.lower() == "yes" for number, word in _VERDICT.findall(reply.text)}
    if not set(range(1, len(assertions) + 1)) <= verdicts.keys():
        raise RuntimeError(f"the judge gave no verdict on every assertion: {reply.text[:200]!r}")
    return float(all(verdicts[number] for number in range(1, len(assertions) + 1)))
