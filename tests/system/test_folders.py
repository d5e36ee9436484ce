"""Which run a folder belongs to, by one rule for its plan, config, data and card.

No flag lets a command write over, or remove, what surefoot did not write; the twins are files of its own.
"""

import json
from pathlib import Path

import pytest

from surefoot.commands.options import claim_out
from surefoot.commands.tune.attempt import Journal, require_own_journal
from surefoot.evaluate.capture_folder import FORMAT, require_room, require_room_to_compare
from surefoot.report.pictures.plots import png
from surefoot.runs.export.files import _trained_sections
from surefoot.runs.export.merge import _examples
from surefoot.system import folders
from surefoot.system.errors import InputError
from surefoot.system.folders import (
    CONFIG,
    FAILURE,
    PLAN,
    own_findings,
    require_own_picture,
    require_replaceable,
    require_written,
    run_of,
)


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
    monkeypatch.setattr(folders, "is_checkpoint", lambda folder: False)
    with pytest.raises(AssertionError):
        check_what_a_run_wrote(run)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """What a run leaves that was killed before its first checkpoint."""
    for name in (PLAN, CONFIG):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_run_without_a_checkpoint_is_called_a_run(begun: Path) -> None:
    with pytest.raises(InputError) as caught:
        require_written(begun)
    assert "--resume" in caught.value.faults[0].fix


@pytest.mark.parametrize("changed", [PLAN, CONFIG, FAILURE])
def test_twin_a_folder_with_half_of_it_or_with_a_failure_is_no_run(begun: Path, changed: str) -> None:
    path = begun / changed
    path.unlink() if path.is_file() else path.write_text("{}")
    with pytest.raises(InputError) as caught:
        require_written(begun)
    assert "--resume" not in caught.value.faults[0].fix


def test_a_checkpoint_that_was_moved_away_has_none(run: Path, tmp_path: Path) -> None:
    assert run_of((run / "checkpoint-7").rename(tmp_path / "checkpoint-7")) is None


ASKED = {"model": "base"}


def drawn() -> bytes:
    from matplotlib.figure import Figure

    return png(Figure(figsize=(0.1, 0.1), dpi=10))


def refused(check, *arguments, **settings) -> str:
    with pytest.raises(InputError) as error:
        check(*arguments, **settings)
    (fault,) = error.value.faults
    return fault.where


def test_findings_replace_findings_alone(tmp_path):
    for content in ["mine", "{}", "[]", '{"asked": 3}', json.dumps({"model": "base"})]:
        file = tmp_path / "loss.json"
        file.write_text(content)
        for overwrite in (False, True):
            assert refused(claim_out, file, ASKED, overwrite) == str(file)
        file.write_text(json.dumps({"asked": {"model": "other"}}))
        assert refused(claim_out, file, ASKED, overwrite=False) == str(file)
        claim_out(file, ASKED, overwrite=True)  # twin: it is its own


def test_a_picture_is_replaced_where_it_says_that_it_is_surefoots_or_its_findings_stand_beside_it(tmp_path):
    picture, file = tmp_path / "calibration.png", tmp_path / "reward.json"
    picture.write_bytes(drawn().replace(b"surefoot", b"somebody"))
    assert refused(claim_out, file, ASKED, True, ["calibration.png"]) == str(picture)
    assert refused(require_own_picture, picture) == str(picture)
    file.write_text(json.dumps({"asked": ASKED}))
    claim_out(file, ASKED, False, ["calibration.png"])  # twin: an earlier version drew it
    picture.write_bytes(drawn())
    require_own_picture(picture)  # twin
    picture.unlink()
    picture.symlink_to(tmp_path / "nowhere")
    assert refused(require_own_picture, picture) == str(picture)


def test_a_folder_with_a_file_of_the_users_is_not_replaced(tmp_path):
    def check() -> None:
        require_replaceable(tmp_path, True, "export.json", "export", lambda record: record["outputs"])

    (tmp_path / "export.json").write_text(json.dumps({"outputs": {"model.safetensors": {}}}))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / ".DS_Store").touch()
    check()  # twin
    (tmp_path / "notes.txt").touch()
    assert refused(check) == str(tmp_path)
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "export.json").write_text("[]")  # a mark that cannot be read tells nothing
    assert refused(check) == str(tmp_path)


def test_a_capture_and_a_comparison_know_their_files(tmp_path):
    index = {"format": FORMAT, "tensors": [{"name": "x", "file": "layer-00000.safetensors"}]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    for name in ("layer-00000.safetensors", "layer-00000.png", "norms.png", "comparison.json", "comparison.png"):
        (tmp_path / name).write_text('{"tensors": []}')
    require_room(tmp_path, overwrite=True)
    assert refused(require_room_to_compare, tmp_path, overwrite=True) == str(tmp_path)  # it is a capture
    (tmp_path / "layer-00001.png").touch()  # of no layer that was captured
    assert refused(require_room, tmp_path, overwrite=True) == str(tmp_path)
    for name in ("index.json", "layer-00000.safetensors", "layer-00000.png", "layer-00001.png", "norms.png"):
        (tmp_path / name).unlink()
    require_room_to_compare(tmp_path, overwrite=True)
    (tmp_path / "mine.csv").touch()
    assert refused(require_room_to_compare, tmp_path, overwrite=True) == str(tmp_path)


def test_a_summary_of_all_sets_and_the_trials_of_a_search_are_known_by_what_they_hold(tmp_path: Path):
    summary, trials = tmp_path / "x-commonsense.json", tmp_path / "run-tuned.trials.jsonl"
    for path, check in (
        (summary, lambda: own_findings(summary, "sides")),
        (trials, lambda: require_own_journal(trials)),
    ):
        check()
        for content in ("mine", "[1]", ""):
            path.write_text(content)
            assert refused(check) == str(path)
    summary.write_text(json.dumps({"sides": {}}))
    assert own_findings(summary, "sides") == {}
    trials.write_text(f"{Journal(None, {})._head}\n")
    require_own_journal(trials)
