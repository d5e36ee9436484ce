"""Holds: what is held back, what counts, when the run ends; and the memory that counts it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.faults import gives, raises_fault
from surefoot.data.batching.order import Mixture
from surefoot.data.batching.rollouts import Cycles, Episode
from surefoot.methods.ppo.holds import RolloutStatistics, find_hold, too_many_left_out
from surefoot.methods.ppo.memory import Limits, Numbers, PpoMemory
from surefoot.training.report import Decision, StepReport

GOOD = RolloutStatistics(
    answers=8,
    left_out=0,
    empty=0,
    reward=0.5,
    reward_std=0.3,
    kl=1.0,
    response_length=7.0,
    ended=1.0,
    explained_variance=0.2,
)
SAME = replace(GOOD, reward_std=0.0)
NAN = math.nan
NONE = RolloutStatistics(0, 8, 0, NAN, NAN, NAN, NAN, NAN, NAN)


@pytest.mark.parametrize(
    ("figures", "value"),
    [(NONE, 8), (replace(GOOD, empty=8), 8), (replace(GOOD, kl=50.1), 50.1), (replace(GOOD, kl=NAN), "nan")],
    ids=["no score", "empty", "far", "not finite"],
)
def test_what_meets_a_hold_and_what_is_still_learned(figures, value):
    hold = find_hold(figures, kl_bound=50.0)
    assert hold is not None
    assert gives(hold.what, value)
    assert hold.learn == ("penalty" if figures.kl == 50.1 else "nothing")


@pytest.mark.parametrize("figures", [GOOD, replace(GOOD, empty=7), replace(GOOD, kl=49.9), SAME])
def test_what_is_learned_from(figures):
    assert find_hold(figures, kl_bound=50.0) is None


def test_without_a_bound_no_finite_kl_is_too_much():
    assert find_hold(replace(GOOD, kl=1e9), kl_bound=None) is None


def memory(patience=2, **limits) -> tuple[PpoMemory, list[str]]:
    said: list[str] = []
    given = Limits(
        **{"kl_target": None, "kl_horizon": 100.0, "kl_bound": 50.0, "ratio_bound": 10.0, **limits}, patience=patience
    )
    cycles = Cycles(Mixture((8,), (8,)), size=4, batches=1, epochs=2)
    return PpoMemory(Numbers(kl_coef=0.1), cycles, given, None, said.append), said


def episode(place: int) -> Episode:
    return Episode(place, (1, 2), (3,), place, *(torch.zeros(1) for _ in range(4)))


def report(step: int, decision: Decision = "stepped", ratio: float = 1.0) -> StepReport:
    return StepReport(step, 1.0, 1.0, 1e-3, 4, 12, (), decision, None, 0.1, metrics={"ratio": ratio})


def cycle(
    kept: PpoMemory, first: int, figures: RolloutStatistics, decisions: Sequence[Decision] = ("stepped",) * 2
) -> None:
    kept.begin(first, (episode(0),), figures)
    for number, decision in enumerate(decisions):
        kept.learned(report(first + number, decision))


def test_so_many_in_a_row_end_the_run_and_one_good_rollout_starts_anew():
    kept, said = memory(patience=2)
    cycle(kept, 1, NONE, ("held", "held"))
    assert kept.episodes == ()
    assert kept.numbers.held_in_a_row == 1
    cycle(kept, 3, GOOD)
    assert (kept.numbers.held_in_a_row, kept.numbers.held, len(kept.episodes)) == (0, 1, 1)
    cycle(kept, 5, NONE, ("held", "held"))
    with raises_fault("SF-PPO", "step 7"):
        kept.begin(7, (), replace(GOOD, empty=8))
    assert len(said) == 3


def scores(kept: PpoMemory, *means: float, first: int = 1) -> None:
    """One rollout after the other, each with one score for all of its answers."""
    for number, mean in enumerate(means):
        cycle(kept, first + 2 * number, replace(SAME, reward=mean))
        assert len(kept.episodes) == 1  # learned from


def test_one_score_is_learned_from_and_said_when_it_comes_again():
    kept, said = memory(patience=2)
    scores(kept, 0.0, 1.0, 0.0)
    assert said == []  # the twin: another score each time
    assert kept.numbers.held == 0
    scores(kept, 0.0, first=7)
    (caution,) = said
    assert caution.startswith("caution: step 7: ")
    assert re.findall(r"\d+", caution) == ["7", "8", "0", "2"]  # step, answers, their score, rollouts with it
    assert all(gives(caution, name) for name in ("ppo.reward", "samples.jsonl", "batch.size")), caution
    assert kept.numbers.held_in_a_row == 0


def test_a_score_that_never_varies_ends_the_run_after_the_caution():
    kept, said = memory(patience=2)
    scores(kept, 0.5, 0.5, 0.5)
    with raises_fault("SF-PPO", "step 7"):
        kept.begin(7, (episode(0),), SAME)
    assert len(said) == 3


def test_rare_rewards_never_end_the_run():
    kept, said = memory(patience=2)
    cycle(kept, 1, replace(GOOD, reward=0.1))  # one answer was good once: without this the run ends, see above
    scores(kept, *[0.0] * 20, first=3)
    assert kept.numbers.held == 0
    assert len(said) == 1


def test_a_solved_task_is_no_fault():
    kept, said = memory(patience=1)
    cycle(kept, 1, replace(GOOD, reward=0.9))
    scores(kept, *[1.0] * 9, first=3)
    assert (kept.numbers.held, said) == (0, [])


def test_a_policy_too_far_away_learns_the_penalty_and_ends_the_run_where_it_stays_there():
    kept, said = memory(patience=2)
    far, pulled = replace(GOOD, kl=60.0), (episode(5),)
    kept.begin(1, (episode(0),), far, lambda: pulled)
    assert kept.episodes == pulled
    assert said[0].startswith("step 1: ")
    assert gives(said[0], 60)
    for step in (1, 2):
        kept.learned(report(step))
    assert kept.numbers.held_in_a_row == 1
    cycle(kept, 3, GOOD)  # it came back
    assert kept.numbers.held_in_a_row == 0
    cycle(kept, 5, far)
    with raises_fault("SF-PPO", "step 7"):
        kept.begin(7, (), replace(far, kl=55.0))


def test_a_ratio_counts_once_for_its_rollout():
    kept, said = memory(patience=2)
    kept.begin(1, (episode(0),), GOOD)
    kept.learned(report(1, "held", 12.5))
    kept.learned(report(2, "held", math.inf))
    assert (kept.numbers.held, kept.numbers.held_in_a_row) == (1, 1)
    (line,) = said
    assert line.startswith("step 1: ")
    assert all(gives(line, value) for value in (12.5, "ppo.ratio_bound", 10))
    kept.begin(3, (episode(0),), GOOD)
    with raises_fault("SF-PPO", "step 3"):
        kept.learned(report(3, "held", 11.0))


def test_answers_without_a_score_are_left_out_counted_and_said():
    kept, said = memory()
    cycle(kept, 1, replace(GOOD, left_out=3))
    assert kept.numbers.left_out == 3
    assert said[0].startswith("step 1: ")
    assert gives(said[0], 3)


def test_the_coefficient_is_steered_by_what_was_seen_and_logged_as_it_was_used():
    kept, _ = memory(kl_target=1.0)
    cycle(kept, 1, replace(GOOD, kl=2.0))
    assert kept.metrics()["kl_coef"] == 0.1
    assert kept.numbers.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))
    cycle(kept, 3, NONE, ("held", "held"))
    assert kept.numbers.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))


def test_what_is_logged_is_finite():
    kept, _ = memory()
    cycle(kept, 1, NONE, ("held", "held"))
    assert kept.metrics() == {"kl_coef": 0.1}


def test_a_kl_that_looks_negative_does_not_hide_the_distance():
    hold = find_hold(replace(GOOD, kl=-3.0, distance=60.0), kl_bound=50.0)
    assert hold is not None
    assert hold.learn == "penalty"
    assert all(gives(hold.what, value) for value in (60, "ppo.kl_bound", "50.0"))
    assert find_hold(replace(GOOD, kl=-3.0), kl_bound=50.0) is None  # the twin: by the signed estimate alone


@pytest.mark.parametrize(
    ("left_out", "asked", "ends"), [(9, 9, False), (10, 200, False), (10, 199, True), (11, 220, False)]
)
def test_so_many_left_out_answers_end_the_run(left_out, asked, ends):
    assert (too_many_left_out(4, left_out, asked, "look", "SF-PPO") is not None) == ends


def test_rollouts_without_one_finite_score_count_with_the_next_that_has_some():
    kept, _ = memory(patience=9)
    cycle(kept, 1, NONE, ("held", "held"))
    cycle(kept, 3, NONE, ("held", "held"))
    with raises_fault("SF-PPO", "step 5"):
        kept.begin(5, (episode(0),), GOOD)


def test_a_checkpoint_that_carries_nothing_is_as_the_run_begins():
    kept, _ = memory()
    before = kept.to_json()
    kept.restore(0, {}, {})
    assert kept.to_json() == before


def test_left_out_answers_are_counted_over_rollouts_and_in_states_of_before():
    kept, _ = memory(patience=9)
    cycle(kept, 1, replace(GOOD, left_out=8))
    with raises_fault("SF-PPO", "step 3"):
        kept.begin(3, (episode(0),), replace(GOOD, left_out=8))
    older = dict(kept.to_json())
    del older["asked"]
    kept.restore(4, older, {})
    assert (kept.numbers.left_out, kept.numbers.asked) == (16, 320)
