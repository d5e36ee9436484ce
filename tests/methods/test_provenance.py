"""What is opened is what a run left, or one line says what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, prints_fault, raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.methods import provenance
from surefoot.methods.open_model import open_for_use
from surefoot.models.folder import base_fingerprint
from surefoot.system import durable
from surefoot.training.manifest import MANIFEST, manifest


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("provenance") / "base")


@pytest.fixture
def run(base, tmp_path) -> Path:
    """A finished run as `publish` leaves it."""
    folder = a_run(tmp_path / "run", base, a_plan())
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    durable.write_json(folder / MANIFEST, manifest(folder, paths, 3, {"base": base_fingerprint(base)}))
    return folder


def test_a_run_as_it_was_left_opens_without_a_word(run):
    assert open_for_use(str(run)).cautions == ()


def test_another_base_is_a_caution_and_opens_all_the_same(run, tmp_path):
    other = tiny_llama(tmp_path / "other", seed=7)
    (caution,) = open_for_use(str(other), str(run)).cautions
    assert [gives(caution, folder) for folder in (run, other)] == [True, True]
    shown = CliRunner().invoke(main, ["generate", str(other), "--adapter", str(run), "--prompt", "a"])
    assert (shown.exit_code, shown.stderr.splitlines()[1]) == (0, f"caution: {caution}")


def test_twin_a_fingerprint_that_sees_no_weights_notices_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.methods.provenance.base_fingerprint", lambda folder: "same")
    durable.write_json(run / MANIFEST, manifest(run, [], 3, {"base": "same"}))
    assert open_for_use(str(tiny_llama(tmp_path / "other", seed=7)), str(run)).cautions == ()


def test_changed_files_are_cautions(run):
    path = run / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # the last bit of some weight
    path.write_bytes(content)
    (caution,) = open_for_use(str(run)).cautions
    assert gives(caution, path)
    assert gives(caution, "SHA-256")


def test_twin_of_large_files_only_the_size_is_looked_at(run, monkeypatch):
    monkeypatch.setattr(provenance, "_HASHED_UP_TO", 10)
    test_a_run_as_it_was_left_opens_without_a_word(run)
    with pytest.raises(ValueError, match="unpack"):  # no caution
        test_changed_files_are_cautions(run)


def test_a_run_that_goes_beyond_its_outcome_is_told(run):
    (run / MANIFEST).unlink()
    (caution,) = open_for_use(str(run)).cautions
    assert gives(caution, run)
    (run / "plan.json").unlink()  # a stranger's adapter
    assert open_for_use(str(run)).cautions == ()


def test_a_run_without_a_model_names_its_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/x")
    for step in (8, 12, 100):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    with raises_fault("SF-USE-FOLDER", "runs/x"):
        open_for_use("runs/x")
    for step in (8, 12):  # 100 was killed while it was written
        (run / f"checkpoint-{step}" / MANIFEST).write_text("{}")
    shown = CliRunner().invoke(main, ["generate", "runs/x/", "--prompt", "a"])
    assert shown.exit_code == 2
    assert prints_fault(shown.stderr, "SF-USE-FOLDER", "runs/x/", "runs/x/checkpoint-12")
