"""What keeps PPO from learning from a rollout that would harm it, and from trying for ever.

Answers without a finite score are left out and counted; more than a twentieth of all answers of the run end it.

A rollout with nothing to learn from is held back: it is logged, its steps move nothing, and the next prompts are
answered. So many in a row end the run.

A policy that is too far from its reference is pulled back: its rollout is learned from with the KL penalty alone. A
rollout that moved nothing would be followed by one just as far away. It counts like the others, so a run that does not
come back ends.

Answers that all got the same score are learned from: the critic may have expected another one, and where good answers
are rare most rollouts have none. A caution is given when the same score comes again for `patience` rollouts. Only where
no rollout of the run had scores that varied, so that the score may tell nothing apart at all, do further ones count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.system.errors import Diverged, Fault

MOST_LEFT_OUT = 0.05  # of a run's answers
FEWEST_LEFT_OUT = 10  # of fewer, a share may be one bad answer in the first rollout


@dataclass(frozen=True)
class Figures:
    """Of one rollout.

    answers: those that count.
    left_out: those without a token or a finite score.
    empty: of those that count, with nothing but a stop token.
    reward, reward_std: of the scores as they came.
    kl: per answer.
    distance: the same by an estimate that is never negative.
    response_length: tokens per answer.
    ended: share of the answers that end with a stop token.
    """

    answers: int
    left_out: int
    empty: int
    reward: float
    reward_std: float
    kl: float
    response_length: float
    ended: float
    explained_variance: float
    distance: float = 0.0

    def metrics(self) -> dict[str, float]:
        """What is logged with every step of the cycle."""
        names = ("reward", "reward_std", "kl", "response_length", "ended", "explained_variance")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Hold:
    """Why a rollout is not learned from as it is.

    what: a sentence.
    fix: what to look at.
    learn: what of the rollout is learned from.
    """

    what: str
    fix: str
    learn: Literal["nothing", "penalty", "all"] = "nothing"


def find_hold(figures: Figures, *, kl_bound: float | None) -> Hold | None:
    """None where the rollout is fit to be learned from by itself; for one score again and again see `same_score`."""
    if figures.answers == 0:
        what = f"none of {figures.left_out} answers got a finite score"
        return Hold(what, "look at what ppo.reward returns for the answers in samples.jsonl")
    if figures.empty == figures.answers:
        what = f"all {figures.answers} answers are empty: a stop token and nothing else"
        return Hold(what, "look at data.template and the prompts' ends; the model must answer them before PPO")
    away = max(figures.kl, figures.distance) if math.isfinite(figures.kl) else figures.kl
    if not math.isfinite(away) or (kl_bound is not None and away > kl_bound):
        what = f"the policy is {away:.4g} nats per answer away from its reference, and ppo.kl_bound is {kl_bound}"
        fix = "raise ppo.kl or set ppo.kl_target, lower optim.lr or ppo.epochs"
        return Hold(what, fix, "penalty" if math.isfinite(away) else "nothing")
    return None


def has_one_score(figures: Figures) -> bool:
    """Whether several answers got the very same score."""
    return figures.answers > 1 and figures.reward_std == 0


def same_score(figures: Figures, rollouts: int) -> Hold:
    """Of a rollout whose answers all got the score that those of the rollouts before it got, `rollouts` in all."""
    what = f"all {figures.answers} answers got the same score, {figures.reward:.4g}, for {rollouts} rollouts"
    fix = "look at what ppo.reward tells apart, and at samples.jsonl; where good answers are rare, raise batch.size"
    return Hold(what, fix, "all")


def ratio_hold(ratio: float | None, bound: float) -> Hold:
    """Of a step that `StepSettings.bounds` held back."""
    shown = "no finite number" if ratio is None or not math.isfinite(ratio) else f"{ratio:.4g}"
    what = f"the mean probability ratio was {shown}, and ppo.ratio_bound is {bound:g}"
    return Hold(what, "lower optim.lr, ppo.epochs or ppo.rollout_batches: answers are learned from for too long")


def too_many_left_out(step: int, left_out: int, requested: int) -> Diverged | None:
    """Of all answers of the run so far. A few say nothing of a share."""
    if left_out < FEWEST_LEFT_OUT or left_out <= MOST_LEFT_OUT * requested:
        return None
    what = f"{left_out} of {requested} answers so far had no token or no finite score, more than {MOST_LEFT_OUT:.0%}"
    return Diverged(
        Fault(f"step {step}", what, "look at what ppo.reward returns for the answers in samples.jsonl", code="SF-PPO")
    )


def no_recovery(step: int, hold: Hold, in_a_row: int) -> Diverged:
    return Diverged(
        Fault(
            f"step {step}",
            f"{hold.what}; {in_a_row} rollouts in a row were held back (ppo.patience)",
            hold.fix,
            code="SF-PPO",
        )
    )
