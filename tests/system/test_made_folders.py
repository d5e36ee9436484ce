"""Which run a folder belongs to, by one rule for its plan, config, data and card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.runs.export.files import _trained_sections
from surefoot.runs.export.merge import _examples
from surefoot.system import made_folders
from surefoot.system.errors import InputError
from surefoot.system.made_folders import CONFIG, FAILURE, PLAN, require_written, run_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    for inner in ("checkpoint-7/ema", "ema", "exports/merged", "failure-3"):
        (folder / inner).mkdir(parents=True)
    (folder / PLAN).write_text("{}")
    sample = {"parts": [{"text": "Name a bird. "}, {"text": "Heron"}]}
    (folder / "data.json").write_text(json.dumps({"train": {"samples": [sample]}}))
    (folder / "README.md").write_text("# mine\n\n## Data\n\nrows.json\n")
    return folder


def check_what_a_run_wrote(run: Path) -> None:
    for inner in ("", "checkpoint-7", "ema", "checkpoint-7/ema"):
        found = run_of(run / inner)
        assert found is not None, inner
        assert found.resolve() == run.resolve()
        assert _examples(run / inner) == ["Name a bird. Heron"]


def test_a_run_its_checkpoints_and_averages_are_of_that_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_what_a_run_wrote(run)
    monkeypatch.chdir(run / "checkpoint-7")
    assert run_of(Path()) == run.resolve()
    for inner in ("exports/merged", "failure-3", ".."):
        assert run_of(run / inner) is None, inner
    assert _examples(run / "exports" / "merged") == []
    assert _trained_sections(run / "exports" / "merged") == ""


def test_twin_by_its_name_alone_a_checkpoint_has_no_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_folders, "is_checkpoint", lambda folder: False)
    with pytest.raises(AssertionError):
        check_what_a_run_wrote(run)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """What a run leaves that was killed before its first checkpoint."""
    for name in (PLAN, CONFIG):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_run_without_a_checkpoint_is_called_a_run(begun: Path) -> None:
    with pytest.raises(InputError, match=r"is a run that has no checkpoint yet.*--resume starts at step 0"):
        require_written(begun)


@pytest.mark.parametrize("changed", [PLAN, CONFIG, FAILURE])
def test_twin_a_folder_with_half_of_it_or_with_a_failure_is_no_run(begun: Path, changed: str) -> None:
    path = begun / changed
    path.unlink() if path.is_file() else path.write_text("{}")
    with pytest.raises(InputError, match="is neither a run folder"):
        require_written(begun)


def test_a_checkpoint_that_was_moved_away_has_none(run: Path, tmp_path: Path) -> None:
    assert run_of((run / "checkpoint-7").rename(tmp_path / "checkpoint-7")) is None
