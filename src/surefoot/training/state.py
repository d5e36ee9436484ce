"""The run's state besides weights and moments, saved in `state.json`.

Learning rate, data order and random draws are functions of the step and need not be saved. The state holds counters and
times, the fp16 loss scale (Micikevicius et al. 2018, "Mixed Precision Training"; rule and constants of torch's
GradScaler; a power of two, so scaling and unscaling are exact except for overflow and underflow), and the best
evaluation so far. A `Goal` says which evaluation is best: lowest loss or highest metric. Metrics over few examples
often tie; then the lower evaluation loss wins, and after that the earlier step.
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

    loss: its evaluation loss if the goal is a metric; None if it was not finite or an older version did not save it, in
        which case a known loss wins the tie.
    """

    step: int
    value: float
    loss: float | None = None

    def loses_tie(self, value: float, loss: float | None) -> bool:
        """Whether an evaluation with this value and loss ties and has the lower loss; if the losses are equal, too,
        whether this one is of step 0, so that weights as good as the untrained are published after training."""
        if value != self.value:
            return False
        if loss == self.loss:  # also if neither has one, because the goal is the loss
            return self.step == 0
        return loss is not None and (self.loss is None or loss < self.loss)


# What a run spends time on outside of optimizer steps.
Overhead = Literal["set-up", "compile", "batches", "evaluation", "saving", "other"]
OVERHEADS: tuple[Overhead, ...] = get_args(Overhead)
BEFORE_FIRST_STEP: tuple[Overhead, ...] = ("set-up", "compile")


@dataclass(frozen=True)
class RunState:
    """The run's state besides weights and moments; its fields are the keys of state.json.

    step: optimizer steps done.
    tokens, supervised: input tokens without padding, and loss tokens, so far.
    scale: fp16 loss scale; None in other precisions.
    loss_sum, loss_weight: totals over steps that updated the weights; their quotient is the mean training loss.
    evaluated: the last step that was evaluated; -1 before the first evaluation.
    stale: evaluations since the best one.
    norms: recent gradient norms, from which spikes are detected.
    rollbacks: the run's rollbacks so far, oldest first.
    stage: plain values that the method carries between steps.
    seconds: time spent in steps, over all sessions.
    beside: `Overhead` -> seconds spent outside of steps; after a resume, as of the checkpoint.
    load: MoE layer -> tokens sent to each expert so far.
    trackers: experiment tracker -> its id of the run.

    Two equal runs differ only in `seconds`, `beside` and `trackers`.
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

    def spent(self, what: Overhead, seconds: float) -> RunState:
        """Return the state with `seconds` added to the time spent on `what`."""
        return dataclasses.replace(self, beside={**self.beside, what: self.beside.get(what, 0.0) + max(0.0, seconds)})

    @property
    def mean_loss(self) -> float | None:
        """Mean training loss over all steps that updated the weights; None before the first."""
        return self.loss_sum / self.loss_weight if self.loss_weight else None

    @property
    def is_healthy(self) -> bool:
        """Whether a run can restart from here: the last step was finite."""
        return self.guard.consecutive == 0

    def after_evaluation(self, report: EvalReport, goal: Goal, min_delta: float) -> RunState:
        """Return the state after an evaluation. Any improvement, or a tie that is won, becomes the new best; only an
        improvement by more than min_delta resets `stale`."""
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
                # States written by older versions lack the keys that are read with `get`.
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
    """The evaluation result that decides which checkpoint is best.

    name: "loss" (lower is better) or a metric of the evaluation (higher is better).
    """

    name: str = LOSS

    def value(self, report: EvalReport) -> float:
        return report.loss if self.name == LOSS else report.metrics[self.name]

    def loss_of(self, report: EvalReport) -> float | None:
        """Return the evaluation loss that decides ties; None if the goal is the loss itself or it is not finite."""
        return report.loss if self.name != LOSS and math.isfinite(report.loss) else None

    def gain(self, value: float, best: float | None) -> float:
        """Return how much better `value` is than the best so far; inf for the first, not positive for no gain."""
        if not math.isfinite(value):
            return -math.inf
        if best is None:
            return math.inf
        return best - value if self.name == LOSS else value - best


INITIAL = 65536.0
GROWTH_INTERVAL = 2000  # finite steps before the scale doubles
SMALLEST = 1.0  # an overflow at this scale is not caused by the scale
LARGEST = 2.0**24  # a larger scale would itself cause overflows


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
