"""`surefoot capture` and `surefoot evaluate norms`, called as a user calls them."""

import json

import pytest
from click.testing import CliRunner

from helpers.faults import gives, lines_giving, prints_fault
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.evaluate import capture_comparison as capture_pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("cli") / "base")


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(capture_pictures, "_SHEETS", 0)


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_capture_and_its_comparison(model, tmp_path):
    first = call("capture", model, "--seq-len", 9, "--layers", "1", "--out", tmp_path / "a", "--attention")
    assert first.exit_code == 0, first.output
    assert lines_giving(first.stdout, "attention")
    assert str(tmp_path / "a") in first.stdout.splitlines()[-1]
    second = call("capture", model, "--layers", "1", "--out", tmp_path / "b", "--against", tmp_path / "a")
    assert second.exit_code == 0, second.output
    assert not lines_giving(second.stdout, "attention")  # twin
    third = call("capture", tmp_path / "b", "--against", tmp_path / "a", "--out", tmp_path / "c")
    assert third.exit_code == 0, third.output
    found = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert found["tensors"]
    assert len(found["notes"]) == 1  # the map


@pytest.mark.parametrize(
    ("arguments", "values"),
    {
        ("--layers", "0,9"): ("--layers:", 9, 0, 1),
        ("--seq-len", "513"): ("--seq-len:", 513, 512),
        ("--text", "none.txt"): ("--text", "none.txt"),
        ("--data", "none.json"): ("DATA", "none.json"),
        ("--against", "."): ("index.json",),
        ("--adapter", "none"): ("none:",),
    }.items(),
)
def test_wrong_requests_are_one_line_and_write_nothing(model, tmp_path, monkeypatch, arguments, values):
    monkeypatch.chdir(tmp_path)
    result = call("capture", model, "--out", "out", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert all(gives(line, value) for value in values)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_out_is_safe(model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    result = call("capture", model, "--seq-len", 4, "--out", tmp_path / "mine", "--overwrite")
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-USE-OUTPUT", tmp_path / "mine", "index.json")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
    assert call("capture", model, "--seq-len", 4, "--out", tmp_path / "a").exit_code == 0
    occupied = call("capture", model, "--seq-len", 4, "--out", tmp_path / "a")
    assert prints_fault(occupied.stderr, "SF-USE-OUTPUT", tmp_path / "a", "--overwrite")
    assert call("capture", model, "--seq-len", 5, "--out", tmp_path / "a", "--overwrite").exit_code == 0
    same = call("capture", model, "--out", tmp_path / "a", "--against", tmp_path / "a", "--overwrite")
    assert prints_fault(same.stderr, "SF-EVALUATE", "--out", tmp_path / "a")


def test_norms_as_table_and_json(model, tmp_path):
    table = call("evaluate", "norms", model)
    assert table.exit_code == 0, table.output
    assert all(word in table.stdout for word in ("attention", "input_layernorm"))
    found = json.loads(call("evaluate", "norms", model, "--json", "--max-samples", 2).stdout)
    assert found["results"]["model"]["texts"] == 2
    assert call("evaluate", "norms", model, "--data", tmp_path / "none.json").exit_code == 2


def test_norms_over_other_data_replace_nothing_unasked(model, tmp_path):
    out = tmp_path / "norms"
    first = call("evaluate", "norms", model, "--out", out)
    assert first.exit_code == 0, first.output
    assert call("evaluate", "norms", model, "--out", out).exit_code == 0  # twin: the same request
    kept = (out / "norms.json").read_bytes()
    refused = call("evaluate", "norms", model, "--out", out, "--max-samples", 2)
    assert refused.exit_code == 2
    assert prints_fault(refused.stderr, "SF-USE-OUTPUT", out / "norms.json", "max_samples", "--overwrite")
    assert (out / "norms.json").read_bytes() == kept
    assert call("evaluate", "norms", model, "--out", out, "--max-samples", 2, "--overwrite").exit_code == 0
    assert json.loads((out / "norms.json").read_text())["asked"]["max_samples"] == 2


def test_a_template_without_records_is_refused(model, tmp_path):
    for words in (("evaluate", "norms", model), ("capture", model, "--out", tmp_path / "out")):
        refused = call(*words, "--template", "zephyr")
        assert refused.exit_code == 2
        assert [flag in refused.stderr for flag in ("--template", "--data")] == [True, True]
    assert not list(tmp_path.iterdir())
