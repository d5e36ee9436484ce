"""data.template auto: where the tokenizer's own template cannot write the records, the family's named row does.

The records are tried with a model of every family. What must be written, is looked for in what the model would read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.faults import gives, raises_fault
from helpers.zoo import ZOO
from surefoot.config.schema import RunConfig
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize import tokenize_file as tokenize
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.methods.examples import prepare_examples
from surefoot.models.facts import facts_of
from surefoot.planning.notes import Notes
from surefoot.planning.tokenizer import plan_tokenizer
from surefoot.runs.load_models import planned_tokenizer

POSITIONS = 4096  # nothing is cut
SYSTEM, USER = {"role": "system", "content": "Stay brief."}, {"role": "user", "content": "What is one and one?"}
RESULT, ANSWER = {"role": "tool", "content": "two-of-them"}, {"role": "assistant", "content": "It is two."}
FUNCTION = {"name": "add", "description": "adds numbers", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def call(times: int = 1, text: str = "") -> dict:
    one = {"type": "function", "function": {"name": "add", "arguments": {"number": 41}}}
    return {"role": "assistant", "content": text, "tool_calls": [one] * times}


RECORDS = {
    "system": {"messages": [SYSTEM, USER, ANSWER]},
    "tools": {"messages": [USER, ANSWER, USER, ANSWER], "tools": TOOLS},
    "call": {"messages": [SYSTEM, USER, call(), RESULT, ANSWER], "tools": TOOLS},
    "two calls": {"messages": [USER, call(2), RESULT, RESULT, ANSWER], "tools": TOOLS},
    "text and call": {"messages": [USER, call(text="Let me see."), RESULT, ANSWER], "tools": TOOLS},
}
NO_ROW = {  # Llama 3 and Mistral have no way to write these
    ("llama3", "two calls"),
    ("llama3.0", "two calls"),
    ("llama3", "text and call"),
    ("llama3.0", "text and call"),
    ("mistral", "text and call"),
    ("mistral0.3", "text and call"),
}
ROWS = {
    ("llama2", "call"): "llama2",
    ("llama3", "call"): "tokenizer",
    ("llama3.0", "call"): "llama3",
    ("mistral", "system"): "mistral",
    ("mistral", "call"): "mistral",
    ("mistral0.3", "two calls"): "tokenizer",
    ("qwen2", "text and call"): "tokenizer",
    ("phi3", "system"): "tokenizer",
    ("phi3", "text and call"): "phi3",
    ("gemma2", "system"): "gemma",
    ("gemma3", "system"): "tokenizer",
    ("gemma3", "call"): "gemma",
    ("opt", "system"): "alpaca",
    ("gpt2", "two calls"): "vicuna",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("zoo")
    made = {
        name: make(root / name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": POSITIONS})
        for name, make in ZOO.items()
    }
    made["llama3.0"] = ZOO["llama3"](root / "llama3.0", version="3.0", max_position_embeddings=POSITIONS)
    made["mistral0.3"] = ZOO["mistral"](root / "mistral0.3", version="0.3", max_position_embeddings=POSITIONS)
    return made


@pytest.fixture
def prepare(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def prepare(family: str, path: Path, template: str = "auto") -> PreparedData:
        data = {"train": str(path), "max_samples": 8, "template": template, "max_length": POSITIONS}
        config = RunConfig.model_validate(
            {"stage": "sft", "model": str(models[family]), "data": data, "duration": "1 step", "output": "none"}
        )
        notes = Notes()
        tokens = plan_tokenizer(config, facts_of(models[family]), read_tokenizer_facts(models[family]), notes)
        assert not notes.faults
        return prepare_examples(config, tokens, planned_tokenizer(models[family], tokens))

    return prepare


@pytest.fixture
def file(tmp_path):
    def file(*names: str) -> Path:
        path = tmp_path / "records.json"
        path.write_text(json.dumps([RECORDS[name] for name in names]))
        return path

    return file


def missing(data: PreparedData, record: dict) -> list[str]:
    """What of the record does not stand in the example that is made of it."""
    example, wanted = data.audit.samples[0], [turn["content"] for turn in record["messages"]]
    text = "".join(part.text for part in example.parts)
    wanted += ["adds numbers"] if "tools" in record else []
    wanted += ["41" for turn in record["messages"] if "tool_calls" in turn]
    return [words for words in wanted if words not in text]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("family", [*ZOO, "llama3.0", "mistral0.3"])
def test_everything_is_written_or_the_error_names_a_template_that_can(prepare, file, family, name):
    path = file(name)
    if (family, name) not in NO_ROW:
        data = prepare(family, path)
        assert missing(data, RECORDS[name]) == []
        assert ROWS.get((family, name), data.template.name) == data.template.name
        assert bool(data.template_reason) == (data.template.name not in ("tokenizer", "alpaca"))
        return
    with raises_fault("SF-DATA-ROW", f"{path}:1", remedy=["vicuna"]):
        prepare(family, path)
    assert missing(prepare(family, path, "vicuna"), RECORDS[name]) == []


def test_twin_a_template_that_drops_tools_would_be_noticed_here(prepare, file, monkeypatch):
    monkeypatch.setattr("surefoot.data.chat.turn_by_turn._require_written", lambda *_: None)
    data = prepare("phi3", file("call"))
    assert data.template.name == "tokenizer"
    assert missing(data, RECORDS["call"]) == ["two-of-them", "adds numbers", "41"]


def test_the_reason_says_which_record_and_what(prepare, file):
    data = prepare("phi3", file("system", "call"))
    assert all(gives(data.template_reason, value) for value in ("records.json", 2))
    again = prepare("phi3", file("system", "call"))  # from the cache
    assert (again.template.name, again.template_reason) == ("phi3", data.template_reason)


def test_a_template_that_was_asked_for_stays(prepare, file):
    path = file("call")
    with raises_fault("SF-DATA-ROW", f"{path}:1"):
        prepare("phi3", path, "tokenizer")


def test_twin_without_fallbacks_auto_is_refused_too(prepare, file, monkeypatch):
    monkeypatch.setattr(tokenize, "templates_to_try", lambda planned, *_, **how: (planned,))
    path = file("call")
    with raises_fault("SF-DATA-ROW", f"{path}:1"):
        prepare("phi3", path)
