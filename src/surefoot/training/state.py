"""Everything of a run that changes besides weights and moments: a few numbers, written to `state.json`.

Learning rate, data order and random draws are functions of the step and are therefore not here. What is: counts and
times, the loss scale of fp16 (Micikevicius et al. 2018, "Mixed Precision Training"; rule and constants of torch's
GradScaler, as a value: the scale is a power of two, so scaling and unscaling are exact unless something overflows or
underflows), and the best evaluation so far. Which result is best a `Goal` decides: the loss, which should fall, or a
metric, which should rise. A metric of few examples ties often: then the lower evaluation loss decides, and where that
is the same too, the earlier step stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from surefoot.training.guard import GuardCounts, Norms, Rollback, counted_from, norms_after
from surefoot.training.report import EvalReport, StepReport, added_loads


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, by the run's goal.

    loss: of that evaluation, where the goal is a metric; None where it was not finite, or was not yet written down when
        the checkpoint was saved. A known one wins a tie against it.
    """

    step: int
    value: float
    loss: float | None = None

    def loses_tie(self, value: float, loss: float | None) -> bool:
        """Whether an evaluation with the same value and this loss is the better one."""
        return value == self.value and loss is not None and (self.loss is None or loss < self.loss)


Beside = Literal["set-up", "compile", "batches", "evaluation", "saving", "other"]
BESIDE: tuple[Beside, ...] = get_args(Beside)
BEFORE: tuple[Beside, ...] = ("set-up", "compile")  # of these, what comes before the first step


@dataclass(frozen=True)
class RunState:
    """What changes in a run besides weights and moments.

    step: optimizer steps done.
    tokens, supervised: real input tokens and loss tokens so far.
    scale: fp16 only.
    loss_sum, loss_weight: of the steps that moved the weights; their quotient is the mean training loss.
    evaluated: the last step after which an evaluation ran; -1 before the first.
    stale: evaluations since the best one.
    norms: gradient norms that the next one is held against.
    rollbacks: those of the run so far, first to last.
    stage: what the stage carries besides, in plain values.
    seconds: time spent in steps, over all sessions.
    beside: seconds that went by outside of them, by what took them (`BESIDE`), as far as the checkpoint knows that a
        session went on from.
    load: of a mixture's layers, how many tokens went to each expert so far.
    trackers: under which id each tracker knows the run. Two equal runs share all but these three.
    """

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    loss_sum: float = 0.0
    loss_weight: int = 0
    guard: GuardCounts = field(default_factory=GuardCounts)
    scale: LossScale | None = None
    best: Best | None = None
    evaluated: int = -1
    stale: int = 0
    norms: Norms = ()
    rollbacks: tuple[Rollback, ...] = ()
    stage: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    beside: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)

    def after_step(self, report: StepReport) -> RunState:
        scale = self.scale
        if scale is not None and report.decision == "stepped":
            scale = scale.after_step()
        elif scale is not None and report.decision == "scaler":
            scale = scale.after_overflow()
        loss_sum, loss_weight, norms = self.loss_sum, self.loss_weight, self.norms
        if report.decision == "stepped" and report.loss is not None and report.grad_norm is not None:
            loss_sum, loss_weight = loss_sum + report.loss * report.weight, loss_weight + report.weight
            norms = norms_after(norms, report.grad_norm)
        since = counted_from(self.rollbacks, report.step)
        return dataclasses.replace(
            self,
            step=report.step,
            tokens=self.tokens + report.tokens,
            supervised=self.supervised + report.weight,
            loss_sum=loss_sum,
            loss_weight=loss_weight,
            guard=self.guard.after(report.step, report.decision, spiked=report.spike is not None, since=since),
            scale=scale,
            norms=norms,
            seconds=self.seconds + report.seconds,
            load=added_loads(self.load, report.load),
        )

    def spent(self, what: Beside, seconds: float) -> RunState:
        """With time that went by outside of steps."""
        return dataclasses.replace(self, beside={**self.beside, what: self.beside.get(what, 0.0) + max(0.0, seconds)})

    @property
    def mean_loss(self) -> float | None:
        """Over the supervised tokens of all steps that moved the weights; None before the first."""
        return self.loss_sum / self.loss_weight if self.loss_weight else None

    @property
    def is_healthy(self) -> bool:
        """Whether a run can restart from here: the last step was not refused as non-finite."""
        return self.guard.consecutive == 0

    def after_evaluation(self, report: EvalReport, goal: Goal, min_delta: float) -> RunState:
        """A new best must be better at all, or as good with a lower loss; to reset `stale` it must be better by more
        than min_delta, which a tie never is."""
        value, loss = goal.value(report), goal.loss_of(report)
        gain = goal.gain(value, None if self.best is None else self.best.value)
        tie_won = self.best is not None and self.best.loses_tie(value, loss)
        best = Best(report.step, value, loss) if gain > 0 or tie_won else self.best
        return dataclasses.replace(
            self, best=best, evaluated=report.step, stale=0 if gain > max(0.0, min_delta) else self.stale + 1
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunState:
        return cls(
            **{
                **data,
                "guard": GuardCounts(**{**data["guard"], "recent": tuple(data["guard"].get("recent", ()))}),
                "norms": tuple(data.get("norms", ())),
                "load": {name: tuple(counts) for name, counts in data.get("load", {}).items()},
                "rollbacks": tuple(Rollback(**one) for one in data.get("rollbacks", ())),
                "scale": LossScale(**data["scale"]) if data["scale"] else None,
                "best": Best(**data["best"]) if data["best"] else None,
            }
        )


LOSS = "loss"


@dataclass(frozen=True)
class Goal:
    """Which evaluation result a run watches.

    name: "loss", or one of the evaluation's metrics.
    """

    name: str = LOSS

    def value(self, report: EvalReport) -> float:
        return report.loss if self.name == LOSS else report.metrics[self.name]

    def loss_of(self, report: EvalReport) -> float | None:
        """What decides a tie: the evaluation loss beside a metric; None where it is the value itself, or not finite."""
        return report.loss if self.name != LOSS and math.isfinite(report.loss) else None

    def gain(self, value: float, best: float | None) -> float:
        """By how much `value` is better than the best so far; infinite for the first, NaN or negative for no gain."""
        if not math.isfinite(value):
            return -math.inf
        if best is None:
            return math.inf
        return best - value if self.name == LOSS else value - best


INITIAL = 65536.0
GROWTH_INTERVAL = 2000  # finite steps before the scale doubles
SMALLEST = 1.0  # an overflow here is no longer the scale's fault
LARGEST = 2.0**24  # beyond this a growing scale only brings overflows of its own


@dataclass(frozen=True)
class LossScale:
    scale: float = INITIAL
    good_steps: int = 0

    def after_step(self) -> LossScale:
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(min(LARGEST, self.scale * 2.0), 0)

    def after_overflow(self) -> LossScale:
        return LossScale(max(SMALLEST, self.scale / 2.0), 0)

    @property
    def can_fall(self) -> bool:
        return self.scale > SMALLEST
