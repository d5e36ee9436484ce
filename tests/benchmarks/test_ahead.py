"""benchmarks/ahead.py counts as many steps as it is asked for."""

import itertools

import pytest

import ahead


@pytest.mark.parametrize("steps", [1, 8])
def test_a_single_step_has_a_time(steps):
    def counted():
        calls = range(ahead.rollouts_of(steps))  # of the reward, one for each rollout
        return len(list(itertools.pairwise(calls[ahead.WARM_UP :])))

    assert counted() == steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "rollouts_of", lambda steps: steps + ahead.WARM_UP)  # twin
        assert counted() == steps - 1
