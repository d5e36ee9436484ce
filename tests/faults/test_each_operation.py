"""A save that is ended, or refused, at each of its operations on the disk: older or newer, and nothing half."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from faults.faulty_disk import FaultyDisk, copy_of, operations_of
from faults.histories import HISTORIES, engine_after, loaded, outcome, recovered, save
from helpers.killed import Killed
from helpers.tiers import diagonal
from surefoot.system import disk, durable
from surefoot.system.errors import EnvironmentFault


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Name -> a folder as it is before the interrupted action; made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("before") / "run"
            made[name].mkdir()
            HISTORIES[name].prepare(made[name])
        return made[name]

    return get


def trials(name, kind, prepared, folder):
    """(operation number, its name, the folder after it failed, what was raised), for each operation."""
    history = HISTORIES[name]
    whole = copy_of(prepared(name), folder / "whole")
    operations = operations_of(lambda: history.act(whole))
    assert loaded(whole) == history.allowed[-1]
    for number in range(1, len(operations) + 1):
        run = copy_of(prepared(name), folder / f"{kind}-{number}")
        raised = None
        with FaultyDisk(kind, number).installed() as faulty:
            try:
                history.act(run)
            except (Killed, Exception) as error:
                raised = error
        assert faulty.happened, f"{operations[number - 1]} was not reached"
        yield number, operations[number - 1], run, raised


@pytest.mark.parametrize(("name", "kind"), diagonal(HISTORIES, ["kill", "torn"]))
def test_a_kill_at_any_operation_leaves_the_older_or_the_newer(name, kind, prepared, tmp_path):
    for number, operation, run, raised in trials(name, kind, prepared, tmp_path):
        assert isinstance(raised, Killed), (number, operation)
        wrong = outcome(run, HISTORIES[name])
        assert not wrong, f"killed at {number} ({operation}): {wrong}"
        assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("name", "kind"), diagonal(HISTORIES, ["full", "broken", "short"]))
def test_a_disk_that_fails_at_any_operation_is_exit_3_and_costs_nothing(name, kind, prepared, tmp_path):
    """Clean-up of what is replaced or no longer needed may fail in silence: then the newer one stands."""
    for number, operation, run, raised in trials(name, kind, prepared, tmp_path):
        where = f"{kind} at {number} ({operation}) of {name}"
        halves = kind == "short" and operation == "write"
        if raised is None:
            assert operation == "remove_tree" or halves, where
        else:
            assert isinstance(raised, EnvironmentFault), (where, raised)
            assert raised.exit_code == 3
        left = [path.name for path in run.rglob(".*.tmp") if operation != "remove_tree"]
        assert left == [], where
        wrong = outcome(run, HISTORIES[name])
        assert not wrong, f"{where}: {wrong}"


@pytest.mark.parametrize("name", ["again", "retention"])
def test_a_kill_while_a_killed_save_is_put_right(name, prepared, tmp_path):
    """The recovery may be killed as well, at each of its operations, and again."""
    for number, operation, run, _ in trials(name, "kill", prepared, tmp_path):
        whole = copy_of(run, tmp_path / f"{number}-whole")
        for second in range(1, len(operations_of(partial(recovered, whole))) + 1):
            twice = copy_of(run, tmp_path / f"{number}-{second}")
            with FaultyDisk("torn", second).installed(), pytest.raises(Killed):
                recovered(twice)
            wrong = outcome(twice, HISTORIES[name])
            assert not wrong, f"killed at {number} ({operation}), then at {second} of the recovery: {wrong}"


def test_a_killed_thread_is_no_silent_thread(tmp_path):
    save(tmp_path, 1)
    with FaultyDisk("full", 12).installed(), pytest.raises(EnvironmentFault):
        save(tmp_path, 2, beside=True)
    assert loaded(tmp_path) == (1, 0)


def test_twin_a_save_in_place_is_noticed(tmp_path, monkeypatch):
    """Without staging, some kill leaves a folder that is taken for a checkpoint and none that can be loaded."""

    @contextmanager
    def in_place(final, replace=False):
        if final.exists():
            disk.remove_tree(final)
        disk.make_folder(final)
        yield final

    engine_after(2)
    monkeypatch.setattr(durable, "staged_folder", in_place)
    wrong = []
    for number in range(1, 12):
        run = tmp_path / str(number)
        run.mkdir()
        save(run, 1)
        with FaultyDisk("kill", number).installed(), pytest.raises(Killed):
            save(run, 1, evaluated=1)
        wrong.append(outcome(run, replace(HISTORIES["again"], allowed=((1, 0), (1, 1)))))
    assert any(wrong)
