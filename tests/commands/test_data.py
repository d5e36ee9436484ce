"""`surefoot data`, called as a user calls it: the audit and nothing else, without weights."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.faults import gives
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
    records = [{"instruction": f"Add {n} and 1!", "output": f"Is:{n + 1}."} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["data", "run.yaml", *arguments])


def row(result: Result, name: str) -> str:
    """What the audit has beside a name."""
    (line,) = [line.strip() for line in result.stdout.splitlines() if line.startswith(f"  {name} ")]
    return line.removeprefix(name).strip()


def test_the_audit_is_shown_and_nothing_is_trained(folder):
    result = call()
    assert result.exit_code == 0, result.stderr
    assert gives(result.stdout.partition("\n")[0], "train.jsonl")
    assert re.findall(r"\d+", row(result, "examples")) == ["6", "6", "0", "0"]  # of records, dropped, cut
    assert all(gives(row(result, "stop"), value) for value in (6, "<|end_of_text|>", "<|eot_id|>"))
    assert "⟦Is:1.<|eot_id|>⟧" in result.stdout
    assert not (folder / "runs").exists()
    assert call().stdout == result.stdout  # from the cache


def test_a_terminal_without_unicode_still_sees_the_marks_and_a_pipe_no_escapes(folder):
    found = CliRunner(charset="ascii").invoke(main, ["data", "run.yaml"])
    assert "[[Is:1.<|eot_id|>]]" in found.stdout
    assert not {"\x1b", "\r"} & {*found.stdout, *call().stdout}


def test_json_is_what_data_json_holds(folder):
    facts = json.loads(call("--json", "data.eval=2").stdout)
    assert (facts["train"]["examples"], facts["eval"]["examples"], facts["train"]["file"]) == (4, 2, "train.jsonl")
    assert str(folder) not in json.dumps(facts)


def test_overrides_change_what_is_learned(folder):
    result = call("data.template=plain", "data.train_on=everything", "bos.prepend=off")
    assert "⟦dd 0 and 1!\n    Is:1.<|end_of_text|>⟧" in result.stdout
    assert row(result, "BOS") == "none"


def test_faults_of_the_data_are_one_line_and_exit_2(folder):
    lines = (folder / "train.jsonl").read_text().splitlines()
    for line, text, place, code in (
        (3, "{", "3:2", "SF-DATA-ROW"),
        (6, '{"instruction": "q", "outp', "6:27", "SF-DATA-ROW"),
        (2, '{"instruction": "q", "ouput": "a"}', "2", "SF-DATA-ROW"),
        (4, '{"instruction": "q", "output": " "}', "4", "SF-DATA-ROW"),
        (5, '{"instruction": "q", "output": NaN}', "5", "SF-DATA-ROW"),
    ):
        (folder / "train.jsonl").write_text("\n".join([*lines[: line - 1], text, *lines[line:]]))
        result = call()
        assert (result.exit_code, result.stdout) == (2, ""), text
        first = result.stderr.splitlines()[0]
        assert (first.partition(": ")[0], first.rpartition(" ")[2]) == (f"train.jsonl:{place}", f"[{code}]")


def test_faults_of_the_config_are_shown_at_their_key(folder):
    """And a pad that the text contains never gets through: id 0 is "!", and every record has one."""
    for override, code in (("data.eval=6", "SF-DATA-SHARES"), ("tokenizer.pad='!'", "SF-CONFIG-CONFLICT")):
        result = call(override)
        assert result.exit_code == 2
        assert override.partition("=")[0] in result.stderr
        assert result.stderr.endswith(f"[{code}]\n")
