"""A saved config reads back to the equal config, by us and by readers that follow YAML 1.1."""

from typing import Any

import pytest
import yaml
from hypothesis import given

from helpers.configs import valid_configs
from surefoot.config import dump
from surefoot.config.dump import dump_config, plain_config
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_yaml

_READER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of YAML 1.1, in C where PyYAML has it
AMBIGUOUS = (
    "1e4",
    "no",
    "0o7",
    "null",
    "~",
    "1.",
    "010",
    "12:30",
    "a: b",
    "# a",
    " a ",
    "é",
    "\u2028",
    "'",
    "@",
    "=",
    "-",
)


def config_with(text: str) -> RunConfig:
    return RunConfig.model_validate({"stage": "sft", "model": "a/b", "data": {"train": text}, "output": text})


def check_round_trip(config: RunConfig) -> str:
    text = dump_config(config)
    document, faults = parse_yaml(text, "config.yaml")
    assert faults == []
    assert document.data == plain_config(config)
    assert RunConfig.model_validate(document.data) == config
    return text


@given(valid_configs())
def test_every_config_survives_saving(data: dict[str, Any]) -> None:
    config = RunConfig.model_validate(data)
    text = check_round_trip(config)
    assert yaml.load(text, _READER) == plain_config(config)


def test_text_that_looks_like_something_else_stays_text() -> None:
    for text in AMBIGUOUS:
        check_round_trip(config_with(text))


def test_twin_without_our_quotes_text_turns_into_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_Dumper", yaml.SafeDumper)
    with pytest.raises(AssertionError):
        check_round_trip(config_with("1e4"))


def test_the_saved_config_shows_every_default() -> None:
    text = dump_config(config_with("x"))
    assert (
        "model: {path: a/b, revision: null, weights: own, dropout: null, trained: null, router_aux_loss_coef: auto}"
        in text
    )
    assert "  lr: 0.0002\n" in text
    assert "duration: 3 epochs\n" in text
    assert "adapter: null\n" in text
