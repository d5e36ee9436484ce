"""Prevent PPO from learning from harmful rollouts, and from continuing without progress.

Answers without a finite score are left out and counted; if they exceed a twentieth of all answers, the run ends.

A rollout that is useless for learning is held back: it is logged, its steps change nothing, and the next prompts are
answered. `patience` held rollouts in a row end the run.

A policy too far from its reference is pulled back: it learns from its rollout with the KL penalty only. Skipping the
rollout would leave it just as far away. It counts as held, so that a run that does not come back ends.

Rollouts in which all answers have the same score are used: the critic may have expected another one, and with rare good
answers most rollouts have none. A caution follows if the same score repeats for `patience` rollouts. Further ones count
as held only if no rollout of the run had varying scores, because the score may then distinguish nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.system.errors import Diverged, Fault

MOST_LEFT_OUT = 0.05  # fraction of a run's answers
FEWEST_LEFT_OUT = 10  # with fewer, one bad answer in the first rollout would exceed the fraction


@dataclass(frozen=True)
class RolloutStatistics:
    """Statistics of one rollout.

    answers: answers that count.
    left_out: answers without a token or a finite score.
    empty: counted answers that consist of a stop token only.
    reward, reward_std: of the raw scores.
    kl: per answer.
    distance: the same KL by an estimate that is never negative.
    response_length: tokens per answer.
    ended: fraction of answers that end with a stop token.
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
        """Metrics logged with every step of the cycle."""
        names = ("reward", "reward_std", "kl", "response_length", "ended", "explained_variance")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Hold:
    """Why a rollout is not used for learning as it is.

    what: the problem, as a sentence.
    fix: what to check.
    learn: which part of the rollout is used.
    """

    what: str
    fix: str
    learn: Literal["nothing", "penalty", "all"] = "nothing"


def find_hold(figures: RolloutStatistics, *, kl_bound: float | None) -> Hold | None:
    """Return None if the rollout can be used as it is; for repeated equal scores see `same_score`."""
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


def has_one_score(figures: RolloutStatistics) -> bool:
    """Whether several answers have exactly the same score."""
    return figures.answers > 1 and figures.reward_std == 0


def same_score(figures: RolloutStatistics, rollouts: int) -> Hold:
    """Make the hold for answers that all have the same score, `rollouts` times in a row."""
    what = f"all {figures.answers} answers got the same score, {figures.reward:.4g}, for {rollouts} rollouts"
    fix = "look at what ppo.reward tells apart, and at samples.jsonl; where good answers are rare, raise batch.size"
    return Hold(what, fix, "all")


def ratio_hold(ratio: float | None, bound: float) -> Hold:
    """Make the hold for a step stopped by `StepSettings.bounds`."""
    shown = "no finite number" if ratio is None or not math.isfinite(ratio) else f"{ratio:.4g}"
    what = f"the mean probability ratio was {shown}, and ppo.ratio_bound is {bound:g}"
    return Hold(what, "lower optim.lr, ppo.epochs or ppo.rollout_batches: answers are learned from for too long")


def too_many_left_out(step: int, left_out: int, requested: int, fix: str, code: str) -> Diverged | None:
    """Return an error if too many of the run's answers were left out. A few do not count.

    fix, code: of the method.
    """
    if left_out < FEWEST_LEFT_OUT or left_out <= MOST_LEFT_OUT * requested:
        return None
    what = f"{left_out} of {requested} answers so far had no token or no finite score, more than {MOST_LEFT_OUT:.0%}"
    return Diverged(Fault(f"step {step}", what, fix, code=code))


def no_recovery(step: int, hold: Hold, in_a_row: int) -> Diverged:
    return Diverged(
        Fault(
            f"step {step}",
            f"{hold.what}; {in_a_row} rollouts in a row were held back (ppo.patience)",
            hold.fix,
            code="SF-PPO",
        )
    )
