"""What a reward is given, and what it says of each answer.

A score is never silently 0: a reward that raised, took too long or said nothing finite has an outcome of its own, which
is counted and shown, and 0.0 is a score like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["scored", "raised", "timed_out", "not_finite", "not_asked"]
"""What became of asking. scored: there is a number. raised, timed_out: there is none because of the reward. not_finite:
it said NaN or infinity. not_asked: it said None, that it has nothing to say of this answer."""
LOST: tuple[Outcome, ...] = ("raised", "timed_out", "not_finite")  # no score, though there should be one


@dataclass(frozen=True)
class Answers:
    """Answers to be scored, with what they answer: all lists of one length, so that nothing can be shuffled apart.

    prompts, responses: as people read them, without control tokens.
    response_ids: token ids, with the stop token where there is one.
    records: the records that the prompts were read from.
    stopped: whether the answer has an end.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    response_ids: Sequence[Sequence[int]]
    records: Sequence[Mapping[str, Any]]
    stopped: Sequence[bool]

    def __len__(self) -> int:
        return len(self.responses)

    def one(self, place: int) -> Answers:
        """A single one."""
        part = slice(place, place + 1)
        return Answers(
            self.prompts[part], self.responses[part], self.response_ids[part], self.records[part], self.stopped[part]
        )


@dataclass(frozen=True)
class Score:
    """Of one answer by one reward. value: NaN where there is none. reason: in the reward's words, or the fault."""

    value: float
    reason: str = ""
    outcome: Outcome = "scored"


Grade = Callable[[Answers], Sequence[Score]]


def scored(value: float, reason: str = "") -> Score:
    """NaN and infinity are no scores."""
    if math.isfinite(value):
        return Score(float(value), reason)
    return Score(math.nan, reason or f"the reward returned {value}", "not_finite")
