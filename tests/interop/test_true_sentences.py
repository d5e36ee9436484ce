"""What is said of other tools: that surefoot does not know a setting, never that the tool lacks it."""

from __future__ import annotations

import json

import pytest

from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import InputError

AXOLOTL = {
    "base_model": "m", "learning_rate": 1e-5, "output_dir": "o", "datasets": [{"path": "d.jsonl", "type": "alpaca"}],
}  # fmt: skip
ZERO3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": "auto"}
TUNE = """
output_dir: o
checkpointer: {checkpoint_dir: m}
seed: 1
model: {_component_: torchtune.models.gemma.gemma_2b}
tokenizer: {_component_: torchtune.models.gemma.gemma_tokenizer, path: t}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 0.001}
"""


def axolotl(**more):
    return translate_file("a.json", json.dumps(AXOLOTL | more), [], Options(read=lambda path: json.dumps(ZERO3)))


def refusals(read, **more):
    with pytest.raises(InputError) as caught:
        read(**more)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        ("axolotl", "Axolotl"),
        ("trl", "TRL"),
        ("llama", "LLaMA-Factory"),
    ],
)
def test_a_key_that_surefoot_does_not_know_is_not_denied_to_the_tool(words, tool):
    bases = {
        "axolotl": ("a.json", AXOLOTL),
        "trl": ("sft.json", {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}),
        "llama": ("l.json", {"model_name_or_path": "m", "stage": "sft", "do_train": True, "dataset": "d",
                             "template": "llama3", "output_dir": "o"}),
    }  # fmt: skip
    path, base = bases[words]
    given = json.dumps(base | {"newest_key": 1})
    (said,) = refusals(lambda: translate_file(path, given, [], Options()))
    assert "newest_key" in said
    assert not said.partition("newest_key")[2].lstrip(": ").startswith(tool)  # whose word it may well be
    found = translate_file(path, given, [], Options(allow_unknown=True))
    assert any(note.word.startswith("newest_key") and note.outcome == "listed" for note in found.notes)


def test_bf16_of_axolotls_own_file_settles_what_it_leaves_open():
    assert axolotl(bf16="auto", deepspeed="zero3_bf16.json").config["precision"]["compute"] == "bf16"
    assert axolotl(bf16="auto").config.get("precision", {}).get("compute", "auto") == "auto"
    assert any("bf16.enabled" in said for said in refusals(axolotl, bf16=False, deepspeed="zero3_bf16.json"))


@pytest.mark.parametrize("more", [{"save_strategy": "best"}, {"optimizer": "muon"}])
def test_what_surefoot_has_is_not_denied(more):
    (said,) = refusals(axolotl, **more)
    assert next(iter(more)) in said
    assert "needs a number" not in said
    assert "surefoot has no" not in said


@pytest.mark.parametrize(
    ("flags", "count"),
    [("--nnodes 1 --nproc_per_node 2", 2), ("--nnodes=1:1 --nproc-per-node=4 --master_port 29501", 4), ("", None)],
)
def test_tune_runs_own_flags_stand_before_the_recipe(flags, count):
    command = f"tune run {flags} lora_finetune_distributed --config c.yaml".split()
    found = translate_command(command, Options(read=lambda path: TUNE)).config
    assert found.get("parallel", {}).get("nproc") == count


@pytest.mark.parametrize("flags", ["--nnodes 2", "--nproc_per_node none", "--standalone_please 1"])
def test_other_flags_of_tune_run_are_told_by_their_names(flags):
    command = f"tune run {flags} lora_finetune_distributed --config c.yaml".split()
    (said,) = refusals(lambda: translate_command(command, Options(read=lambda path: TUNE)))
    assert flags.split()[0] in said


def test_texts_that_llamafactory_joins_are_told_as_changed():
    words = {"model_name_or_path": "m", "stage": "pt", "do_train": True, "dataset": "d", "output_dir": "o"}

    def outcomes(**more):
        found = translate_file("l.json", json.dumps(words | more), [], Options())
        return {note.outcome for note in found.notes if note.word.startswith("stage")}

    assert outcomes() == {"changed"}
    assert outcomes(packing=False) == {"carried"}


def test_dropout_of_one_model_is_told_to_be_that_of_both():
    words = "main.py --actor_model_name_or_path a/b --critic_model_name_or_path c/d"

    def outcome(more):
        notes = translate_command(f"{words} {more}".split(), Options()).notes
        return next(note.outcome for note in notes if note.word.startswith("--actor_dropout"))

    assert outcome("--actor_dropout 0.0") == "changed"
    assert outcome("--actor_dropout 0.0 --critic_dropout 0.0") == "carried"
