"""Sums of what trials noted: nothing that went wrong, and no count, is lost between a trial and the table."""

from __future__ import annotations

import pytest

from faults import records
from faults.records import Record, read, tables
from faults.trials import Trial, many


@pytest.fixture
def kept(tmp_path):
    before = records._kept
    records.keep_in(tmp_path / "records.jsonl")
    yield tmp_path / "records.jsonl"
    records.keep_in(before)


def odd_or_even(trial: Trial) -> str:
    """Every trial with a seed that ends in 3 is wrong."""
    trial.row = "odd" if trial.seed % 2 else "even"
    trial.counts["kills"] = trial.seed % 10
    trial.longest["s"] = float(trial.seed % 10)
    trial.drawn["kills"] = [{"at": "save", "n": 1}]
    return "bad" if trial.seed % 10 == 3 else ""


def test_a_table_has_every_trial(kept, tmp_path):
    assert many("trials", 4, odd_or_even, tmp_path, seed=100) == ["seed 103: bad"]
    assert many("trials", 1, odd_or_even, tmp_path, seed=205) == []
    text = "\n".join(tables(read(kept)))
    assert "seeds 100 to 103, 205 to 205" in text
    assert "| trials | trials | wrong | kills | s | processor minutes |" in text
    assert "| even | 2 | 0 | 2 | 2.00 |" in text
    assert "| odd | 3 | 1 | 9 | 5.00 |" in text
    assert "| **all** | 5 | 1 | 11 | 5.00 |" in text
    assert "- odd: bad" in text
    assert [one.drawn for one in read(kept)] == [{"kills": [{"at": "save", "n": 1}]}] * 5


def test_a_record_of_many_trials_counts_as_many() -> None:
    lines = tables([Record("saves", "first", trials=30, counts={"ENOSPC": 30}), Record("saves", "again", trials=2)])
    assert "saves: nothing drawn" in lines
    assert any(line.startswith("| **all** | 32 | 0 | 30 |") for line in lines)


def test_nothing_is_kept_where_nobody_asked(tmp_path, kept):
    records.keep_in(None)
    many("trials", 1, odd_or_even, tmp_path)
    assert not kept.exists()
