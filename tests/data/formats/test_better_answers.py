"""Supervised training on preference records: refused unless asked for by name, and then the better answers alone."""

from __future__ import annotations

import json

import pytest

from helpers.faults import gives, raises_fault
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.methods.examples import prepare_examples
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan

RECORDS = [{"prompt": f"What is {n}?", "chosen": f"better {n}", "rejected": f"worse {n}"} for n in range(6)]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tiny_llama(tmp_path / "base")
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(RECORDS), encoding="utf-8")

    def prepare(layout):
        data = {"train": {"path": str(path), "format": layout}, "max_length": 64}
        config = run_config(model=str(base), data=data)
        tokens = make_plan(config, measure=False).tokenizer
        tokenizer = planned_tokenizer(base, tokens)
        return prepare_examples(config, tokens, tokenizer), tokenizer

    return prepare


def test_the_better_answers_are_learned(prepared):
    data, tokenizer = prepared("preference")
    texts = [tokenizer.decode(data.train[n].ids[data.train[n].supervised], skip_special_tokens=True) for n in range(6)]
    assert [text.strip() for text in texts] == [f"better {n}" for n in range(6)]
    assert gives(data.audit.source.layout_reason, "better")
    assert data.rows_per_item == 1


def test_without_being_asked_they_are_refused_and_the_way_is_named(prepared, tmp_path):
    with raises_fault("SF-DATA-FORMAT", f"{tmp_path}/pairs.json:1"):
        prepared("auto")
