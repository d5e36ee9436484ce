"""`surefoot init` writes a config that plans at once, explains every key and overwrites nothing."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from surefoot.cli.main import main
from surefoot.config import starter
from surefoot.config.keys import all_keys
from surefoot.config.load import load_config
from surefoot.config.starter import starting_config
from surefoot.config.yaml_reader import parse_yaml
from surefoot.stages import init as stage
from surefoot.stages.planned import make_plan
from tiny import tiny_llama

ALPACA = {"instruction": "Name a bird.", "input": "", "output": "Heron"}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
FILES: dict[str, tuple[str, str]] = {  # name -> content, the layout that is recognised
    "alpaca.json": (json.dumps([ALPACA] * 250), "250 records, alpaca"),
    "few.jsonl": (json.dumps(ALPACA), "1 records, alpaca"),
    "chat.jsonl": (json.dumps(MESSAGES), "1 records, messages"),
    "old.jsonl": (json.dumps(SHAREGPT), "1 records, sharegpt"),
    "table.csv": ("instruction,output\nName a bird.,Heron\n", "1 records, alpaca"),
    "texts.jsonl": (json.dumps({"text": "The heron waits."}), "1 records, text"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_llama(tmp_path / "base")
    for name, (content, _) in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_can_be_planned(folder: Path, name: str) -> None:
    result = call("init", "base", name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "surefoot plan run.yaml" in result.stdout
    assert FILES[name][1] in " ".join((folder / "run.yaml").read_text().replace("#", "").split())
    assert call("plan", "run.yaml").exit_code == 0
    config = load_config("run.yaml").config
    assert config.output == f"runs/base-{name.split('.')[0]}"
    assert config.data.eval == (stage.HELD_OUT if name == "alpaca.json" else "none")


def test_packed_data(folder: Path) -> None:
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(json.dumps(ALPACA).encode()))
    assert call("init", "base", "packed.jsonl.gz").exit_code == 0


def test_every_key_is_there_with_its_default(folder: Path) -> None:
    call("init", "base", "alpaca.json")
    text = (folder / "run.yaml").read_text()
    for key in all_keys().values():
        if key.group.count(".") == 0 and not key.group.startswith("data.") and key.path not in ("model.path",):
            assert f"{key.name}:" in text, key.path
    assert "# gradient_checkpointing: auto\n" in text
    assert "#   rank: 16 " in text


def test_the_editor_is_pointed_at_a_schema_that_is_there(folder: Path) -> None:
    call("init", "base", "alpaca.json", "--out", "configs/first.yaml")
    text = (folder / "configs" / "first.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=surefoot.schema.json\n")
    schema = json.loads((folder / "configs" / "surefoot.schema.json").read_text())
    assert jsonschema.Draft202012Validator(schema).is_valid(parse_yaml(text, "first.yaml")[0].data)


def test_nothing_is_overwritten(folder: Path) -> None:
    assert call("init", "base", "alpaca.json").exit_code == 0
    before = (folder / "run.yaml").read_text()
    result = call("init", "base", "few.jsonl")
    assert (result.exit_code, result.stderr) == (2, "error: run.yaml: already exists; name another file with --out\n")
    assert (folder / "run.yaml").read_text() == before
    assert call("init", "base", "few.jsonl", "--out", "second.yaml").exit_code == 0, "the schema is ours"
    (folder / "surefoot.schema.json").write_text("{}")
    assert call("init", "base", "few.jsonl", "--out", "third.yaml").exit_code == 2, "this one is not"
    assert not (folder / "third.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        ("bsae", "few.jsonl"): "model.path: folder bsae does not exist; did you mean base?",
        ("base", "fwe.jsonl"): "data.train.path: file fwe.jsonl does not exist; did you mean few.jsonl?",
        ("base", "base/config.json"): "base/config.json:1:1: error: the file does not hold a list of records",
    }.items(),
)
def test_mistakes_are_one_line_and_write_nothing(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = call("init", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (folder / "run.yaml").exists()
    assert not (folder / "surefoot.schema.json").exists()


def proposal(monkeypatch: pytest.MonkeyPatch, parameters: int, memory: int) -> dict[str, Any]:
    """The config for a model of that size on a machine with so many bytes."""

    def plan(config: Any, **options: Any) -> Any:
        made = make_plan(config, **options)
        needed = 16 * parameters if config.adapter is None else 2 * parameters
        planned = replace(made.memory, available=memory, weights=needed)
        return replace(made, parameters=parameters, memory=planned)

    monkeypatch.setattr(stage, "make_plan", plan)
    text = stage.propose("base", "alpaca.json", schema="x")
    return parse_yaml(text, "run.yaml")[0].data


@pytest.mark.parametrize(
    ("parameters", "memory", "adapter"),
    [(10**8, 2**36, None), (10**8, 2**30, "lora"), (10**10, 2**40, "lora")],
)
def test_small_models_that_fit_are_trained_in_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: int, memory: int, adapter: str | None
) -> None:
    data = proposal(monkeypatch, parameters, memory)
    assert data.get("adapter", {}).get("kind") == adapter
    assert data.get("optim", {}).get("lr") == (stage.FULL_LR if adapter is None else None)


def test_twin_without_quotes_a_name_that_looks_like_a_number_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"stage": "sft", "model": "1e4", "data.train": "no # comment", "output": "x: y"}
    data = parse_yaml(starting_config(given, {}, "s"), "x")[0].data
    assert (data["model"], data["data"]["train"], data["output"]) == ("1e4", "no # comment", "x: y")
    monkeypatch.setattr(starter, "shown", str)
    assert parse_yaml(starting_config({**given, "output": "x"}, {}, "s"), "x")[0].data["model"] == 1e4


def test_nothing_heavy_is_imported_before_a_refusal(folder: Path) -> None:
    call("init", "base", "few.jsonl")
    program = (
        "import sys\nfrom surefoot.cli.main import main\n"
        "try: main(['init', 'base', 'few.jsonl'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "2 False False\n"


def comments_of(text):
    """Comments behind values, and blocks of comment lines, each as one text."""
    lines = [line.strip().removeprefix("# ").strip() for line in text.splitlines()]
    return [part for line in lines for part in line.split("  # ")[1:]]


def check_whole_sentences():
    given = {"stage": "sft", "model": "m", "data.train": "d.json", "output": "o", "optim.lr": 1e-4}
    found = comments_of(starting_config(given, {}, "s"))
    assert len(found) > 20
    assert [one for one in found if not one.endswith(".")] == []
    assert all(any(one in " ".join(key.help.split()) for key in all_keys().values()) for one in found)


def test_comments_are_whole_sentences():
    check_whole_sentences()


def test_twin_cut_to_the_width_they_are_not(monkeypatch):
    def cut(line, key):
        return [f"{line:<24}  # {textwrap.shorten(key.help, 60, placeholder=' …')}"]

    monkeypatch.setattr(starter, "_explained", cut)
    with pytest.raises(AssertionError):
        check_whole_sentences()
