"""Which data a step learns from after rollbacks, and which saved states such a run comes by."""

import json

import pytest

from surefoot.training.guard import GuardCounts, Rollback, counted_from, data_step, is_on_the_way
from surefoot.training.report import StepReport
from surefoot.training.state import RunState

FIRST = Rollback(back_to=4, lost=7, ahead=3)
LATER = Rollback(back_to=8, lost=9, ahead=4)
EARLIER = Rollback(back_to=2, lost=6, ahead=7)  # checkpoint-4 was damaged meanwhile


@pytest.mark.parametrize(
    ("rollbacks", "expected"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([FIRST], [1, 2, 3, 4, 8, 9, 10, 11, 12, 13]),
        ([FIRST, LATER], [1, 2, 3, 4, 8, 9, 10, 11, 13, 14]),
        ([FIRST, EARLIER], [1, 2, 10, 11, 12, 13, 14, 15, 16, 17]),
    ],
)
def test_a_step_learns_from_the_data_that_the_last_rollback_before_it_says(rollbacks, expected):
    assert [data_step(rollbacks, step) for step in range(1, 11)] == expected


@pytest.mark.parametrize(
    ("step", "known", "expected"),
    [
        (4, [], True),  # what it goes back to
        (3, [], True),
        (5, [], False),  # written between the checkpoint and the bad step
        (5, [FIRST], True),
        (8, [FIRST], True),
        (9, [FIRST], False),
        (9, [FIRST, LATER], True),
        (5, [EARLIER], False),  # of another run
    ],
)
def test_a_run_comes_by_what_was_saved_before_or_after_its_rollbacks(step, known, expected):
    assert is_on_the_way(step, known, [FIRST, LATER]) == expected


def test_the_state_carries_rollbacks_through_json_and_reads_states_without():
    state = RunState(step=9, rollbacks=(FIRST, LATER))
    told = json.loads(json.dumps(state.to_json()))
    assert RunState.from_json(told) == state
    del told["rollbacks"]
    assert RunState.from_json(told) == RunState(step=9)


def state_after(state, step, decision):
    return state.after_step(
        StepReport(step=step, loss=None, grad_norm=None, lr=0.1, weight=1, tokens=1, examples=(), decision=decision,
                   non_finite="loss" if decision == "non_finite" else None, seconds=0.0)
    )  # fmt: skip


def test_steps_before_the_checkpoint_count_against_the_run_no_longer():
    """Lost at step 9 with those of 1, 3 and 4 among the last ones; the next bad step is the first one again."""
    back = Rollback(back_to=4, lost=9, ahead=5)
    at_checkpoint = RunState(step=4, guard=GuardCounts(skipped=3, recent=(1, 3, 4)))
    on = state_after(RunState(step=4, guard=at_checkpoint.guard, rollbacks=(back,)), 5, "non_finite")
    assert on.guard == GuardCounts(consecutive=1, skipped=4, recent=(5,))
    assert state_after(on, 6, "stepped").guard.recent == (5,)
    twin = state_after(at_checkpoint, 5, "non_finite")  # went back nowhere
    assert twin.guard.recent == (1, 3, 4, 5)


def test_which_count_is_told_by_step_and_rollbacks_alone():
    """So a run that goes on from an older checkpoint than the one it went back to counts as the one it was."""
    assert [counted_from([], step) for step in (1, 9)] == [0, 0]
    assert [counted_from([FIRST, LATER], step) for step in (4, 5, 8, 9, 20)] == [0, 4, 4, 8, 8]
    assert [counted_from([FIRST, EARLIER], step) for step in (2, 3, 4, 5)] == [0, 2, 2, 2]
    older = RunState(step=2, guard=GuardCounts(recent=(1,)), rollbacks=(FIRST,))
    for step in (3, 4):
        older = state_after(older, step, "stepped")
    assert older.guard.recent == (1,)
    assert state_after(older, 5, "stepped").guard.recent == ()


def test_a_state_between_two_bad_steps_is_not_healthy():
    assert RunState().is_healthy
    assert not RunState(guard=GuardCounts(consecutive=1)).is_healthy
    assert RunState(guard=GuardCounts(skipped=2, recent=(1, 2))).is_healthy
