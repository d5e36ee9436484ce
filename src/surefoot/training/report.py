"""What one optimizer step did: a read-only record for logs, progress and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch is not needed to read a log
    from surefoot.data.batch import RecordName

Decision = Literal["stepped", "non_finite", "scaler"]


@dataclass(frozen=True)
class StepReport:
    """step counts from 1. loss: mean over the step's weight, None when non-finite. grad_norm: before clipping.
    decision: "stepped", or why the optimizer did not move. seconds: the step alone, without evaluation or saving."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    weight: int
    tokens: int
    examples: tuple[RecordName, ...]
    decision: Decision
    non_finite: str | None  # "loss" | "grad_norm"
    seconds: float
    scale: float | None = None  # gradient scale, fp16 only


@dataclass(frozen=True)
class EvalReport:
    """Token-weighted, after `step` optimizer steps. perplexity: exp(loss). accuracy: share of supervised tokens, None
    where the objective does not count them. metrics: by name, of generated answers (there higher is better) and
    whatever else the objective sums up. seconds: all of it."""

    step: int
    loss: float
    perplexity: float
    accuracy: float | None
    weight: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
