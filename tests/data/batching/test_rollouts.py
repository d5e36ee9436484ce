"""Cycles of PPO: every prompt once per epoch, every answer once per pass, as functions of the step alone."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.data.batching.order import Mixture
from surefoot.data.batching.rollouts import Cycles, Place


def cycles(prompts: int, size: int = 4, batches: int = 1, epochs: int = 1) -> Cycles:
    return Cycles(Mixture((prompts,), (prompts,)), size, batches, epochs)


def test_places_of_a_small_run_written_out():
    # 11 prompts, 2 batches of 4 to a rollout: a cycle of 8 prompts with 2 * 2 steps, one of 3 prompts with 1 * 2.
    made = cycles(11, size=4, batches=2, epochs=2)
    assert made.steps_per_epoch == 6
    assert [made.place(step) for step in range(1, 9)] == [
        *(Place(0, number, 4) for number in range(4)),
        *(Place(1, number, 2) for number in range(2)),
        Place(2, 0, 4),
        Place(2, 1, 4),
    ]
    assert [place.ends for place in map(made.place, range(1, 7))] == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("prompts", "size", "batches", "epochs"), [(11, 4, 2, 2), (8, 4, 1, 1), (5, 8, 3, 2), (9, 2, 3, 3)]
)
def test_an_epoch_answers_every_prompt_once_and_every_pass_learns_from_every_answer_once(
    prompts, size, batches, epochs
):
    made = cycles(prompts, size, batches, epochs)
    for epoch in range(2):
        answered, learned = [], []
        for step in range(epoch * made.steps_per_epoch + 1, (epoch + 1) * made.steps_per_epoch + 1):
            place = made.place(step)
            asked = made.prompts(5, place.rollout)
            if place.begins:
                answered += list(asked)
            chosen = made.episodes(5, place)
            assert 0 < len(chosen) <= size
            learned += list(asked[chosen])
        assert sorted(answered) == list(range(prompts))
        assert sorted(learned) == sorted(list(range(prompts)) * epochs)


def test_passes_have_orders_of_their_own_and_repeat_for_the_same_seed():
    made = cycles(64, size=64, epochs=2)
    first, second = made.episodes(5, made.place(1)), made.episodes(5, made.place(2))
    assert first.tolist() != second.tolist()
    assert np.array_equal(first, made.episodes(5, made.place(1)))
    assert first.tolist() != made.episodes(6, made.place(1)).tolist()
