"""Who the agent talks to: a scripted user, or a language model that plays one.

`ScriptedUser` answers by rules, so that it costs nothing and is the same every time:

* Asked for something (an order number, an e-mail address, "the details"), it tells what it knows of that and nothing
  else; it invents nothing, and says so when it does not know.
* Asked to confirm, it says yes. A user who is to change their mind does so at the agent's first message that is no
  question for particulars, whether or not the agent asked before acting.
* It takes a wish for settled when the agent sends a message after the database changed where it had to, says that the
  thing is done, or refuses; and a question when the agent states a value of the kind that was asked for. Whether the
  value is right, it does not know. It asks again for what has not been told.
* It ends the conversation only when all its wishes are settled, never because of a marker or a yes of its own.

What the agent says is stripped of reasoning, calls and markers such as "###STOP###" before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from orchestra_envs.env import Reply
from orchestra_envs.parse import parse_turn
from orchestra_envs.service.facts import names_of, values_of, values_of_all
from orchestra_envs.service.generate import pick, stage_words
from orchestra_envs.service.goals import Fact, Goal, ServiceTask
from orchestra_envs.service.world import World

SLOTS: Mapping[str, tuple[str, str]] = {
    "name": (r"\b(?:your|full|first|last|sur)\W?(?:full )?name", "my name is {}"),
    "email": (r"\be-?mail", "my e-mail address is {}"),
    "postcode": (r"\bpost(?:al)? ?code|\bzip", "my postcode is {}"),
    "patient number": (r"\bpatient (?:number|id|no)", "my patient number is {}"),
    "guest number": (r"\bguest (?:number|id|no)", "my guest number is {}"),
    "card number": (r"\bcard\b|\bmember(?:ship)? (?:number|id|no)", "my card number is {}"),
    "birth date": (r"\bbirth|\bborn\b|\bdob\b", "I was born on {}"),
    "order": (r"\borders?\b", "the order is {}"),
    "appointment": (r"\bappointments?\b", "the appointment is {}"),
    "booking": (r"\bbookings?\b|\bstay\b|\breservation", "the booking is {}"),
    "item": (r"\bitems?\b|\bproducts?\b|\barticle", "it is about {}"),
    "new item": (r"\breplacement|\bnew (?:item|product)|\binstead\b|\bexchange", "I want {} instead"),
    "reason": (r"\breason|\bwhy\b", "the reason: {}"),
    "address": (r"(?<!mail )\baddress|\bwhere to\b", "the new address is {}"),
    "new email": (r"\bnew e-?mail", "the new e-mail address is {}"),
    "phone": (r"\b(?:tele)?phone", "the new telephone number is {}"),
    "doctor": (r"\bdoctor|\bdr\b", "I mean {}"),
    "day": (r"\b(?:which|what) (?:day|date)|\bwhen\b|\bdate\b(?! of birth)|\bday\b", "the day: {}"),
    "drug": (r"\bdrug|\bmedicine|\bmedication|\bprescription", "it is {}"),
    "specialty": (r"\bspecialt|\bspeciality", "I mean {}"),
    "room": (r"\broom", "I mean {}"),
    "nights": (r"\bnights?\b|\bhow long", "it is for {}"),
    "guests": (r"\bguests\b|\bhow many\b|\bpeople\b|\bpersons\b", "it is for {}"),
    "rate": (r"\brate\b", "I want {}"),
    "title": (r"\btitles?\b|\bbooks?\b|\bloans?\b|\bfilms?\b", "it is {}"),
    "branch": (r"\bbranch", "I mean the branch {}"),
}
"""What a user can be asked for: how that is recognised, and how it is told."""

_SLOT_PATTERNS = {slot: re.compile(pattern, re.IGNORECASE) for slot, (pattern, _) in SLOTS.items()}
_IDENTITY = re.compile(r"\bidentity|\bidentif|\bverify you\b|\bwho you are\b|\bwho am i", re.IGNORECASE)
_DETAILS = re.compile(
    r"\bdetails?\b|\bmore (?:about|information)|\bwhat exactly|\bspecif|\bwhich one"
    r"|\bwhat (?:do|would) you (?:like|want)|\bwhat can i do|\bhow (?:can|may) i",
    re.IGNORECASE,
)
_REQUEST = re.compile(
    r"\?|\bplease\b|\bcould you\b|\bcan you\b|\btell me\b|\bgive me\b|\bprovide\b|\bshare\b|\bsend me\b|\bneed your\b"
    r"|\bi(?: would|'d)? need\b|\blet me know\b|\bwithout your\b|\brequire your\b",
    re.IGNORECASE,
)
_CONFIRM = re.compile(
    r"\bshall i\b|\bshould i\b|\bdo you (?:want|wish|agree|confirm|accept)\b|\bwould you like (?:me )?to\b"
    r"|\b(?:may|can) i (?:now )?(?:proceed|go ahead)|^\W*(?:proceed|go ahead)\s*\?"
    r"|\b(?:ok|okay|right|fine|ready) to (?:proceed|go ahead)"
    r"|\bconfirm (?:that|this|the|it|so)\b|\bis (?:that|this) (?:ok|okay|right|correct|fine|alright)|\bare you sure\b"
    r"|\b(?:ok|okay|all right|agreed|correct|right)\s*\?|\byes or no\b|\byes/no\b|\bplease confirm\s*[.!?]?$",
    re.IGNORECASE,
)
_QUESTION_WORD = re.compile(r"\b(?:what|which|how|when|where|who|whom|why)\b", re.IGNORECASE)
_ADVICE = re.compile(r"\bplease (?:check|allow|note|bear|expect|feel|do not|don't|remember|wait)\b", re.IGNORECASE)
_CLOSER = re.compile(
    r"\banything else|\bsomething else|\bany other|\bfurther (?:help|questions)|\bassist you further", re.I
)
_WAIT = re.compile(
    r"\b(?:one|just a|a) (?:moment|second|minute)\b|\blet me (?:check|look|see)|\bhold on\b|\bplease wait\b"
    r"|\bi(?:'ll| will) (?:check|look|see)\b",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\bcan(?:no|')t\b|\bcan not\b|\bunable to\b|\b(?:not|no longer) (?:be )?(?:possible|allowed|permitted|eligible"
    r"|able|offered|available)\b|\bimpossible\b|\bagainst (?:the|our) (?:rules|policy)|\bhave to (?:refuse|decline)"
    r"|\bmust (?:refuse|decline)|\btoo late\b|\bdoes(?: not|n't) allow\b",
    re.IGNORECASE,
)
_LOOKED = (
    r"(?!received|noted|looked|checked|verified|found|reviewed|located|understood|retrieved|identified|asked|seen)"
)
_CLAIM = re.compile(
    rf"\b(?:has|have) (?:now |just |already )?been (?:successfully )?{_LOOKED}\w+"
    rf"|\bi(?:'ve| have)(?: now| just| also| successfully)? {_LOOKED}(?:\w+ed|done|made|sent|put|taken|set)\b"
    r"|\bis (?:now )?(?:done|complete|completed|cancelled|booked|registered)\b|\ball (?:set|done)\b|\bsuccessfully\b",
    re.IGNORECASE,
)
_MARKER = re.compile(r"#{2,}\s*\w+\s*#{2,}|</?[a-z_|]+>|\[(?:end|stop|done)\]", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_IDENTIFIER = re.compile(r"\b([A-Z]{1,2})-\d+\b")

_YES = ("Yes, please.", "Yes, please go ahead.", "Yes, that is right, do it.", "Yes, I confirm.", "Sure, go ahead.")
_WAITING = ("All right, I will wait.", "Sure, take your time.", "Fine.")
_BYES = ("That is all, thank you. Goodbye.", "Thank you, that was everything. Bye.", "Thanks for your help, goodbye!")
_NEXT = ("Thank you. There is something else: {}", "Good. I have another request. {}", "Thanks. And then: {}")
_STILL = ("What I want is this: {}", "I still need this: {}", "My request is the following. {}")
_UNKNOWN = ("I am afraid I do not know that.", "I do not know that, sorry.", "That I do not know.")
_CHANGES = (
    "Sorry, I have changed my mind. Forget what I said about that; instead: {}",
    "Wait, not that after all. I would rather have this: {}",
    "Actually, I have thought about it again. Leave that, and do this instead: {}",
)


def heard(message: str) -> str:
    """What a user hears of an agent's message: no reasoning, no calls, no markers."""
    return _MARKER.sub(" ", parse_turn(message).content).strip()


