"""A user played by a language model behind an OpenAI-compatible endpoint.

The model writes what the user says; the rules of `ScriptedUser` still watch the conversation, so that the model can
end it only when every wish is settled, and cannot go on for ever afterwards. It reads what the agent says and nothing
else: no reasoning, no tool calls, no markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestra_envs.env import Reply
from orchestra_envs.limits import Retry
from orchestra_envs.service.goals import ServiceTask
from orchestra_envs.service.user import ScriptedUser, heard
from orchestra_envs.service.world import World, unwrapped

if TYPE_CHECKING:
    from orchestra_envs.live.chat import Endpoint

END_MARKER = "[END]"
MAX_TOKENS = 400

_PROMPT = unwrapped("""You are {name}, a customer who writes to a service agent. Stay in this role and write only
  what the customer would say, in one to three short sentences.

What you know of yourself:
{person}

What you want, in this order:
{wishes}

Rules: Tell what you know when you are asked for it. Never make up ids, names, numbers or dates: say that you do not
  know. When the agent says what they are going to do and asks, say yes if it is what you want. Do not do the
  agent's work, and do not mention these rules. When all you want has been done, answered or definitely refused, say
  goodbye and write {marker}; never before.""")


@dataclass(frozen=True)
class ModelUser:
    """Plays users through one endpoint; holds no state of any episode."""

    endpoint: Endpoint
    retry: Retry = field(default_factory=Retry)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ModelUser:
        """From the fields of `live.chat.Endpoint`; ValueError for a field that it does not have."""
        from orchestra_envs.live.chat import Endpoint

        try:
            return cls(Endpoint(**fields))
        except TypeError as error:
            raise ValueError(f"user: {error}") from None

    @staticmethod
    def tracker(task: ServiceTask, world: World) -> ScriptedUser:
        """Who watches the conversation: all wishes count from the start, in their final form."""
        everything = (tuple(range(len(task.goals))),)
        return ScriptedUser(replace(task, stages=everything, first_wishes={}), world)

    async def reply(self, tracker: ScriptedUser, task: ServiceTask, message: str) -> Reply:
        """What the user says to a message of the agent.

        Raises:
            ToolUnavailableError: the endpoint did not answer, several times.
        """
        from orchestra_envs.live.chat import chat

        was_satisfied = tracker.is_satisfied
        tracker.observe(heard(message))
        dialogue = [{"role": "system", "content": _system_prompt(task)}, {"role": "assistant", "content": task.opening}]
        for number, said in enumerate(tracker.messages):
            dialogue.append({"role": "user", "content": said or "..."})
            if number < len(tracker.replies):
                dialogue.append({"role": "assistant", "content": tracker.replies[number]})
        answer = await self.retry.run(lambda: chat(self.endpoint, dialogue, max_output_tokens=MAX_TOKENS))
        text = answer.text.replace(END_MARKER, "").strip() or "..."
        tracker.replies.append(text)
        return Reply(text, end=tracker.is_satisfied and (was_satisfied or END_MARKER in answer.text))


def _system_prompt(task: ServiceTask) -> str:
    person = "\n".join(f"- {slot}: {value}" for slot, value in task.person.known.items())
    wishes = []
    for number, goal in enumerate(task.goals):
        if first := task.first_wishes.get(number):
            wishes.append(
                f"{number + 1}. First say: {first.asks[0]} When the agent asks for your confirmation or reports on it, "
                f"you have changed your mind and want this instead: {goal.asks[0]}"
            )
        else:
            wishes.append(f"{number + 1}. {goal.asks[0]}")
    return _PROMPT.format(name=task.person.name, person=person, wishes="\n".join(wishes), marker=END_MARKER)
