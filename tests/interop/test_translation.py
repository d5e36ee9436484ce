"""How a translation is shown, and the way back from a fault to the word."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from surefoot.config.schema import RunConfig
from surefoot.interop import translation as account
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.translation import Note, Translation, as_yaml, locate, summary, to_json
from surefoot.system.errors import Fault

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


OUTCOMES = {"carried": 4, "changed": 1, "listed": 2, "assumed": 3}


def test_the_yaml_is_the_config_with_comments():
    shown = as_yaml(FOUND)
    assert RunConfig.model_validate(yaml.safe_load(shown)) == RunConfig.model_validate(FOUND.config)
    assert "# base: m (x.yaml:3)" in shown
    assert "# --beta2 0.95" in shown
    assert "#   speed: high (x.yaml:4): no such thing" in shown
    assert "#   --beta2 0.95 -> optim.betas: in doubles" in shown
    assert "Run with: HF_TOKEN=… A=1 surefoot train THIS-FILE --overwrite" in shown


def test_every_note_that_is_not_carried_stands_in_the_account():
    shown = as_yaml(FOUND).partition(summary(FOUND))[2]
    assert all(note.why in shown for note in FOUND.notes if note.outcome != "carried")


def test_the_summary_counts_each_outcome():
    notes = [replace(FOUND.notes[0], outcome=outcome) for outcome in OUTCOMES for _ in range(OUTCOMES[outcome])]
    assert re.findall(r"\d+", summary(replace(FOUND, notes=tuple(notes)))) == ["4", "1", "2", "3"]


def test_secrets_stay_out_of_the_record():
    assert to_json(FOUND)["environment"] == {"HF_TOKEN": "…", "A": "1"}


def test_a_fault_goes_to_its_word():
    assert locate(FOUND, Fault("model.path", "is odd")) == Fault("x.yaml:3:1", "base: is odd")
    assert locate(FOUND, Fault("model", "is odd")).where == "x.yaml:3:1"
    assert locate(FOUND, Fault("model", "is odd", code="NO")).code == "NO"
    assert locate(FOUND, Fault("optim.betas[1]", "is odd")) == Fault("--beta2", "is odd")
    assert "clip: null" in locate(FOUND, Fault("optim.max_grad_norm", "is odd")).what  # which nobody wrote
    nowhere = Fault("seed", "is odd")
    assert locate(FOUND, nowhere) == nowhere


TUNED = "llamafactory-cli train --model_name_or_path m --stage sft --do_train --dataset d --template alpaca"
BREAKS = "x\nseed: 999\n#"


@pytest.mark.parametrize(
    "value", [BREAKS, "x\u2028seed: 999", "x\x85seed: 999", "x\rseed: 999", "x\x1b[2J", "a # b", "'"]
)
@pytest.mark.parametrize(
    "start",
    [
        "finetune.py --base_model m --data_path d.json --wandb_project p --wandb_run_name",
        f"{TUNED} --seed 7 --ddp_backend",
        f"{TUNED} --output_dir",
        "sft.py --model_name_or_path m --dataset_name d --output_dir o --report_to wandb --run_name",
        "train_sft.py --model m --data d --out",
    ],
)
def test_no_word_becomes_a_line_of_the_printed_config(start, value):
    found = translate_command([*start.split(), value], Options())
    assert yaml.safe_load(as_yaml(found)) == dict(found.config)
    found = translate_command([f"A={value}", *start.split(), "x"], Options())
    assert yaml.safe_load(as_yaml(found)) == dict(found.config)


def test_twin_that_prints_words_as_they_are(monkeypatch):
    monkeypatch.setattr(account, "one_line", str)
    found = translate_command(["train_sft.py", "--model", "m", "--data", "d", "--out", BREAKS], Options())
    assert yaml.safe_load(as_yaml(found)) != dict(found.config)


def test_a_fault_is_at_the_word_that_says_the_key_and_not_at_one_that_says_more():
    words = f"{LLAMA}use_bos_zero_training: true\nbos_scaling_factor: -1\n"
    found = translate_file("x.yaml", words, [], Options())
    assert locate(found, Fault("bos.scale", "odd")).where == "x.yaml:8:1"
    assert locate(found, Fault("bos.prepend", "odd")).where == "x.yaml:7:1"
    alone = translate_file("x.yaml", words.replace("bos_scaling_factor: -1\n", ""), [], Options())
    assert locate(alone, Fault("bos.scale", "odd")).where == "x.yaml:7:1"


SECRET = "SECRETVALUE9"
LLAMA = "model_name_or_path: m\nstage: sft\ndo_train: true\ndataset: d\ntemplate: alpaca\nfinetuning_type: lora\n"


@pytest.mark.parametrize(
    ("text", "override"),
    [
        (LLAMA, f"hub_token={SECRET}"),
        (f"{LLAMA}hub_token: {SECRET}\n", "lora_rank=4"),
        (LLAMA, f"wandb_api_key={SECRET}"),
        (f"{LLAMA}report_kwargs: {{api_key: {SECRET}}}\n", "lora_rank=4"),
    ],
)
def test_a_secret_is_in_nothing_that_is_printed_or_kept(text, override):
    found = translate_file("x.yaml", text, [override], Options(allow_unknown=True))
    assert SECRET not in as_yaml(found) + json.dumps(to_json(found))
    assert "hub_token" in json.dumps(to_json(found))
    plain = translate_file("x.yaml", text.replace("api_key", "colour"), [override.replace("wandb_api_key", "colour")],
                           Options(allow_unknown=True))  # fmt: skip
    assert (SECRET in json.dumps(to_json(plain))) == ("hub_token" not in text + override)
