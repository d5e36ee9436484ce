"""What keeps PPO from learning from a rollout that would harm it, and from trying for ever.

A brake holds a rollout back: it is logged, its steps move nothing, and the next prompts are answered. So many in a row
end the run.

One case is no fault: a policy that has solved its task gets the same score for every answer, and there is nothing left
to learn from. It is told from a broken score by what was seen before: scores that varied, and were never higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.errors import Diverged, Fault


@dataclass(frozen=True)
class Figures:
    """Of one rollout. answers: those that count; left_out: those without a token or a finite score; empty: of those
    that count, with nothing but a stop token. reward, reward_std: of the scores as they came. kl: per answer.
    response_length: tokens per answer. ended: share of the answers that end with a stop token."""

    answers: int
    left_out: int
    empty: int
    reward: float
    reward_std: float
    kl: float
    response_length: float
    ended: float
    explained_variance: float

    def metrics(self) -> dict[str, float]:
        """What is logged with every step of the cycle."""
        names = ("reward", "reward_std", "kl", "response_length", "ended", "explained_variance")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Brake:
    """what: a sentence. fix: what to look at. harmless: counts nothing towards the end of the run."""

    what: str
    fix: str
    harmless: bool = False


def find_brake(figures: Figures, *, kl_bound: float | None, best: float | None) -> Brake | None:
    """best: the highest mean score of an earlier rollout whose scores varied; None where there was none."""
    if figures.answers == 0:
        what = f"none of {figures.left_out} answers got a finite score"
        return Brake(what, "look at what ppo.reward returns for the answers in samples.jsonl")
    if figures.empty == figures.answers:
        what = f"all {figures.answers} answers are empty: a stop token and nothing else"
        return Brake(what, "look at data.template and the prompts' ends; the model must answer them before PPO")
    if not math.isfinite(figures.kl) or (kl_bound is not None and figures.kl > kl_bound):
        what = f"the policy is {figures.kl:.4g} nats per answer away from its reference, and ppo.kl_bound is {kl_bound}"
        return Brake(what, "raise ppo.kl or set ppo.kl_target, lower optim.lr or ppo.epochs")
    if figures.answers > 1 and figures.reward_std == 0:
        if best is not None and figures.reward >= best:
            what = (
                f"all {figures.answers} answers got the best score so far, {figures.reward:.4g}: nothing to learn from"
            )
            return Brake(what, "the task is solved, or the score has a ceiling", harmless=True)
        what = f"all {figures.answers} answers got the same score, {figures.reward:.4g}"
        return Brake(
            what, "look at what ppo.reward tells apart, and at samples.jsonl: the policy may say one thing only"
        )
    return None


def ratio_brake(ratio: float | None, bound: float) -> Brake:
    """Of a step that `StepSettings.bounds` held back."""
    shown = "no finite number" if ratio is None or not math.isfinite(ratio) else f"{ratio:.4g}"
    what = f"the mean probability ratio was {shown}, and ppo.ratio_bound is {bound:g}"
    return Brake(what, "lower optim.lr, ppo.epochs or ppo.rollout_batches: answers are learned from for too long")


def no_recovery(step: int, brake: Brake, in_a_row: int) -> Diverged:
    return Diverged(
        Fault(f"step {step}", f"{brake.what}; {in_a_row} rollouts in a row were held back (ppo.patience)", brake.fix)
    )
