"""Which data a step learns from after rollbacks, and which saved states such a run comes by."""

import json

import pytest

from surefoot.training.guard import GuardCounts
from surefoot.training.rollback import Rollback, data_step, is_on_the_way
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


def test_a_state_between_two_bad_steps_is_not_healthy():
    assert RunState().is_healthy
    assert not RunState(guard=GuardCounts(consecutive=1)).is_healthy
    assert RunState(guard=GuardCounts(skipped=2, recent=(1, 2))).is_healthy
