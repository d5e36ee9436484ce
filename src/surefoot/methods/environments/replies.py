"""What an environment says: its form, whoever says it (a Python object, a server), and how it is kept."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.data.formats import Turn
from surefoot.methods.own_functions import one_line, place_in
from surefoot.methods.rewards.answers import Outcome
from surefoot.system.errors import EnvironmentFault, Fault, InputError, SurefootError

_KEYS = ("observation", "reward", "done", "reason")
ROLES = ("user", "tool")
_FIX = "docs/grpo.md says what an environment returns"


class NotFinite(ValueError):
    """A reward that is NaN or infinite."""


@dataclass(frozen=True)
class Reply:
    """One answer of an environment.

    said: (role, text, name of the tool or "") of each message.
    reward: None if it gives none.
    done: the episode is over.
    reason: a remark on the reward.
    """

    said: tuple[tuple[str, str, str], ...]
    reward: float | None = None
    done: bool = False
    reason: str = ""

    @property
    def turns(self) -> list[Turn]:
        return [Turn(role, text, tool=name) for role, text, name in self.said]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text, _ in self.said)


@dataclass(frozen=True)
class Lost:
    """A call that failed.

    outcome: how it failed.
    where: place in the environment's code, or its name.
    what: in one line.
    own_code: whether the environment's code is to blame, not a server or a time limit.
    error: for a traceback; None of one that was recorded.
    """

    outcome: Outcome
    where: str
    what: str
    own_code: bool
    error: BaseException | None = field(default=None, compare=False)

    @staticmethod
    def by(error: BaseException, name: str) -> Lost:
        """name: the environment's."""
        outcome: Outcome = "raised"
        what = error.faults[0].what if isinstance(error, SurefootError) else f"the environment raised {one_line(error)}"
        if isinstance(error, TimeoutError | NotFinite):
            outcome = "not_finite" if isinstance(error, NotFinite) else "timed_out"
            what = f"the environment gave {error}"
        own_code = not isinstance(error, TimeoutError | EnvironmentFault)
        return Lost(outcome, place_in(error, name), _storable(what), own_code, error)


def to_json(said: Reply | Lost) -> dict[str, Any]:
    if isinstance(said, Reply):
        return {"reply": [said.said, said.reward, said.done, said.reason]}
    return {"lost": [said.outcome, said.where, said.what, said.own_code]}


def from_json(value: Mapping[str, Any]) -> Reply | Lost | None:
    """None for what is neither."""
    try:
        if "lost" in value:
            return Lost(*value["lost"])
        said, reward, done, reason = value["reply"]
        return Reply(tuple((str(one), str(two), str(three)) for one, two, three in said), reward, done, reason)
    except (TypeError, ValueError, KeyError):
        return None


def _storable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def reply_of(value: Any, role: str, name: str, *, opening: bool = False) -> Reply:
    """What a call returned, as a reply.

    value: a text; None: nothing more to say; or a mapping of `_KEYS`, whose observation is a text or messages.
    role: of a text.
    name: the environment's name, for faults.
    opening: it is what is said before the first answer.

    Raises InputError for anything else, NotFinite for such a reward, UnicodeEncodeError for a text with half a
    surrogate pair, which can neither be tokenized nor stored.
    """
    if not isinstance(value, Mapping):
        value = {"observation": value}
    if unknown := [str(key) for key in value if key not in _KEYS]:
        raise _wrong(name, f"returned {unknown[0]!r} beside {', '.join(_KEYS)}")
    seen = value.get("observation")
    if seen is not None and not isinstance(seen, str | list | tuple):
        raise _wrong(name, f"returned an observation that is {type(seen).__name__}, neither a text nor messages")
    listed = [{"role": role, "content": seen}] if isinstance(seen, str) else seen or []
    said = tuple(_message(one, name) for one in listed)
    done = value.get("done", not said and not opening)
    if not isinstance(done, bool):
        raise _wrong(name, f"returned done as {type(done).__name__}")
    if not (said or done or opening):
        raise _wrong(name, "returned neither an observation nor done: True")
    reason = str(value.get("reason") or "")
    for text in (reason, *(part for message in said for part in message)):
        text.encode()
    return Reply(said, _reward(value.get("reward"), name), done, reason)


def _message(one: Any, name: str) -> tuple[str, str, str]:
    if not isinstance(one, Mapping) or one.get("role") not in ROLES or not isinstance(one.get("content"), str):
        raise _wrong(name, 'returned a message that is not {"role": "user" or "tool", "content": text}')
    return one["role"], one["content"], str(one.get("name") or "")


def _reward(given: Any, name: str) -> float | None:
    number = given.item() if hasattr(given, "item") else given
    if number is None:
        return None
    if not isinstance(number, numbers.Real):
        raise _wrong(name, f"returned a reward that is {type(number).__name__}")
    if not math.isfinite(number):
        raise NotFinite(f"a reward of {number}")
    return float(number)


def total(replies: Sequence[Reply]) -> float:
    """The sum of the rewards; 0 where none was given, as to an answer that a limit ended before its first turn did."""
    return sum(one.reward or 0.0 for one in replies)


def _wrong(name: str, what: str) -> InputError:
    return InputError(Fault(name, f"the environment {what}", _FIX, code="SF-ENVIRONMENT"))
