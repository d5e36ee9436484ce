"""Input and output of a reward.

A score is never silently 0: a reward that raises, times out or returns something non-finite has its own outcome, which
is counted and shown; 0.0 is a score like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["scored", "raised", "timed_out", "not_finite", "not_asked"]
"""Outcome of a reward. scored: there is a number. raised, timed_out: the reward failed. not_finite: it returned NaN or
infinity. not_asked: it returned None, because it does not apply to this answer."""
LOST: tuple[Outcome, ...] = ("raised", "timed_out", "not_finite")  # no score, though there should be one


@dataclass(frozen=True)
class Answers:
    """Answers to score, with their prompts: lists of equal length.

    prompts, responses: texts without control tokens.
    response_ids: token ids of the responses, with the stop token if there is one.
    records: the records of the prompts.
    stopped: whether the answer ended with a stop token.
    by_models: scores of reward models, by name; None for an answer without tokens.
    by_environment: the environment's scores; empty without one.
    turns: texts of each answer in turns: the model's, what the environment said, the model's, ...; a response is the
        last of them. Empty without an environment.
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    response_ids: Sequence[Sequence[int]]
    records: Sequence[Mapping[str, Any]]
    stopped: Sequence[bool]
    by_models: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    by_environment: Sequence[Score] = ()
    turns: Sequence[Sequence[str]] = ()

    def __len__(self) -> int:
        return len(self.responses)

    def one(self, place: int) -> Answers:
        """Select a single answer."""
        part = slice(place, place + 1)
        return Answers(
            self.prompts[part],
            self.responses[part],
            self.response_ids[part],
            self.records[part],
            self.stopped[part],
            {name: scores[part] for name, scores in self.by_models.items()},
            self.by_environment[part],
            self.turns[part],
        )


@dataclass(frozen=True)
class Score:
    """Score of one answer by one reward. value: NaN if there is none. reason: the reward's text, or the fault."""

    value: float
    reason: str = ""
    outcome: Outcome = "scored"


Grade = Callable[[Answers], Sequence[Score]]


def scored(value: float, reason: str = "") -> Score:
    """Make a score; NaN and infinity become the outcome not_finite."""
    if math.isfinite(value):
        return Score(float(value), reason)
    return Score(math.nan, reason or f"the reward returned {value}", "not_finite")
