"""Chat templates as token ids: the prompt, and what stands between two sampled turns.

A trajectory is append-only ids: ``prompt_ids``, then in turn the sampled ids of the policy and ``observation_ids``.
Nothing that was sampled is ever rendered again: decoding and encoding is not the identity for BPE, and templates such
as Qwen3's rewrite history (they drop the reasoning of turns before the latest user message). For templates that do
not, the trajectory equals what ``conversation_ids`` gives for the whole conversation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from orchestra_jax.text.prompt import tools_section
from orchestra_jax.text.tokenizer import SHIELD, Tokenizer

# The added tokens that an assistant may write itself. All others in a turn's text are plain text.
POLICY_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

Message = dict[str, Any]

# What templates do to a tool's text before they embed it: nothing, trim, or (Llama 3.1) write it as JSON.
_TEXT_FILTERS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False),
)


_RESPONSE = "<tool_response>\n{}\n</tool_response>"


class ObservationWrapper(NamedTuple):
    """The ids and text around an observation; ``prefix`` and ``suffix`` are encoded in one run with the text."""

    head_ids: list[int]
    prefix: str
    text_filter: Callable[[str], str]
    suffix: str
    tail_ids: list[int]


class ChatFormat:
    """How one checkpoint writes conversations.

    Attributes:
        end_id: the token that closes an assistant turn in the template.
        stop_ids: ``end_id``, then the tokenizer's other end-of-sequence ids: sampling any of them ends the turn.
        supports_tools: the template has its own section for tools and asks for calls in ``<tool_call>`` tags (else
            tools go into the system text: Llama 3.1's section teaches a format that environments do not read).
        supports_tool_role: it has its own form for tool results (else they are user messages).
        reasoning_open: the prompt ends inside ``<think>``, so a turn starts with reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, variables: Mapping[str, Any] | None = None):
        """Compiles the template and finds out by trial renderings what it does.

        Args:
            tokenizer: the checkpoint's tokenizer.
            template: Jinja source to use in place of the tokenizer's own.
            variables: more variables for the template, such as ``{"enable_thinking": False}`` (Qwen3). A template
                that prints the date (Llama 3.2) is reproducible only with ``{"date_string": "26 Jul 2024"}``.

        Raises:
            ValueError: if there is no template, or it has a syntax error, raises, or does not end assistant turns
                with an added token.
        """
        self.tokenizer = tokenizer
        source = template if template is not None else tokenizer.chat_template
        if source is None:
            raise ValueError(
                f"{tokenizer.source}: has no chat template; a base model has none. Take an instruction-tuned "
                "checkpoint or pass template="
            )
        self._template = _compile(source, tokenizer.source)
        self._variables = {**tokenizer.special_tokens, **(variables or {})}
        with_tools = self._render([_user("Q")], [_PROBE_TOOL])
        self.supports_tools = _PROBE_TOOL["function"]["name"] in with_tools and "<tool_call>" in with_tools
        self.end_id = self._end_id()
        self.supports_tool_role = self._has_tool_role()
        self._wrappers = {role: self._observation_wrapper(role) for role in ("tool", "user")}
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *tokenizer.eos_ids)))
        prompt = self._render([_user("Q")])
        self.reasoning_open = prompt.rfind("<think>") > prompt.rfind("</think>")

    def prompt_ids(self, system: str | None, user: str, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The ids of a first prompt, up to where the policy's turn starts.

        Args:
            system: system text, or None.
            user: the task.
            tools: OpenAI function schemas. They go into the template's own section, or into the system text of a
                template without one.

        Raises:
            ValueError: if the template raises (Gemma's does for a system message), or a tool's schema contains a
                control token. In ``system`` and ``user`` these are encoded as plain text.
        """
        if tools and not self.supports_tools:
            system, tools = "\n\n".join(filter(None, [system, tools_section(tools)])), None
        system_message = [{"role": "system", "content": system}] if system is not None else []
        return self.conversation_ids([*system_message, _user(user)], tools, add_generation_prompt=True)

    def observation_ids(self, text: str, role: str = "tool") -> list[int]:
        """The ids between a sampled stop token and the next turn: end of line, wrapped text, generation prompt.

        A turn that was cut off has no stop token: append ``end_id`` (not trained on) before these. A turn that ended
        with another of ``stop_ids`` keeps what was sampled.

        Args:
            text: the observation; nothing in it becomes a control token.
            role: "tool" for results, "user" for a message of the user. Where the template has no tool role, results
                are user messages within ``<tool_response>`` lines.
        """
        if role not in self._wrappers:
            raise ValueError(f"role must be 'tool' or 'user', not {role!r}")
        wrapper = self._wrappers[role]
        run = self.tokenizer.encode_text(wrapper.prefix + wrapper.text_filter(text) + wrapper.suffix)
        return wrapper.head_ids + run + wrapper.tail_ids

    def turn_ids(self, text: str) -> list[int]:
        """The ids of an assistant turn that was not sampled (a trace to clone), with its end token.

        Tool-call and reasoning tags in the text are control tokens here; any other added token is plain text.
        """
        shielded = self.tokenizer.shield(text, POLICY_MARKUP)
        return [*self.tokenizer.encode_markup(shielded), self.end_id]

    def turn_text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sampled turn, without the stop token at its end if there is one."""
        ids = np.asarray(ids, np.int64).tolist()
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def conversation_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The ids of a whole conversation as the template renders it (for imported chats, never for sampled turns).

        Args:
            messages: OpenAI-style messages, see ``normalise_messages``.
            tools: OpenAI function schemas, for templates that have a section for them.
            add_generation_prompt: end with the start of an assistant turn.
        """
        _check_tools(self.tokenizer, tools)
        shielded = [self._shield_message(message) for message in normalise_messages(messages)]
        return self.tokenizer.encode_markup(self._render(shielded, tools, add_generation_prompt))

    def is_prefix_stable(self) -> bool:
        """Whether later user messages leave earlier turns as they were, reasoning included."""
        thought = "R\n</think>\n\nA"
        turn = thought if self.reasoning_open else "<think>\n" + thought
        first = self._render([_user("Q")])
        whole = self._render([_user("Q"), _assistant("<think>\n" + thought), _user("Q")])
        return whole.startswith(first + turn)

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # foreign code: anything may come out of it
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{self.tokenizer.source}: the chat template failed on messages ({roles}): {error}"
            ) from error

    def _shield_message(self, message: Message) -> Message:
        shield = self.tokenizer.shield
        if message["role"] == "assistant":
            return {key: _map_strings(value, lambda s: shield(s, POLICY_MARKUP)) for key, value in message.items()}
        core = message["content"].strip()
        if not core:
            return message
        # The shields at both ends keep the text and the template's markup from forming a token together. They go
        # inside the white space, so that the template can still trim it.
        before, _, after = message["content"].partition(core)
        return {**message, "content": f"{before}{SHIELD}{shield(core)}{SHIELD}{after}"}

    def _has_tool_role(self) -> bool:
        """Whether "tool" is more to the template than a name it prints like any other."""
        try:
            as_tool = self._after_turn("tool", _PROBE_TEXT)
        except ValueError:
            return False
        try:
            return as_tool != self._after_turn("zzz", _PROBE_TEXT).replace("zzz", "tool")
        except ValueError:
            return True

    def _after_turn(self, role: str, text: str) -> str:
        """What the template writes after an assistant's content when a message follows."""
        rendered = self._render([_user("Q"), _assistant(_PROBE_TURN), {"role": role, "content": text}])
        _, found, rest = rendered.rpartition(_PROBE_TURN)
        if not found:
            raise ValueError(f"{self.tokenizer.source}: the chat template leaves out an assistant's content")
        return rest

    def _end_id(self) -> int:
        before, markup, _ = self.tokenizer.split_at_added_tokens(self._after_turn("user", "Q"))
        if before or not markup:
            raise ValueError(
                f"{self.tokenizer.source}: the chat template must close an assistant turn with an added token, "
                f"not {before!r}"
            )
        return self.tokenizer.encode_markup(markup)[0]

    def _observation_wrapper(self, role: str) -> ObservationWrapper:
        wrapped = role == "tool" and not self.supports_tool_role
        template_role = "user" if wrapped else role
        second_probe = "\n two </think> <2>\n"
        rest = self._after_turn(template_role, _PROBE_TEXT)
        for text_filter in _TEXT_FILTERS:
            head, found, tail = rest.partition(text_filter(_PROBE_TEXT))
            expected = head + text_filter(second_probe) + tail
            if found and self._after_turn(template_role, second_probe) == expected:
                break
        else:
            raise ValueError(f"{self.tokenizer.source}: the chat template changes the text of {role!r} messages")
        if wrapped:
            return self._split_wrapper(head, lambda text: text_filter(_RESPONSE.format(text)), tail)
        return self._split_wrapper(head, text_filter, tail)

    def _split_wrapper(self, head: str, text_filter: Callable[[str], str], tail: str) -> ObservationWrapper:
        tokenizer = self.tokenizer
        _, head_markup, prefix = tokenizer.split_at_added_tokens(head)
        suffix, tail_markup, end = tokenizer.split_at_added_tokens(tail)
        head_ids = tokenizer.encode_markup(head_markup)[1:]  # the first is the end token: it was sampled
        return ObservationWrapper(head_ids, prefix, text_filter, suffix, tokenizer.encode_markup(tail_markup + end))


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Brings OpenAI wire messages into the one form that all templates take.

    ``content`` becomes a string (None is "", text parts are joined), and ``arguments`` of tool calls become objects:
    on the wire they are JSON strings, which one template iterates over and another encodes a second time.

    Raises:
        ValueError: naming the message, for a missing role, content that is not text, or arguments that are not a
            JSON object.
    """
    return [_normalise_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: must be an object with a 'role'")
    normal = {**message, "content": _content_text(message.get("content"), where)}
    if calls := normal.pop("tool_calls", None):
        normal["tool_calls"] = [_normalise_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normal


def _content_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ValueError(f"{where}.content: must be a string, null or a list of text parts")


def _normalise_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: must have a function with a 'name'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}.arguments: not JSON ({error})") from error
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"{where}.arguments: must be a JSON object, not {type(arguments).__name__}")
    return {**call, "type": "function", "function": {**function, "arguments": dict(arguments or {})}}


def _check_tools(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> None:
    """Tools are markup to a template, so none of the added tokens that mean something to it may be in them."""
    for tool in tools or []:
        token = tokenizer.find_added_token(json.dumps(tool, ensure_ascii=False))
        if token is not None:
            name = tool.get("function", tool).get("name")
            raise ValueError(
                f"tool {name!r}: its schema or description contains the control token {token!r}; reword it"
            )


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {function(key): _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, function) for item in value]
    return value


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


# Strings of the trial renderings; the text tells verbatim, trimmed and JSON apart.
_PROBE_TURN = "ZzTurnZz"
_PROBE_TEXT = '\t one "1" \t'
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "zz_probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: templates mark the assistant's text with it. Here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML and non-ASCII; models are trained on neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@lru_cache(maxsize=64)
def _compile(template: str, source: str) -> jinja2.Template:
    """Compiles in a sandbox: a template is code from whoever made the checkpoint."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    started = datetime.now()  # one date for all prompts of a process, also past midnight
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=started.strftime)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{source}: syntax error in the chat template, line {error.lineno}: {error}") from error
