"""A run without room for its checkpoints ends before it begins."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.faults import raises_fault
from surefoot.method_facts.methods import METHODS
from surefoot.planning import disk as planning_disk
from surefoot.planning.disk import DiskForecast
from surefoot.runs import output_folder as disk_room
from surefoot.runs.output_folder import check_disk
from surefoot.system import hardware
from surefoot.system.errors import EnvironmentFault

NEEDED = DiskForecast(checkpoint=100, checkpoints=4, model=50, written=3, kept=2)


def told(folder, free, monkeypatch, needed=NEEDED, **kinds):
    monkeypatch.setattr(hardware, "free_disk", lambda place: free)
    return list(check_disk(folder / "not" / "there", needed, **kinds))


def test_room_for_everything_is_no_news(tmp_path, monkeypatch):
    assert told(tmp_path, 450, monkeypatch) == []


def test_twin_a_byte_less_is_a_caution_with_numbers(tmp_path, monkeypatch):
    (line,) = told(tmp_path, 449, monkeypatch)
    assert "4 checkpoints" in line
    assert str(tmp_path) in line


def test_no_room_for_what_the_run_surely_writes_ends_it(tmp_path, monkeypatch):
    """Three checkpoints at once, or two and the model."""
    with raises_fault("SF-DISK-FULL", tmp_path):
        told(tmp_path, 299, monkeypatch)


def test_twin_with_a_byte_more_it_starts_with_a_caution(tmp_path, monkeypatch):
    assert len(told(tmp_path, 300, monkeypatch)) == 1


def test_the_model_that_is_published_counts(tmp_path, monkeypatch):
    one = replace(NEEDED, written=1, kept=1)
    with raises_fault("SF-DISK-FULL", tmp_path):
        told(tmp_path, 149, monkeypatch, one)
    assert told(tmp_path, 150, monkeypatch, one)


def test_a_resumed_run_has_the_others_already(tmp_path, monkeypatch):
    assert told(tmp_path, 150, monkeypatch, resumed=True) == []
    assert told(tmp_path, 149, monkeypatch, resumed=True)
    with pytest.raises(EnvironmentFault):
        told(tmp_path, 99, monkeypatch, resumed=True)


def test_two_checkpoints_are_counted_where_one_is_asked_for(monkeypatch, tmp_path):
    """For two are kept: `training.checkpoint.retain`."""
    monkeypatch.setattr(disk_room, "disk_forecast", lambda plan, keep, **kinds: keep)

    def counted(keep):
        model = SimpleNamespace(path=str(tmp_path), revision=None)
        saved = SimpleNamespace(keep=keep, best="none")
        config = SimpleNamespace(method=METHODS["sft"], checkpoint=saved, adapter=None, model=model)
        return disk_room.disk_of(config, None)

    assert [counted(keep) for keep in (1, 2, 3)] == [2, 2, 3]
    monkeypatch.setattr(planning_disk, "LEAST_KEPT", 1)  # twin
    assert counted(1) == 1
