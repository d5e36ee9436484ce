"""How often a reward model prefers the better answer, how sure that is, and whether PPO can go by it.

PPO makes the most of whatever the reward model says. One that tells better from worse answers little more often than a
coin does teaches noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.report.shares import wilson
from surefoot.system.few import counted

ENOUGH = 0.6  # as guides to the three steps have it; a coin has 0.5
_COIN = 0.5
_TO_DO = "train it on more or cleaner pairs, for longer, or with another optim.lr"


@dataclass(frozen=True)
class Ranking:
    """accuracy: share of pairs whose better answer has the higher score; equal scores count half."""

    accuracy: float
    pairs: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the accuracy on pairs like these."""
        return wilson(self.accuracy, self.pairs)

    def __str__(self) -> str:
        low, high = self.interval
        share = f"{self.accuracy:.1%} of {counted(self.pairs, 'pair')} (95 % interval {low:.1%} to {high:.1%})"
        return f"the reward model prefers the better answer in {share}"

    @property
    def caution(self) -> str | None:
        """What to do where PPO cannot go by it; None where it can."""
        if self.accuracy <= ENOUGH:
            fault, to_do = f"PPO needs more than {ENOUGH:.0%}, else it learns the reward model's mistakes", _TO_DO
        elif self.interval[0] <= _COIN:
            fault, to_do = "so few pairs do not tell it from a coin", "measure it on more (surefoot evaluate reward)"
        else:
            return None
        return f"{self}: {fault}; {to_do}"


def evaluated_ranking(results: Mapping[str, Any]) -> Ranking | None:
    """Of a reward run's all_results.json; None where no pairs were evaluated."""
    accuracy, pairs = results.get("eval_reward_accuracy"), results.get("eval_pairs")
    return Ranking(accuracy, pairs) if isinstance(accuracy, float) and isinstance(pairs, int) and pairs > 0 else None
