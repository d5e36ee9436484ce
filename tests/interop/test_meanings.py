"""Words whose value depends on others, or on how they were written; each beside the reading that was wrong. What is
said of another tool: that surefoot does not know a setting, never that the tool lacks it."""

from __future__ import annotations

import json

import pytest
import yaml

from helpers.faults import refused_settings
from interop.small_configs import BASES, outcome, text_of, translated
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import Fault, InputError


def refused(tool: str, options: Options | None = None, **words: object) -> list[str]:
    return refused_settings(lambda: translated(tool, options, **words), text=text_of(tool, **words))


def test_a_share_is_of_max_steps_where_they_are_given():
    found = translated("axolotl", val_set_size=0.1, max_steps=100, eval_steps=0.1, save_steps=0.25).config
    assert (found["eval_every"], found["checkpoint"]["every"]) == ("10 steps", "25 steps")


@pytest.mark.parametrize(("steps", "every", "told"), [(0.5, "1 epoch", "carried"), (0.3, "0.6 epochs", "changed")])
def test_twin_without_them_it_is_of_the_epochs(steps, every, told):
    found = translated("axolotl", val_set_size=0.1, num_epochs=2, eval_steps=steps)
    assert (found.config["eval_every"], outcome(found, "eval_steps")) == (every, told)


STREAM = {"dataset_dir": "ONLINE", "streaming": True, "max_steps": 10, "per_device_train_batch_size": 8}


@pytest.mark.parametrize(("held", "read"), [({}, 80), ({"val_size": 64}, 144)])
def test_a_stream_is_read_for_what_is_held_out_as_well(held, read):
    assert translated("factory", **STREAM, **held).config["data"]["train"]["max_samples"] == read


def test_a_share_of_a_stream_is_refused():
    assert refused("factory", **STREAM, val_size=0.1) == ["val_size"]


@pytest.mark.parametrize("name", ["007", "1e5", "12e4567", "0x10", "true"])
def test_a_text_stays_as_it_was_written(name):
    words = f"trl sft --model_name_or_path m --dataset_name d --output_dir {name} --model_revision {name} --lora_r 007"
    found = translate_command(words.split(), Options())
    assert (found.config["output"], found.config["model"]["revision"]) == (name, name)
    assert translate_file("r.json", text_of("factory"), [f"output_dir={name}"], Options()).config["output"] == name


@pytest.mark.parametrize(
    ("entry", "split"),
    [({"path": "org/x", "split": "train"}, "train"), ({"path": "org/x"}, "test"),
     ({"path": "x.json", "split": "train"}, None)],
)  # fmt: skip
def test_evaluation_data_of_axolotl_keep_their_split(entry, split):
    found = translated("axolotl", test_datasets=[entry | {"type": "alpaca"}])
    assert found.config["data"]["eval"].get("split") == split


def test_evaluation_data_of_llamafactory_are_the_train_split_of_the_hub():
    found = translated("factory", dataset_dir="ONLINE", eval_dataset="org/x")
    assert found.config["data"]["eval"] == {"split": "train", "path": "org/x"}
    assert translated("factory", eval_dataset="b").config["data"]["eval"] == {"path": "data", "name": "b"}


FILES = {"f.json": text_of("factory"), "a.yml": text_of("axolotl")}


def read(path: str) -> str:
    if path in FILES:
        return FILES[path]
    raise InputError(Fault(path, "cannot be read"))


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        ("python src/train.py f.json", "LLaMA-Factory"),
        ("accelerate launch src/train.py a.yml", "Axolotl"),
        ("accelerate launch scripts/finetune.py a.yml", "Axolotl"),
        ("deepspeed src/train_bash.py --stage sft --do_train --model_name_or_path m --dataset a", "LLaMA-Factory"),
    ],
)
def test_a_shared_name_belongs_to_whose_file_or_flags_it_has(words, tool):
    assert translate_command(words.split(), Options(read=read)).tool == tool


