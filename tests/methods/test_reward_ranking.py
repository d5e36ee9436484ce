"""How sure an accuracy on so many pairs is, and when PPO cannot go by it."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.methods.reward import Ranking, evaluated_ranking
from surefoot.report.intervals import wilson

Z = 1.959964


@pytest.mark.parametrize(("share", "count"), [(0.48, 200), (0.0, 4), (1.0, 10), (0.75, 6)])
def test_the_interval_is_where_the_share_is_as_far_off_as_chance_goes(share, count):
    """Wilson's bounds are the roots of (p - x)² = z² x (1 - x) / n."""
    wide = Z**2 / count
    roots = np.sort(np.roots([1 + wide, -2 * share - wide, share**2]))
    assert wilson(share, count) == pytest.approx(roots, abs=1e-9)
    assert wilson(share, 2 * count) != pytest.approx(roots, abs=1e-3)  # twin


@pytest.mark.parametrize(
    ("accuracy", "pairs", "worth"),
    [
        (0.48, 200, False),
        (0.6, 100_000, False),
        (0.61, 100_000, True),
        (0.61, 50, False),
        (0.7, 10, False),
        (1, 10, True),
    ],
)
def test_what_is_poor_or_may_be_chance_is_a_caution(accuracy, pairs, worth):
    ranking = Ranking(accuracy, pairs)
    assert (ranking.caution is None) == worth
    low, high = ranking.interval
    assert worth or all(number in str(ranking.caution) for number in (f"{accuracy:.1%}", f"{low:.1%}", f"{high:.1%}"))


def test_results_without_pairs_tell_nothing():
    assert evaluated_ranking({"eval_reward_accuracy": 0.7, "eval_pairs": 20}) == Ranking(0.7, 20)
    assert evaluated_ranking({"eval_reward_accuracy": None, "eval_pairs": 20}) is None
    assert evaluated_ranking({"eval_reward_accuracy": 0.7, "eval_answers": 20}) is None  # of stage kto
    assert evaluated_ranking({"train_loss": 0.7}) is None