class ScriptedUser:
    """The user of one episode; call `reply` with each message of the agent.

    Args:
        task: what the user wants and knows.
        world: the database of the episode, in which the user sees what has become of their wishes.

    `messages` are the agent's so far, as heard; `replies` the user's.
    """

    def __init__(self, task: ServiceTask, world: World) -> None:
        self._task = task
        self._world = world
        self._stage = 0
        self._raised = list(task.stages[0])
        self._pending = dict(task.first_wishes)
        self._settled: set[int] = set()
        self._said: dict[str, set[str]] = {}
        self.messages: list[str] = []
        self.replies: list[str] = []

    def reply(self, message: str, rng: np.random.Generator) -> Reply:
        """What the user says to a message, and whether the conversation is over; draws phrasings from `rng`."""
        reply = self._answer(heard(message), rng)
        self.replies.append(reply.text)
        return reply

    def _answer(self, text: str, rng: np.random.Generator) -> Reply:
        if asked := self.observe(text):
            return Reply(_sentence(asked, rng))
        if changes := [number for number in self._raised if number in self._pending]:
            return Reply(self._change_mind(changes, rng))
        if unmet := self.unmet:
            return Reply(self._insist(text, unmet, rng))
        return self._go_on(rng)

    def observe(self, text: str) -> list[str]:
        """Take note of what a message (as `heard`) settles; returns the answers to what it asks for, [] for nothing."""
        self.messages.append(text)
        if asked := self._asked(text):
            return asked
        self._note_values(text)
        is_refusal = bool(_REFUSAL.search(text))
        if is_refusal or not _is_confirmation(text):
            self._note_claims(text, is_refusal)
        return []

    def _note_claims(self, text: str, is_refusal: bool) -> None:
        before = set(self._settled)
        self._settle_changed()
        if is_refusal:
            self._settle_refused(text)
        elif _CLAIM.search(text) and self._settled == before:
            self._settled.update(self._open_wishes()[:1])

    @property
    def unmet(self) -> list[int]:
        """The goals brought up so far that are not settled, or of which something has not been told."""
        return [number for number in self._raised if number in self._pending or not self._is_met(number)]

    @property
    def is_satisfied(self) -> bool:
        """Whether all goals are settled, those not brought up yet included."""
        return not self.unmet and self._stage == len(self._task.stages) - 1

    # What the user says.

    def _go_on(self, rng: np.random.Generator) -> Reply:
        if self._stage == len(self._task.stages) - 1:
            return Reply(pick(rng, _BYES), end=True)
        self._stage += 1
        stage = self._task.stages[self._stage]
        self._raised += stage
        return Reply(pick(rng, _NEXT).format(stage_words(self._task, stage, rng)))

    def _change_mind(self, numbers: Sequence[int], rng: np.random.Generator) -> str:
        for number in numbers:
            del self._pending[number]
            self._settled.discard(number)
        return " ".join(pick(rng, _CHANGES).format(pick(rng, self._task.goals[number].asks)) for number in numbers)

    def _insist(self, text: str, unmet: Sequence[int], rng: np.random.Generator) -> str:
        if _is_confirmation(text):
            return self._correction(text) or pick(rng, _YES)
        if _WAIT.search(text):
            return pick(rng, _WAITING)
        number = unmet[0]
        if number in self._settled and (missing := self._untold(number)):
            return missing[0].question
        return pick(rng, _STILL).format(pick(rng, self._task.goals[number].asks))

    def _correction(self, text: str) -> str:
        """What to say to a proposal that is about the wrong order, booking or the like; "" if it is not."""
        known = [value for number in self._raised for value in self._known(number).values()]
        mentioned: dict[str, set[str]] = {found.group(1): set() for found in _IDENTIFIER.finditer(text)}
        for found in _IDENTIFIER.finditer(text):
            mentioned[found.group(1)].add(found.group())
        for prefix, identifiers in mentioned.items():
            mine = [value for value in known if value.startswith(f"{prefix}-") and _IDENTIFIER.fullmatch(value)]
            if mine and not identifiers & set(mine):
                return f"No, not that. I mean {' and '.join(dict.fromkeys(mine))}."
        return ""

    def _asked(self, text: str) -> list[str]:
        """What the user has to say to the questions for particulars in a message; empty if there are none."""
        asking = " ".join(filter(_asks_for_particulars, _SENTENCE_END.split(text)))
        if not asking:
            return []
        person = self._task.person
        slots = [slot for slot, pattern in _SLOT_PATTERNS.items() if pattern.search(asking)]
        if _IDENTITY.search(asking):
            slots += [slot for slot in person.identity_slots if slot not in slots]
        answers = []
        for slot in slots:
            values = [self._known(number)[slot] for number in self._raised if slot in self._known(number)]
            if not values and slot in person.known:
                values = [person.known[slot]]
            if values:
                answers.append(SLOTS[slot][1].format(" and ".join(dict.fromkeys(values))))
        if _DETAILS.search(asking):
            answers += [self._wish(number).asks[0] for number in self.unmet]
        if slots and not answers:
            return [""]
        return answers

    # What has become of the wishes.

    def _wish(self, number: int) -> Goal:
        return self._pending.get(number, self._task.goals[number])

    def _known(self, number: int) -> Mapping[str, str]:
        return self._wish(number).known

    def _open_wishes(self) -> list[int]:
        """Goals brought up that ask for a change and are not settled."""
        goals = self._task.goals
        return [n for n in self._raised if n not in self._settled and goals[n].outcome != "inform"]

    def _settle_changed(self) -> None:
        changes = self._world.changes(self._task.start)
        for number in self._open_wishes():
            if changes & (self._task.changed[number] | self._task.goals[number].needs):
                self._settled.add(number)

    def _settle_refused(self, text: str) -> None:
        wishes = self._open_wishes()
        lower = text.lower()
        about = [n for n in wishes if any(_topic(value) in lower for value in self._known(n).values())]
        refused = [n for n in wishes if self._task.goals[n].outcome == "refuse" and n not in about]
        num_refusals = max(len(about), len(_REFUSAL.findall(text)))
        self._settled.update((about + refused)[:num_refusals] or wishes[:1])

    def _note_values(self, text: str) -> None:
        facts = self._task.facts
        names = names_of(facts)
        for kind in {fact.kind for fact in facts}:
            own = values_of_all(self._task.user_texts, kind, names)
            self._said.setdefault(kind, set()).update(values_of(text, kind, names) - own)

    def _is_met(self, number: int) -> bool:
        goal = self._task.goals[number]
        is_settled = number in self._settled or goal.outcome == "inform"
        return is_settled and not self._untold(number)

    def _untold(self, number: int) -> list[Fact]:
        """The facts of a goal of which the agent cannot have told anything yet: too few values of that kind so far."""
        missing = []
        counts: dict[str, int] = {}
        for other in self._raised:
            for fact in self._task.goals[other].tells if other == number or self._is_before(other, number) else ():
                counts[fact.kind] = counts.get(fact.kind, 0) + 1
                if other == number and len(self._said.get(fact.kind, ())) < counts[fact.kind]:
                    missing.append(fact)
        return missing

    def _is_before(self, other: int, number: int) -> bool:
        return self._raised.index(other) < self._raised.index(number)


def _is_confirmation(text: str) -> bool:
    return any(_asks_for_yes(sentence) and not _CLOSER.search(sentence) for sentence in _SENTENCE_END.split(text))


def _asks_for_yes(sentence: str) -> bool:
    found = _CONFIRM.search(sentence)
    return found is not None and not _QUESTION_WORD.search(sentence[: found.start()])


def _asks_for_particulars(sentence: str) -> bool:
    is_other = _asks_for_yes(sentence) or any(p.search(sentence) for p in (_CLOSER, _CLAIM, _ADVICE))
    return bool(_REQUEST.search(sentence)) and not is_other


def _topic(value: str) -> str:
    return value.lower().removeprefix("the ").strip('"')


def _sentence(answers: Sequence[str], rng: np.random.Generator) -> str:
    """Particulars in one sentence, then whole sentences; that the user does not know, if there is neither."""
    particulars = "; ".join(answer for answer in answers if answer and answer[-1] not in ".?!")
    sentences = [answer for answer in answers if answer and answer[-1] in ".?!"]
    if particulars:
        sentences.insert(0, f"{particulars[0].upper()}{particulars[1:]}.")
    return " ".join(sentences) or pick(rng, _UNKNOWN)
