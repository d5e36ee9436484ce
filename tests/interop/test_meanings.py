"""Words whose value depends on others, or on how they were written; each beside the reading that was wrong."""

from __future__ import annotations

import pytest

from helpers.faults import refused_settings
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import Fault, InputError

AXOLOTL = (
    "base_model: m\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: 1e-4\nmicro_batch_size: 1\nval_set_size: 0.1\n"
)
FACTORY = "model_name_or_path: m\nstage: sft\ndo_train: true\ndataset: a\ntemplate: llama3\noutput_dir: out\n"


def axolotl(more: str):
    return translate_file("run.yml", AXOLOTL + more, [], Options())


def factory(more: str):
    return translate_file("run.yaml", FACTORY + more, [], Options())


def test_a_share_is_of_max_steps_where_they_are_given():
    found = axolotl("max_steps: 100\neval_steps: 0.1\nsave_steps: 0.25\n")
    assert found.config["eval_every"] == "10 steps"
    assert found.config["checkpoint"]["every"] == "25 steps"


def test_twin_without_them_it_is_of_the_epochs():
    assert axolotl("num_epochs: 2\neval_steps: 0.1\n").config["eval_every"] == "0.2 epochs"


@pytest.mark.parametrize(("steps", "outcome"), [("0.5", "carried"), ("0.3", "changed")])
def test_a_fraction_is_told_only_where_it_changes_something(steps, outcome):
    found = axolotl(f"num_epochs: 2\neval_steps: {steps}\n")
    assert next(note.outcome for note in found.notes if note.word.startswith("eval_steps")) == outcome


@pytest.mark.parametrize(("held", "read"), [("", 80), ("val_size: 64\n", 144)])
def test_a_stream_is_read_for_what_is_held_out_as_well(held, read):
    more = "dataset_dir: ONLINE\nstreaming: true\nmax_steps: 10\nper_device_train_batch_size: 8\n"
    assert factory(more + held).config["data"]["train"]["max_samples"] == read


def test_a_share_of_a_stream_is_refused():
    words = "dataset_dir: ONLINE\nstreaming: true\nmax_steps: 10\nval_size: 0.1\n"
    assert refused_settings(lambda: factory(words), text=FACTORY + words) == ["val_size"]


@pytest.mark.parametrize("name", ["007", "1e5", "12e4567", "0x10", "true"])
def test_a_text_stays_as_it_was_written(name):
    words = f"trl sft --model_name_or_path m --dataset_name d --output_dir {name} --model_revision {name} --lora_r 007"
    found = translate_command(words.split(), Options())
    assert (found.config["output"], found.config["model"]["revision"]) == (name, name)
    assert factory("run_name: x\nreport_to: wandb\n").config["tracking"]["name"] == "x"
    assert translate_file("r.yaml", FACTORY, [f"output_dir={name}"], Options()).config["output"] == name


@pytest.mark.parametrize(
    ("entry", "split"),
    [("path: org/x, split: train", "train"), ("path: org/x", "test"), ("path: x.json, split: train", None)],
)
def test_evaluation_data_of_axolotl_keep_their_split(entry, split):
    text = AXOLOTL.replace("val_set_size: 0.1", f"test_datasets: [{{{entry}, type: alpaca}}]")
    assert translate_file("run.yml", text, [], Options()).config["data"]["eval"].get("split") == split


def test_evaluation_data_of_llamafactory_are_the_train_split_of_the_hub():
    found = factory("dataset_dir: ONLINE\neval_dataset: org/x\n")
    assert found.config["data"]["eval"] == {"split": "train", "path": "org/x"}
    assert factory("eval_dataset: b\n").config["data"]["eval"] == {"path": "data", "name": "b"}


FILES = {"f.yaml": FACTORY, "a.yml": AXOLOTL}


def read(path: str) -> str:
    if path in FILES:
        return FILES[path]
    raise InputError(Fault(path, "cannot be read"))


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        ("python src/train.py f.yaml", "LLaMA-Factory"),
        ("accelerate launch src/train.py a.yml", "Axolotl"),
        ("accelerate launch scripts/finetune.py a.yml", "Axolotl"),
        ("deepspeed src/train_bash.py --stage sft --do_train --model_name_or_path m --dataset a", "LLaMA-Factory"),
    ],
)  # fmt: skip
def test_a_shared_name_belongs_to_whose_file_or_flags_it_has(words, tool):
    assert translate_command(words.split(), Options(read=read)).tool == tool


def test_a_file_for_answering_becomes_chat():
    text = "model_name_or_path: m\nadapter_name_or_path: saves/a\ntemplate: llama3\ninfer_backend: huggingface\n"
    found = translate_file("infer.yaml", text, [], Options())
    assert (found.command, found.arguments[:3]) == ("chat", ("m", "--adapter", "saves/a"))


def test_twin_a_training_without_data_is_told():
    without = FACTORY.replace("dataset: a\n", "")
    assert refused_settings(lambda: translate_file("run.yaml", without, [], Options()), text=without) == ["dataset"]


TUNE = """
output_dir: o
model: {_component_: torchtune.models.llama3.llama3_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t}
checkpointer: {checkpoint_dir: m}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
"""
QUANTIZER = "quantizer: {{_component_: torchtune.training.quantization.{}, groupsize: {}}}\n"


def tune(more: str):
    return translate_file("run.yaml", TUNE + more, [], Options())


def test_int4_weights_with_int8_activations_are_rounded_as_torchtune_does():
    found = tune(QUANTIZER.format("Int8DynActInt4WeightQATQuantizer", 256))
    assert found.config["precision"] | {"compute": ""} == {"compute": "", "qat": "int8-int4", "qat_group_size": 256}
    assert "qat" not in tune("").config["precision"]
    for more in (QUANTIZER.format("Int4WeightOnlyQATQuantizer", 256), "fake_quant_after_n_steps: 10\n"):
        with pytest.raises(InputError) as caught:
            tune(more)
        last = len((TUNE + more).splitlines())  # where the setting stands
        assert [(one.code, one.where.split(":")[1]) for one in caught.value.faults] == [
            ("SF-TRANSLATE-SETTING", str(last))
        ]


def test_axolotls_two_grids_are_told():
    found = axolotl("qat: {weight_dtype: int4, activation_dtype: int8, group_size: 64}\n")
    assert found.config["precision"]["qat"] == "int8-int4"
    assert found.config["precision"]["qat_group_size"] == 64
    assert next(note.outcome for note in found.notes if note.word.startswith("qat")) == "changed"


@pytest.mark.parametrize(
    "said",
    [
        "weight_dtype: int4",
        "activation_dtype: int8",
        "weight_dtype: fp8, activation_dtype: fp8",
        "weight_dtype: int4, activation_dtype: int8, quantize_embedding: true",
        "weight_dtype: int4, activation_dtype: int8, fake_quant_after_n_steps: 5",
        "weight_dtype: int4, activation_dtype: int8, bits: 4",
    ],
)
def test_what_axolotl_rounds_otherwise_is_refused(said):
    more = f"qat: {{{said}}}\n"
    assert refused_settings(lambda: axolotl(more), text=AXOLOTL + more) == ["qat"]
