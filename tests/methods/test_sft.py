"""The data of a run is read as the plan says."""

import dataclasses
import json

import pytest

from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.families.model_facts import read_model_facts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.methods.examples import prepare_examples
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice
from surefoot.planning.tokenizer import plan_tokenizer
from surefoot.runs.load_models import planned_tokenizer
from surefoot.system import process

LONG = [{"instruction": "Say heron often.", "input": "", "output": " ".join(["heron"] * k)} for k in (1, 100, 400)]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepare LONG for a model of 512 positions; change: what to do to the plan of the tokens before."""
    monkeypatch.setattr(process, "cache_folder", lambda: tmp_path / "cache")
    base = tiny_llama(tmp_path / "base")
    (tmp_path / "train.json").write_text(json.dumps(LONG))

    def prepare(change=lambda tokens: tokens, **data):
        config = run_config(model=str(base), data={"train": str(tmp_path / "train.json"), **data})
        tokens = plan_tokenizer(config, read_model_facts(base), read_tokenizer_facts(base), Notes())
        return prepare_examples(config, change(tokens), planned_tokenizer(base, tokens))

    return prepare


@pytest.fixture
def prepare(prepared):
    """Its training examples."""
    return lambda *change, **data: prepared(*change, **data).train


def test_a_folder_is_trained_on_its_train_and_evaluated_on_its_test_split(prepared, tmp_path):
    (tmp_path / "data").mkdir()
    for name, rows in (("train", LONG[:2]), ("test", LONG[2:])):
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(rows))
    folder = str(tmp_path / "data")
    data = prepared(train=folder, eval=folder)
    assert (data.audit.source.file, data.eval_audit.source.file) == (f"{folder}/train.json", f"{folder}/test.json")
    assert data.eval_audit.overlap == 0
    named = prepared(train=folder, eval={"path": folder, "split": "train"})  # the twin: asked for, and told
    assert named.eval_audit.overlap == 2


def test_examples_are_cut_to_the_planned_length_whatever_the_config_says(prepare):
    assert prepare().lengths.max() == 512
    assert prepare(max_length=64).lengths.max() == 64

    def shorter(tokens):
        return dataclasses.replace(tokens, max_length=Choice(100, "for this test", "user"))

    assert prepare(shorter).lengths.max() == 100  # a resumed run keeps the length of its saved plan


def test_a_length_that_leaves_no_answer_names_the_key(prepare):
    with raises_fault("SF-DATA-LENGTH", "data.max_length"):
        prepare(max_length=8, template="alpaca", max_samples=1)
