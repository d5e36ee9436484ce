"""State that GRPO carries from step to step: the current rollout's answers, and counts of answers without a score and
of rollouts without spread. Saved in checkpoints: numbers in state.json, tensors in stage.safetensors.

Answers without a score are left out and counted; if they exceed a twentieth of the run's answers, the run ends. Groups
in which all answers have the same score teach nothing. If no group of `patience` rollouts in a row has any spread, a
caution follows, and the run ends after as many again if none ever had any: the prompts are too hard or too easy, or the
reward distinguishes nothing. If there was spread before, the run ends after ten times `patience`: the policy has
collapsed, and will not recover. A policy whose scores are the best of the run has solved its task, and goes on.

A run that ends without a group with spread, or without a non-zero gradient, has learned nothing and publishes nothing
(`GroupMemory.check_end`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from surefoot.data.batching.groups import GroupEpisode, groups_from_tensors, groups_to_tensors
from surefoot.data.batching.rollouts import Cycles
from surefoot.methods.grpo.alongside import Alongside
from surefoot.methods.method import Notify
from surefoot.methods.ppo.holds import too_many_left_out
from surefoot.methods.rollouts import require_same, under
from surefoot.system.errors import Diverged, Fault, NothingLearned
from surefoot.system.messages import counted
from surefoot.training.report import StepReport

_EPISODES, _AHEAD, _DRAWING = "episodes.", "ahead.{}.", "drawing.{}"
# Multiples of `patience`: rollouts without spread that end a run that never had any, or once had some.
_NEVER, _LOST = 2, 10
_NOTHING = "SF-NOTHING-LEARNED"
_NO_SPREAD = "look at what grpo.rewards tell apart, take prompts neither too hard nor too easy, or raise grpo.group"
_CUT = "lower optim.lr or grpo.epochs, or widen grpo.clip_low and grpo.clip_high"


@dataclass(frozen=True)
class Numbers:
    """Plain values carried from step to step.

    answers, left_out: number of answers so far, and of those without a score.
    flat_in_a_row: consecutive rollouts, up to the last one, without spread in any group.
    cut_in_a_row: consecutive rollouts, up to the last one, in which no answer ended before the limit.
    spread: whether any group of this run has had spread.
    moved: whether any step of this run had a non-zero gradient.
    still_in_a_row: consecutive steps, up to the last one, with answers but a gradient of zero.
    best: highest mean score of a rollout.
    held_in_a_row: consecutive rollouts, up to the last one, that were held back.
    holding: whether the current one is held back.
    metrics: metrics of the current rollout.
    made_with: identity of rewards and their records, by key.
    take_drawn: whether the engine's log-probabilities replace the policy's; decided by the first rollout.
    """

    answers: int = 0
    left_out: int = 0
    flat_in_a_row: int = 0
    cut_in_a_row: int = 0
    spread: bool = False
    moved: bool = False
    still_in_a_row: int = 0
    best: float | None = None
    held_in_a_row: int = 0
    holding: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)
    take_drawn: bool = False


@dataclass(frozen=True)
class RolloutStatistics:
    """Statistics of one rollout.

    answers: number of answers.
    left_out: answers without a score.
    empty: answers that consist of a stop token only.
    groups: number of groups.
    flat: whether no two compared answers have different scores.
    metrics: logged with every step of the cycle.
    """

    answers: int
    left_out: int
    empty: int
    groups: int
    flat: bool
    metrics: Mapping[str, float]


class GroupMemory:
    """The `Memory` of stage grpo.

    episodes: episodes of the current rollout; empty if it was held back.
    ahead: rollouts generated in advance, by number.
    """

    def __init__(self, numbers: Numbers, cycles: Cycles, patience: int, notify: Notify, alongside: Alongside[Any]):
        """notify: shows a message to the user. alongside: rollouts that are still being drawn."""
        self.numbers = numbers
        self.episodes: tuple[GroupEpisode, ...] = ()
        self.ahead: dict[int, tuple[tuple[GroupEpisode, ...], RolloutStatistics]] = {}
        self._cycles, self._patience, self._notify = cycles, patience, notify
        self._alongside = alongside
        self._step = 0

    def restore(self, step: int, carried: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state after step `step`.

        carried, tensors: results of `to_json` and `tensors` at that time; empty before step 1.

        Raises IntegrityError if rewards or records have changed.
        """
        if not carried:
            return
        numbers = dict(carried)
        records = numbers.pop("records")
        waiting, asked = numbers.pop("ahead", []), numbers.pop("drawing", [])
        numbers.setdefault("moved", True)  # earlier versions did not record it
        require_same(self.numbers.made_with, then=numbers["made_with"])
        self.numbers, self._step = Numbers(**numbers), step
        self.episodes = groups_from_tensors(under(_EPISODES, tensors), records)
        self.ahead = {
            one["rollout"]: (
                groups_from_tensors(under(_AHEAD.format(one["rollout"]), tensors), one["records"]),
                RolloutStatistics(**one["figures"]),
            )
            for one in waiting
        }
        self._alongside.asked = [(step, number) for step, number in asked]
        self._alongside.weights = [tensors[_DRAWING.format(place)] for place in range(len(under("drawing.", tensors)))]

    def keep(self, rollouts: range) -> None:
        """Keep only these rollouts generated in advance: after a rollback others may follow."""
        self.ahead = {number: one for number, one in self.ahead.items() if number in rollouts}

    def take_drawn(self) -> None:
        """Use the engine's log-probabilities from the next rollout on. Saved, so that a resumed run does the same."""
        self.numbers = replace(self.numbers, take_drawn=True)

    def begin(self, step: int, episodes: tuple[GroupEpisode, ...], figures: RolloutStatistics) -> None:
        """Begin a cycle with step `step` and these answers.

        Raises Diverged if too many answers have no score, or nothing could be learned for too long.
        """
        old = self.numbers
        scored = figures.answers - figures.left_out
        held = scored == 0 or figures.empty == figures.answers
        mean = figures.metrics.get("reward", -math.inf)
        self.episodes = () if held else episodes
        self.numbers = replace(
            old,
            answers=old.answers + figures.answers,
            left_out=old.left_out + figures.left_out,
            flat_in_a_row=old.flat_in_a_row + 1 if figures.flat else 0,
            cut_in_a_row=0 if figures.metrics.get("ended", 1.0) else old.cut_in_a_row + 1,
            spread=old.spread or not figures.flat,
            best=old.best if held else mean if old.best is None else max(mean, old.best),
            holding=held,
            held_in_a_row=old.held_in_a_row + held,
            metrics=figures.metrics,
        )
        if figures.left_out:
            self._notify(
                f"step {step}: {figures.left_out} of {figures.answers} answers are left out: they have no score"
            )
        if held and figures.empty == figures.answers:
            self._say_held(
                step, f"all {figures.answers} answers are empty", "look at data.template and the prompts' ends"
            )
        elif held:
            self._say_held(step, f"none of {figures.answers} answers has a score", "look at what grpo.rewards return")
        elif figures.flat and not (self.numbers.spread and mean == self.numbers.best):
            self._flat(step, figures)
        if self.numbers.cut_in_a_row == self._patience:
            what = f"no answer of {self._patience} rollouts ended before grpo.max_new_tokens"
            self._notify(f"caution: step {step}: {what}; raise it, or look at data.template and at what ends a turn")
        fix, numbers = "answers.jsonl has the outcome of each reward, with its reason", self.numbers
        if scored and (error := too_many_left_out(step, numbers.left_out, numbers.answers, fix, "SF-GRPO")):
            raise error

    def learned(self, report: StepReport) -> None:
        """Update after a step. Raises Diverged if too many rollouts in a row were held back by a ratio."""
        self._step = report.step
        if report.decision == "held" and self.episodes:
            self.episodes = ()  # the rest of the rollout is just as off-policy
            self.numbers = replace(self.numbers, holding=True, held_in_a_row=self.numbers.held_in_a_row + 1)
            fix = "lower optim.lr, grpo.epochs or grpo.rollout_batches: answers are learned from for too long"
            self._say_held(report.step, report.held, fix)
        if report.decision == "stepped":
            self._look_at_gradient(report)
        if self._cycles.place(report.step).ends and not self.numbers.holding:
            self.numbers = replace(self.numbers, held_in_a_row=0)

    def check_end(self) -> None:
        """Raise NothingLearned if the run that ends here has learned nothing."""
        if self.numbers.answers == self.numbers.left_out:
            what, fix = f"none of {self.numbers.answers} answers had a score", "look at what grpo.rewards return"
        elif not self.numbers.spread:
            what, fix = f"no group had answers with different scores in {self._step} steps", _NO_SPREAD
        elif not self.numbers.moved:
            what, fix = f"all {self._step} steps had a gradient of zero", _CUT
        else:
            return
        raise NothingLearned(Fault("", f"nothing was learned: {what}; nothing is published", fix, _NOTHING))

    def _look_at_gradient(self, report: StepReport) -> None:
        """Check for zero gradients: from scores without spread (reported per rollout), or from a clip that cuts
        everything."""
        still = bool(self.episodes) and report.grad_norm == 0
        in_a_row = self.numbers.still_in_a_row + 1 if still else 0
        moved = self.numbers.moved or bool(report.grad_norm)
        self.numbers = replace(self.numbers, moved=moved, still_in_a_row=in_a_row)
        if in_a_row == self._patience and not self.numbers.flat_in_a_row:
            cut = sum(report.metrics.get(name, 0.0) for name in ("clip_low", "clip_high"))
            what = f"the gradients of {in_a_row} steps in a row were zero, with {cut:.0%} of the tokens cut by the clip"
            self._notify(f"caution: step {report.step}: {what}; {_CUT}")

    def metrics(self) -> Mapping[str, float]:
        return self.numbers.metrics

    def to_json(self) -> Mapping[str, Any]:
        waiting = [
            {"rollout": number, "records": [one.number for one in episodes], "figures": asdict(figures)}
            for number, (episodes, figures) in self.ahead.items()
        ]
        own = {**asdict(self.numbers), "records": [one.number for one in self._unfinished()]}
        drawing = [list(one) for one in self._alongside.asked]
        return own | ({"ahead": waiting} if waiting else {}) | ({"drawing": drawing} if drawing else {})

    def tensors(self) -> Mapping[str, torch.Tensor]:
        parts = {_EPISODES: self._unfinished()}
        parts |= {_AHEAD.format(number): episodes for number, (episodes, _) in self.ahead.items()}
        found = {start + name: one for start, own in parts.items() for name, one in groups_to_tensors(own).items()}
        return found | {_DRAWING.format(place): one for place, one in enumerate(self._alongside.weights)}

    def _unfinished(self) -> tuple[GroupEpisode, ...]:
        """Answers that later steps of this cycle still use."""
        return () if self._step == 0 or self._cycles.place(self._step).ends else self.episodes

    def _say_held(self, step: int, what: str, fix: str) -> None:
        self._notify(f"step {step}: {what}; the rollout is not learned from")
        if self.numbers.held_in_a_row >= self._patience:
            again = f"{what}; {self.numbers.held_in_a_row} rollouts in a row were held back (grpo.patience)"
            raise Diverged(Fault(f"step {step}", again, fix, code="SF-GRPO"))

    def _flat(self, step: int, figures: RolloutStatistics) -> None:
        """React to a rollout without spread in any group."""
        again, mean = self.numbers.flat_in_a_row, figures.metrics.get("reward", 0.0)
        of = f"{counted(figures.groups, 'group')} each, mean {mean:.4g}"
        what = f"no group had answers with different scores for {again} rollouts ({of})"
        fix = _NO_SPREAD
        if self.numbers.spread:
            rare = f"if answers with a score are only rare (at most {self.numbers.best:.4g} in a rollout), {_NO_SPREAD}"
            fix = f"{rare}; if scores have fallen, lower optim.lr or set grpo.kl and begin at an earlier checkpoint"
        if again == self._patience:
            self._notify(f"caution: step {step}: {what}; {fix}")
        elif not self.numbers.spread and again >= _NEVER * self._patience:
            raise NothingLearned(Fault(f"step {step}", f"nothing was learned: {what}", fix, code=_NOTHING))
        elif again >= _LOST * self._patience:
            raise Diverged(Fault(f"step {step}", what, fix, code="SF-GRPO"))
