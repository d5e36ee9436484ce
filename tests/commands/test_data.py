"""`surefoot data`, called as a user calls it: the audit and nothing else, without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main

CONFIG = """\
stage: sft
model: model
data:
  train: train.jsonl
  max_length: 128
output: runs/never
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a config, six records and a model whose weights are gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_llama(tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    records = [{"instruction": f"Add {n} and 1!", "output": f"It is {n + 1}."} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["data", "run.yaml", *arguments])


def test_the_audit_is_shown_and_nothing_is_trained(folder):
    result = call()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("training data: train.jsonl\n")
    assert "6 of 6 records, 0 dropped, 0 cut to length" in result.stdout
    assert "6 of 6 answers end with a learned <|end_of_text|> or <|eot_id|>" in result.stdout
    assert "⟦It is 1.<|eot_id|>⟧" in result.stdout
    assert not (folder / "runs").exists()
    assert call().stdout == result.stdout  # from the cache


def test_a_pipe_gets_plain_text(folder):
    command = [sys.executable, "-m", "surefoot", "data", "run.yaml"]
    found = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert found.returncode == 0, found.stderr.decode()
    assert b"\x1b" not in found.stdout
    assert b"\r" not in found.stdout
    assert "⟦It is 1.<|eot_id|>⟧".encode() in found.stdout


def test_a_terminal_without_unicode_still_sees_the_marks(folder):
    command = [sys.executable, "-m", "surefoot", "data", "run.yaml"]
    found = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert b"[[It is 1.<|eot_id|>]]" in found.stdout


def test_json_is_what_data_json_holds(folder):
    facts = json.loads(call("--json", "data.eval=2").stdout)
    assert (facts["train"]["examples"], facts["eval"]["examples"], facts["train"]["file"]) == (4, 2, "train.jsonl")
    assert str(folder) not in json.dumps(facts)


def test_overrides_change_what_is_learned(folder):
    result = call("data.template=plain", "data.train_on=everything", "bos.prepend=off")
    assert "⟦dd 0 and 1!\n    It is 1.<|end_of_text|>⟧" in result.stdout
    assert "BOS       none" in result.stdout


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "{", "train.jsonl:3:2: error: malformed JSON"),
        (6, '{"instruction": "q", "outp', "train.jsonl:6:27: error: the file ends in the middle of a record"),
        (2, '{"instruction": "q", "ouput": "a"}', "train.jsonl:2: error: row 2: has no 'output'"),
        (4, '{"instruction": "q", "output": " "}', "train.jsonl:4: error: row 4: has an empty 'output'"),
        (5, '{"instruction": "q", "output": NaN}', "train.jsonl:5: error: the record that starts here holds NaN"),
    ],
)
def test_faults_of_the_data_are_one_line_and_exit_2(folder, line, text, message):
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[line - 1] = text
    (folder / "train.jsonl").write_text("\n".join(lines))
    result = call()
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_faults_of_the_config_are_shown_at_their_key(folder):
    result = call("data.eval=6")
    assert result.exit_code == 2
    assert "data.eval: 6 holds out 6 of 6 records" in result.stderr.replace("error: ", "")


def test_a_pad_that_the_text_contains_never_gets_through(folder):
    """Id 0 is "!", and every record has one."""
    result = call("tokenizer.pad='!'")
    assert result.exit_code == 2
    assert "'!' is an ordinary token (id 0): text can contain it" in result.stderr