def test_a_file_for_answering_becomes_chat():
    text = "model_name_or_path: m\nadapter_name_or_path: saves/a\ntemplate: llama3\ninfer_backend: huggingface\n"
    found = translate_file("infer.yaml", text, [], Options())
    assert (found.command, found.arguments[:3]) == ("chat", ("m", "--adapter", "saves/a"))


def test_twin_a_training_without_data_is_told():
    assert refused("factory", dataset=None) == ["dataset"]


def quantizer(name: str) -> dict[str, object]:
    return {"_component_": f"torchtune.training.quantization.{name}", "groupsize": 256}


def test_int4_weights_with_int8_activations_are_rounded_as_torchtune_does():
    found = translated("tune", quantizer=quantizer("Int8DynActInt4WeightQATQuantizer"))
    assert found.config["precision"] | {"compute": ""} == {"compute": "", "qat": "int8-int4", "qat_group_size": 256}
    assert "qat" not in translated("tune").config["precision"]
    other = f"quantizer: {json.dumps(quantizer('Int4WeightOnlyQATQuantizer'))}\n"
    late = translated("tune", quantizer=quantizer("Int8DynActInt4WeightQATQuantizer"), fake_quant_after_n_steps=10)
    assert late.config["precision"]["qat_after"] == 10
    assert "qat_after" not in found.config["precision"]
    never = f"quantizer: {json.dumps(quantizer('Int8DynActInt4WeightQATQuantizer'))}\nfake_quant_after_n_steps: 0\n"
    for more in (other, never):
        text = yaml.safe_dump(BASES["tune"][1]) + more
        with pytest.raises(InputError) as caught:
            translate_file("t.yaml", text, [], Options())
        places = [(fault.code, fault.where.split(":")[1]) for fault in caught.value.faults]
        assert places == [("SF-TRANSLATE-SETTING", str(len(text.splitlines())))]


