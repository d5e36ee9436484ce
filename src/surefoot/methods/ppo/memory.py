"""State that PPO carries from step to step: the current rollout, the KL coefficient, counts of held rollouts, the
average.

All of it is saved in checkpoints: numbers in state.json, tensors in stage.safetensors. Episodes are saved only for a
checkpoint inside a cycle, since the next cycle makes new ones.

`Average` is the moving average of the policy's weights (Polyak averaging, as in DeepSpeed-Chat's `--enable_ema`):

    average = decay * average + (1 - decay) * weight      after every step that changed the weights

It is stored in fp32 on the CPU, and saved as a separate model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.rollouts import Cycles, Episode, episodes_from_tensors, episodes_to_tensors
from surefoot.methods.losses.ppo import next_coefficient
from surefoot.methods.method import Notify
from surefoot.methods.ppo.holds import (
    MOST_LEFT_OUT,
    Hold,
    RolloutStatistics,
    find_hold,
    has_one_score,
    no_recovery,
    ratio_hold,
    same_score,
    too_many_left_out,
)
from surefoot.methods.rollouts import require_same, under
from surefoot.system.messages import counted
from surefoot.training.report import StepReport

_EPISODES, _AVERAGE = "episodes.", "average."


@dataclass(frozen=True)
class Numbers:
    """Plain values that PPO carries from step to step.

    kl_coef: KL coefficient of the next rollout.
    best: highest mean score of a rollout with varying scores.
    held_in_a_row, held: number of held rollouts.
    same, same_in_a_row: the score shared by all answers of the last rollout (None if they varied), and for how many
        rollouts.
    asked, left_out: number of answers so far, and how many of them were left out.
    holding: whether a hold was already counted for this cycle.
    metrics: metrics of the current rollout.
    made_with: identity of scores and texts, by key.
    take_drawn: whether the engine's log-probabilities replace the actor's; decided by the first rollout.
    """

    kl_coef: float
    best: float | None = None
    held_in_a_row: int = 0
    held: int = 0
    same: float | None = None
    same_in_a_row: int = 0
    asked: int = 0
    left_out: int = 0
    holding: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)
    take_drawn: bool = False


@dataclass(frozen=True)
class Limits:
    """Limits from the config keys of the same names."""

    kl_target: float | None
    kl_horizon: float
    kl_bound: float | None
    ratio_bound: float
    patience: int


class PpoMemory:
    """The `Memory` of stage ppo.

    episodes: episodes of the current rollout; empty if it was held back.
    notify: shows a message to the user.
    """

    def __init__(
        self,
        numbers: Numbers,
        cycles: Cycles,
        limits: Limits,
        average: Average | None,
        notify: Notify,
    ):
        self.numbers = numbers
        self.episodes: tuple[Episode, ...] = ()
        self._cycles, self._limits, self._average, self._notify = cycles, limits, average, notify
        self._step = 0

    def restore(self, step: int, carried: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state after step `step`.

        carried, tensors: results of `to_json` and `tensors` at that time.

        Raises IntegrityError if scores or texts have changed. Checkpoints of earlier versions from before step 1 carry
        nothing; then the initial state stays.
        """
        if not carried:
            return
        numbers = dict(carried)
        records = numbers.pop("records")
        require_same(self.numbers.made_with, then=numbers["made_with"])
        numbers.setdefault("asked", math.ceil(numbers["left_out"] / MOST_LEFT_OUT))  # older states lack the count
        self.numbers, self._step = Numbers(**numbers), step
        self.episodes = episodes_from_tensors(under(_EPISODES, tensors), records)
        if self._average is not None:
            self._average.restore(under(_AVERAGE, tensors))

    def take_drawn(self) -> None:
        """Use the engine's log-probabilities from the next rollout on. Saved, so that a resumed run does the same."""
        self.numbers = replace(self.numbers, take_drawn=True)

    def begin(
        self,
        step: int,
        episodes: tuple[Episode, ...],
        figures: RolloutStatistics,
        penalty: Callable[[], tuple[Episode, ...]] = tuple,
    ) -> None:
        """Begin a cycle with step `step` and these episodes.

        penalty: makes the same episodes with the KL penalty only, for a policy that must be pulled back.

        Raises Diverged if too many rollouts in a row were held back.
        """
        limits, old = self._limits, self.numbers
        hold = find_hold(figures, kl_bound=limits.kl_bound)
        same = figures.reward if has_one_score(figures) else None
        again = 0 if same is None else old.same_in_a_row + 1 if same == old.same else 1
        self.episodes = episodes if hold is None else penalty() if hold.learn == "penalty" else ()
        varied = figures.answers > 0 and figures.reward_std > 0
        coefficient = old.kl_coef
        if math.isfinite(figures.kl) and figures.answers:
            coefficient = next_coefficient(
                old.kl_coef,
                figures.kl,
                target=limits.kl_target,
                horizon=limits.kl_horizon,
                answers=figures.answers,
            )
        self.numbers = replace(
            old,
            kl_coef=coefficient,
            best=max(figures.reward, -math.inf if old.best is None else old.best) if varied else old.best,
            same=same,
            same_in_a_row=again,
            asked=old.asked + figures.answers + figures.left_out,
            left_out=old.left_out + figures.left_out,
            holding=False,
            metrics={**figures.metrics(), "kl_coef": old.kl_coef},
        )
        if figures.left_out and figures.answers:
            left_out = counted(figures.left_out, "answer")
            self._notify(f"step {step}: {left_out} left out: no finite score")
        if hold:
            self._hold(step, hold)
        elif again >= limits.patience:
            self._note_same(step, same_score(figures, again), again, figures.reward)
        # Rollouts without any score fall under `patience`; their answers are counted with the next that has scores.
        fix = "look at what ppo.reward returns for the answers in samples.jsonl"
        numbers = self.numbers
        if figures.answers and (error := too_many_left_out(step, numbers.left_out, numbers.asked, fix, "SF-PPO")):
            raise error

    def learned(self, report: StepReport) -> None:
        self._step = report.step
        if report.decision == "stepped" and self._average is not None:
            self._average.update()
        if report.decision == "held" and not self.numbers.holding:
            self._hold(report.step, ratio_hold(report.metrics.get("ratio"), self._limits.ratio_bound))
        if self._cycles.place(report.step).ends and not self.numbers.holding:
            self.numbers = replace(self.numbers, held_in_a_row=0)

    def metrics(self) -> Mapping[str, float]:
        return self.numbers.metrics

    def to_json(self) -> Mapping[str, Any]:
        return {**asdict(self.numbers), "records": [one.number for one in self._unfinished()]}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        average = {} if self._average is None else self._average.tensors()
        return {
            **{_EPISODES + name: tensor for name, tensor in episodes_to_tensors(self._unfinished()).items()},
            **{_AVERAGE + name: tensor for name, tensor in average.items()},
        }

    def _unfinished(self) -> tuple[Episode, ...]:
        """Episodes that later steps of this cycle still use."""
        return () if self._step == 0 or self._cycles.place(self._step).ends else self.episodes

    def _note_same(self, step: int, hold: Hold, again: int, score: float) -> None:
        """React to repeated equal scores. A policy at its best score ever has solved the task. If scores have varied
        before, rewards are rare rather than broken."""
        best = self.numbers.best
        if again == self._limits.patience and (best is None or score < best):
            self._notify(f"caution: step {step}: {hold.what}; {hold.fix}")
        elif again > self._limits.patience and best is None:
            self._hold(step, hold)

    def _hold(self, step: int, hold: Hold) -> None:
        old = self.numbers
        in_a_row = old.held_in_a_row + 1
        self.numbers = replace(old, holding=True, held=old.held + 1, held_in_a_row=in_a_row)
        self._notify(f"step {step}: {hold.what}; {_THEN[hold.learn]}")
        if in_a_row >= self._limits.patience:
            raise no_recovery(step, hold, in_a_row)


_THEN = {
    "nothing": "not learned from",
    "penalty": "learned from with the KL penalty alone, to come back",
    "all": "no rollout of this run had scores that vary",
}


class Average:
    """The moving average of a model's weights.

    parameters: trained parameters by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self._parameters = parameters
        self._decay = decay
        self._averages = {name: _copy(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach().float().cpu(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages as weights while the block runs, then restore its own, bit for bit."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                # A copy, so that nothing that is done to the weights in the block changes the average.
                parameter.data = self._averages[name].to(parameter.device, parameter.dtype, copy=True)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._averages)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._averages = {name: tensors[name].clone() for name in self._averages}


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    # fp32: bf16 would round an update of a hundredth, as by a decay of 0.99, away.
    return parameter.detach().to("cpu", torch.float32, copy=True)
