"""An export is verified against its certificate."""

import json

import pytest
from click.testing import CliRunner

from helpers.faults import gives, raises_fault
from surefoot.commands.main import main
from surefoot.report.cards.export import CERTIFICATE
from surefoot.report.verification import verify_folder
from surefoot.runs.export.certificate import hashes

FILES = {"model.safetensors": b"weights", "config.json": b"{}"}


@pytest.fixture
def export(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    outputs = hashes({name: tmp_path / name for name in FILES})
    (tmp_path / CERTIFICATE).write_text(json.dumps({"format": 1, "outputs": outputs}))
    return tmp_path


def faults(folder):
    return [fault.what for check in verify_folder(folder) for fault in check.faults]


def test_an_export_as_it_was_written_verifies(export):
    (check,) = verify_folder(export)
    assert sorted(file.name for file in check.files) == sorted(FILES)
    assert check.faults == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"weighty", ["SHA-256"]), (b"weights!", [8, 7]), (None, [])],
)
def test_twins_a_changed_longer_or_lost_file_is_told(export, content, expected):
    (export / "model.safetensors").unlink()
    if content is not None:
        (export / "model.safetensors").write_bytes(content)
    (what,) = faults(export)
    assert all(gives(what, value) for value in expected)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_file_is_named_once(export, damaged):
    """And an intact one, which is the twin, not at all."""
    for name in list(FILES)[:damaged]:
        (export / name).write_bytes(b"other")
    told = CliRunner().invoke(main, ["verify", str(export)])
    assert told.exit_code == (4 if damaged else 0)
    assert [told.output.count(name) for name in FILES] == [1] * damaged + [0] * (len(FILES) - damaged)
    assert gives(told.stdout, len(FILES) - damaged)


@pytest.mark.parametrize("certificate", ["{", "[]", "{}", '{"outputs": {"config.json": {}}}', '{"outputs": [1]}'])
def test_a_certificate_that_says_nothing_is_a_fault(export, certificate):
    (export / CERTIFICATE).write_text(certificate)
    ((fault,),) = (check.faults for check in verify_folder(export))
    assert (fault.where, fault.code) == (str(export / CERTIFICATE), "SF-CHECKPOINT-DAMAGED")


def test_twin_without_a_certificate_it_is_no_export(export):
    (export / CERTIFICATE).unlink()
    with raises_fault("SF-USE-FOLDER", export):
        verify_folder(export)


def test_a_certificate_looks_at_no_file_elsewhere(export):
    (export.parent / "secret").write_text("x")
    entry = {"size": 1, "sha256": "0" * 64}
    (export / CERTIFICATE).write_text(json.dumps({"outputs": {"../secret": entry}}))
    (what,) = faults(export)
    assert "'../secret'" in what