def test_axolotls_two_grids_are_told():
    found = translated("axolotl", qat={"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 64})
    assert (found.config["precision"]["qat"], found.config["precision"]["qat_group_size"]) == ("int8-int4", 64)
    assert outcome(found, "qat") == "changed"
    assert "qat_after" not in found.config["precision"]
    late = translated("axolotl", qat=BOTH | {"fake_quant_after_n_steps": 1000})
    assert late.config["precision"]["qat_after"] == 1000


@pytest.mark.parametrize("more", [{}, {"fake_quant_after_n_steps": 5}])
@pytest.mark.parametrize(("form", "size"), [("nvfp4", 16), ("mxfp4", 32)])
def test_axolotls_floats_of_4_bits(form, size, more):
    """A later start does not reach their layers: Axolotl's callback knows torchao's layers of integers alone."""
    said = {"weight_dtype": form, "activation_dtype": form, "group_size": size}
    found = translated("axolotl", qat=said | more)
    precision = found.config["precision"]
    assert (precision["qat"], precision.get("qat_group_size"), precision.get("qat_after", 0)) == (form, None, 0)
    assert outcome(found, "qat") == "changed"


BOTH = {"weight_dtype": "int4", "activation_dtype": "int8"}


@pytest.mark.parametrize(
    "said",
    [
        {"weight_dtype": "int4"}, {"activation_dtype": "int8"}, {"weight_dtype": "fp8", "activation_dtype": "fp8"},
        BOTH | {"quantize_embedding": True}, BOTH | {"fake_quant_after_n_steps": 0}, BOTH | {"bits": 4},
        {"weight_dtype": "nvfp4"}, {"weight_dtype": "nvfp4", "activation_dtype": "nvfp4"},
        {"weight_dtype": "mxfp4", "activation_dtype": "mxfp4", "group_size": 16},
    ],
)  # fmt: skip
def test_what_axolotl_rounds_otherwise_is_refused(said):
    assert refused("axolotl", qat=said) == ["qat"]


@pytest.mark.parametrize(("words", "tool"), [("axolotl", "Axolotl"), ("trl", "TRL"), ("factory", "LLaMA-Factory")])
def test_a_key_that_surefoot_does_not_know_is_not_denied_to_the_tool(words, tool):
    with pytest.raises(InputError) as caught:
        translated(words, newest_key=1)
    (said,) = (str(fault) for fault in caught.value.faults)
    assert "newest_key" in said
    assert not said.partition("newest_key")[2].lstrip(": ").startswith(tool)  # whose word it may well be
    assert outcome(translated(words, Options(allow_unknown=True), newest_key=1), "newest_key") == "listed"


def test_bf16_of_axolotls_own_file_settles_what_it_leaves_open():
    zero3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": "auto"}
    options = Options(read=lambda path: json.dumps(zero3))
    found = translated("axolotl", options, bf16="auto", deepspeed="zero3.json").config
    assert found["precision"]["compute"] == "bf16"
    assert translated("axolotl", bf16="auto").config.get("precision", {}).get("compute", "auto") == "auto"
    assert refused("axolotl", options, bf16=False, deepspeed="zero3.json") == ["deepspeed"]


@pytest.mark.parametrize("more", [{"save_strategy": "best"}, {"optimizer": "muon"}])
def test_what_surefoot_has_otherwise_is_refused_at_its_word(more):
    assert refused("axolotl", **more) == [*more]


@pytest.mark.parametrize(
    ("flags", "count"),
    [("--nnodes 1 --nproc_per_node 2", 2), ("--nnodes=1:1 --nproc-per-node=4 --master_port 29501", 4), ("", None)],
)
def test_tune_runs_own_flags_stand_before_the_recipe(flags, count):
    command = f"tune run {flags} lora_finetune_distributed --config c.yaml".split()
    found = translate_command(command, Options(read=lambda path: text_of("tune"))).config
    assert found.get("parallel", {}).get("nproc") == count


def test_tune_run_on_two_machines():
    command = "tune run --nnodes 2 --nproc_per_node 4 --node_rank 1 --master_addr a lora_finetune_distributed"
    found = translate_command([*command.split(), "--config", "c.yaml"], Options(read=lambda path: text_of("tune")))
    assert {name: found.config["parallel"][name] for name in ("nproc", "machines")} == {"nproc": 4, "machines": 2}
    assert {name: found.environment[name] for name in ("NODE_RANK", "MASTER_ADDR")} == {
        "NODE_RANK": "1",
        "MASTER_ADDR": "a",
    }


@pytest.mark.parametrize("flags", ["--nnodes 1:2", "--nproc_per_node none", "--standalone_please 1"])
def test_other_flags_of_tune_run_are_told_by_their_names(flags):
    command = f"tune run {flags} lora_finetune_distributed --config c.yaml".split()
    with pytest.raises(InputError) as caught:
        translate_command(command, Options(read=lambda path: text_of("tune")))
    (fault,) = caught.value.faults
    assert flags.split()[0] in str(fault)


@pytest.mark.parametrize(("more", "told"), [({}, "changed"), ({"packing": False}, "carried")])
def test_texts_that_llamafactory_joins_are_told_as_changed(more, told):
    assert outcome(translated("factory", stage="pt", template=None, **more), "stage") == told


@pytest.mark.parametrize(("more", "told"), [("", "changed"), ("--critic_dropout 0.0", "carried")])
def test_dropout_of_one_model_is_told_to_be_that_of_both(more, told):
    words = f"main.py --actor_model_name_or_path a/b --critic_model_name_or_path c/d --actor_dropout 0.0 {more}"
    assert outcome(translate_command(words.split(), Options()), "--actor_dropout") == told


def test_the_bases_are_trainings_of_their_tools():
    tools = {tool: translated(tool).tool for tool in BASES}
    assert tools == {"axolotl": "Axolotl", "trl": "TRL", "factory": "LLaMA-Factory", "tune": "torchtune"}
