"""A run without room for its checkpoints ends before it begins."""

from __future__ import annotations

import pytest

from surefoot import hardware
from surefoot.errors import EnvironmentFault
from surefoot.planning.disk import DiskForecast
from surefoot.stages.disk_room import check_disk

NEEDED = DiskForecast(checkpoint=100, checkpoints=4, model=50)


def told(folder, free, monkeypatch, **kinds):
    monkeypatch.setattr(hardware, "free_disk", lambda place: free)
    return list(check_disk(folder / "not" / "there", NEEDED, **kinds))


def test_room_for_everything_is_no_news(tmp_path, monkeypatch):
    assert told(tmp_path, 450, monkeypatch) == []


def test_twin_a_byte_less_is_a_caution_with_numbers(tmp_path, monkeypatch):
    (line,) = told(tmp_path, 449, monkeypatch)
    assert "4 checkpoints" in line
    assert str(tmp_path) in line


def test_no_room_for_one_checkpoint_ends_the_run(tmp_path, monkeypatch):
    with pytest.raises(EnvironmentFault, match="a checkpoint takes"):
        told(tmp_path, 99, monkeypatch)


def test_a_resumed_run_has_the_others_already(tmp_path, monkeypatch):
    assert told(tmp_path, 150, monkeypatch, resumed=True) == []
    assert told(tmp_path, 149, monkeypatch, resumed=True)
