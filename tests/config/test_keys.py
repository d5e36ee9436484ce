"""An editor that holds the JSON Schema accepts exactly the configs that a run accepts. What docs/configuration.md shows
is what surefoot accepts and prints."""

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given

from helpers.configs import mutated_configs, valid_configs, write_config
from surefoot.commands.main import main
from surefoot.config.keys import DIALECT, all_keys, config_schema
from surefoot.config.overrides import expand_short_forms
from surefoot.config.problems import shape_problems
from surefoot.config.yaml_reader import parse_yaml

EDITOR = jsonschema.Draft202012Validator(config_schema())
BASE: dict[str, Any] = {"stage": "sft", "model": "a/b", "data": {"train": "x.json"}, "output": "runs/x"}

VALID: list[dict[str, Any]] = [
    {},
    {"model": {"path": "a/b", "revision": "main"}},
    {"precision": "bf16", "attention": "eager"},
    {"precision": {"compute": "fp16", "tf32": True}, "attention": {"flash": False}},
    {"compile": False, "gradient_checkpointing": True, "bos": {"prepend": "off"}},
    {"data": {"train": "x.json", "eval": 0.1}},
    {"data": {"train": "x.json", "eval": 100}},
    {"data": {"train": "x.json", "max_samples": 1000.0}},
    {"duration": "1.5 epochs", "eval_every": None, "checkpoint": {"every": "1_000 steps"}},
    {"optim": {"warmup": "100 steps", "lr": 1, "max_grad_norm": None}},
    {"adapter": {"kind": "dora", "targets": ["q_proj"]}, "early_stopping": {}},
]
INVALID: list[dict[str, Any]] = [
    {"stage": "stf"},
    {"model": None},
    {"model": {"revision": "main"}},
    {"precision": "fp8"},
    {"compile": True},
    {"bos": {"prepend": "yes"}},
    {"data": {"train": "x.json", "eval": 0}},
    {"data": {"train": "x.json", "eval": True}},
    {"data": {"train": "", "eval": 0.1}},
    {"data": {"train": "x.json", "max_samples": 1.5}},
    {"duration": 3},
    {"duration": "0 steps"},
    {"duration": "3 eons"},
    {"optim": {"lr": "1e-4"}},
    {"optim": {"lr": True}},
    {"optim": {"warmup": 1}},
    {"optim": {"betas": [0.9]}},
    {"adapter": {"rank": 8}},
    {"adapter": {"kind": "lora", "rslora": "yes"}},
    {"adapter": {"kind": "lora", "targets": []}},
    {"learning_rate": 1e-4},
    {"optim": None},
]


def accepted(data: dict[str, Any]) -> bool:
    return shape_problems(expand_short_forms(data)) == []


def test_the_schema_is_a_schema() -> None:
    assert config_schema()["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(config_schema())


def test_accepted_or_refused_by_both() -> None:
    for changes, valid in ((VALID, True), (INVALID, False)):
        for change in changes:
            assert accepted(BASE | change) == EDITOR.is_valid(BASE | change) == valid, change


@given(valid_configs())
def test_what_the_editor_accepts_runs(data: dict[str, Any]) -> None:
    assert EDITOR.is_valid(data)
    assert accepted(data)


@given(mutated_configs())
def test_both_judge_alike(data: dict[str, Any]) -> None:
    assert accepted(data) == EDITOR.is_valid(data)


@pytest.mark.parametrize("value", [0, 1.0, "1", "off", True])
def test_both_judge_alike_what_pydantic_would_convert(value: Any) -> None:
    for path in all_keys():
        data: dict[str, Any] = copy.deepcopy(BASE)
        *groups, name = path.split(".")
        inner = data
        for group in groups:
            inner[group] = given if isinstance(given := inner.get(group), dict) else {}
            inner = inner[group]
        inner[name] = value
        assert accepted(data) == EDITOR.is_valid(data), path


def test_twin_a_schema_without_short_forms_disagrees() -> None:
    schema = {
        **config_schema(),
        "properties": {**config_schema()["properties"], "model": {"$ref": "#/$defs/ModelConfig"}},
    }
    assert accepted(BASE)
    assert not jsonschema.Draft202012Validator(schema).is_valid(BASE)


def test_every_key_has_a_text() -> None:
    groups = [config_schema(), *config_schema()["$defs"].values()]
    for group in groups:
        for name, fragment in group["properties"].items():
            assert fragment.get("description"), name


GUIDE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_configs_are_complete() -> None:
    texts = re.findall(r"^```yaml\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert texts
    for text in texts:
        document, faults = parse_yaml(text, "run.yaml")
        assert faults == []
        assert shape_problems(expand_short_forms(document.data)) == []


def test_the_error_looks_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, learning_rte="1e-4")
    assert CliRunner().invoke(main, ["train", "run.yaml"]).stderr in GUIDE
