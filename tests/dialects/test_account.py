"""How a translation is shown, and the way back from a fault to the word."""

from __future__ import annotations

import yaml

from surefoot.config.schema import RunConfig
from surefoot.dialects.account import as_yaml, locate, summary, to_json
from surefoot.dialects.translation import Note, Translation
from surefoot.errors import Fault

FOUND = Translation(
    tool="X",
    command="train",
    config={
        "stage": "sft",
        "model": {"path": "m"},
        "data": {"train": [{"path": "a.json"}, {"path": "b.json", "weight": 2.0}], "eval": {"path": "c.json"}},
        "gradient_checkpointing": "on",
        "optim": {"max_grad_norm": None, "betas": [0.9, 0.95]},
        "output": "out",
    },
    notes=(
        Note("base: m", "carried", ("model.path",), "", "x.yaml:3:1"),
        Note("--beta2 0.95", "changed", ("optim.betas",), "in doubles", "--beta2"),
        Note("speed: high", "listed", (), "no such thing", "x.yaml:4:1"),
        Note("clip: null", "assumed", ("optim.max_grad_norm",), "the default of X; surefoot's is 1.0"),
    ),
    arguments=("--overwrite",),
    environment={"HF_TOKEN": "hf_verysecret", "A": "1"},
)


def test_the_yaml_is_the_config_with_comments():
    shown = as_yaml(FOUND)
    assert RunConfig.model_validate(yaml.safe_load(shown)) == RunConfig.model_validate(FOUND.config)
    assert "# base: m (x.yaml:3)" in shown
    assert "# --beta2 0.95" in shown
    assert "#   speed: high (x.yaml:4): no such thing" in shown
    assert "#   --beta2 0.95 -> optim.betas: in doubles" in shown
    assert "Run with: HF_TOKEN=… A=1 surefoot train THIS-FILE --overwrite" in shown


def test_every_note_that_is_not_carried_stands_in_the_account():
    shown = as_yaml(FOUND).partition("# 1 word carried")[2]
    assert all(note.why in shown for note in FOUND.notes if note.fate != "carried")
    assert summary(FOUND) == "1 word carried, 1 changed, 1 without counterpart, 1 default assumed"


def test_secrets_stay_out_of_the_record():
    assert to_json(FOUND)["environment"] == {"HF_TOKEN": "…", "A": "1"}


def test_a_fault_goes_to_its_word():
    assert locate(FOUND, Fault("model.path", "does not exist")) == Fault("x.yaml:3:1", "base: does not exist")
    assert locate(FOUND, Fault("model", "does not exist")).where == "x.yaml:3:1"
    assert locate(FOUND, Fault("optim.betas[1]", "too large")) == Fault("--beta2", "too large")
    assert "X's default: clip: null" in locate(FOUND, Fault("optim.max_grad_norm", "is odd")).what
    nowhere = Fault("seed", "is odd")
    assert locate(FOUND, nowhere) == nowhere
