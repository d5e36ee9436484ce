"""Configs of LLaMA-Factory's v1 trainer: what each setting becomes, and tokens and labels as its source makes them."""

from __future__ import annotations

import json

import pytest
import transformers
import yaml

from helpers.faults import raises_fault, refused_settings
from helpers.prepared import prepared
from helpers.zoo import ZOO
from surefoot.data.sources.resolve import SourceSpec
from surefoot.interop.launch import Options
from surefoot.interop.registry import file_tool, translate_command, translate_file

RECORDS = [
    {"instruction": "Add 2 and 3.", "input": "", "output": "It is 5."},
    {"system": "Be brief.", "instruction": "Name a color.", "output": "Red"},
]
SETS = {"one": {"path": "d.json", "source": "local", "converter": "alpaca"}}
LEAST = {"model": "m", "train_dataset": "sets.yaml", "output_dir": "out"}


def written(settings) -> str:
    return str(yaml.safe_dump(settings))


def options(sets=SETS, *, devices=1):
    files = {"sets.yaml": written(sets)}
    return Options(read=lambda path: files[path], devices=devices)


def translated(more=None, sets=SETS, *, devices=1):
    given = {**LEAST, **(more or {})}
    return translate_file("v1.yaml", written(given), [], options(sets, devices=devices)).config


def test_its_files_and_commands_are_known_by_their_keys():
    text = written(LEAST)
    tool = file_tool("v1.yaml", text)
    assert tool is not None and tool.name == "LLaMA-Factory"  # noqa: PT018
    files = {"v1.yaml": text, "sets.yaml": written(SETS)}
    reading = Options(read=files.__getitem__)
    for words in ("llamafactory-cli sft v1.yaml", "USE_V1=1 llamafactory-cli train v1.yaml", "lmf sft v1.yaml"):
        assert translate_command(words.split(), reading).config == translated()


def test_its_defaults_are_written_out():
    found = translated()
    assert found["optim"] == {"lr": 1e-4, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.01}
    assert found["batch"] == {"size": 1, "micro": 1}
    assert (found["precision"], found["gradient_checkpointing"]) == ({"compute": "bf16"}, "on")
    assert found["data"] == {
        "train": {"path": "d.json", "format": "alpaca"},
        "template": "tokenizer",
        "max_length": 2048,
        "train_on": "completion",
        "encoding": "whole",
    }
    assert "adapter" not in found


def test_an_adapter_a_quantized_base_and_muon():
    peft = {"name": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all"}
    found = translated({"peft_config": peft, "quant_config": {"name": "bnb", "quantization_bit": 4}})
    assert found["adapter"] == {
        "kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.05, "targets": "all-linear",
    }  # fmt: skip
    assert found["precision"]["base"] == "nf4"
    muon = translated({"optim_config": {"name": "muon"}})["optim"]
    assert (muon["name"], muon["weight_decay"], muon["betas"], muon["momentum"]) == ("muon", 0.1, [0.9, 0.95], 0.95)
    first = translated({"peft_config": {"name": "freeze", "freeze_trainable_layers": -1}})
    assert first["model"]["trained"] == [r".*\.(0)(\..*)?"]


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ({"micro_batch_size": 3}, {"size": 6, "micro": 3}),
        ({"micro_batch_size": 3, "global_batch_size": 12}, {"size": 12, "micro": 3}),
        ({"micro_batch_size": 3, "cp_size": 2}, {"size": 3, "micro": 3}),
        ({"micro_batch_size": 3, "batching_strategy": "padding_free"}, {"size": 6, "micro": 3}),
        ({"micro_batch_size": 3, "batching_strategy": "dynamic_padding_free"}, {"size": 2, "row_tokens": 6144}),
    ],
)
def test_a_step_on_two_devices(more, batch):
    assert translated(more, devices=2)["batch"] == batch


def test_another_value_of_a_setting_is_tried_in_the_same_stage():
    found = translate_file("v1.yaml", written(LEAST), [], options())
    assert found.with_value("cutoff_len", 64)["data"]["max_length"] == 64


def test_its_data_sets():
    pairs = {"p": {"path": "org/pairs", "split": "some", "converter": "pair"}}
    found = translated({"pref_beta": 0.3}, pairs)
    assert found["stage"] == "dpo"
    assert found["data"]["train"] == {"path": "org/pairs", "format": "preference", "split": "some"}
    assert found["alignment"]["beta"] == 0.3
    several = {**SETS, "two": {"path": "org/two", "converter": "sharegpt", "size": 5, "weight": 0.5}}
    found = translated({}, several)["data"]
    assert found["train"][1] == {"path": "org/two", "format": "sharegpt", "max_samples": 5, "epochs": 0.5}
    assert "train_on" not in found  # the answers, as by default


@pytest.mark.parametrize(
    ("part", "encoding"),
    [({"type": "text", "value": "?"}, "whole"), ({"type": "image_url", "value": "a.png"}, "parts")],
)
def test_its_own_form(part, encoding):
    own = {"own": {"path": "d.jsonl", "source": "local"}}
    record = json.dumps({"messages": [{"role": "user", "content": [part]}]})
    files = {"sets.yaml": written(own), "d.jsonl": record}
    found = translate_file("v1.yaml", written(LEAST), [], Options(read=files.__getitem__)).config["data"]
    assert found["train"] == {"path": "d.jsonl", "format": "messages"}
    assert found.get("encoding", "parts") == encoding


@pytest.mark.parametrize(
    ("more", "sets", "name"),
    [
        ({"batching_strategy": "dynamic_batching"}, SETS, "batching_strategy"),
        ({"model_class": "cls"}, SETS, "model_class"),
        ({"global_batch_size": 3, "micro_batch_size": 2}, SETS, "global_batch_size"),
        ({"lr_scheduler_config": "cosine"}, SETS, "lr_scheduler_config"),
        ({"stage": "sft"}, SETS, "stage"),
        ({}, {"own": 5}, "train_dataset"),
        ({}, {"own": {"path": "org/own", "converter": ["alpaca"]}}, "train_dataset"),
        ({}, {"own": {"converter": "alpaca"}}, "train_dataset"),
        ({}, {}, "train_dataset"),
        ({"optim_config": "muon"}, SETS, "optim_config"),
        ({"peft_config": "lora"}, SETS, "peft_config"),
    ],
)
def test_what_has_no_counterpart_is_refused(more, sets, name):
    given = written({**LEAST, **more})
    assert refused_settings(lambda: translate_file("v1.yaml", given, [], options(sets)), text=given) == [name]


def test_a_merge_becomes_export_and_reward_models_are_refused():
    merged = {"model": "m", "peft_config": {"name": "lora", "adapter_name_or_path": "a", "export_dir": "e"}}
    found = translate_file("v1.yaml", written(merged), [], Options())
    assert (found.command, found.arguments[:4]) == ("export", ("m", "--adapter", "a", "--merge"))
    with raises_fault("SF-TRANSLATE-COMMAND", "llamafactory-cli rm"):
        translate_command(["llamafactory-cli", "rm", "v1.yaml"], Options())


def theirs(tokenizer, record):
    """`_render_messages`: the full text's ids, learned behind those of the prompt, both without thoughts."""
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    prompt = [*system, {"role": "user", "content": record["instruction"] + record.get("input", "")}]

    def ids(turns, **how):
        text = tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False, **how)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = ids([*prompt, {"role": "assistant", "content": record["output"]}])
    learned = len(ids(prompt, add_generation_prompt=True))
    return whole, [False] * learned + [True] * (len(whole) - learned)


def ours(folder, data, template):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    file = folder.parent / "d.json"
    file.write_text(json.dumps(RECORDS))
    specs = [SourceSpec(str(file), format=data["train"]["format"])]
    how = {name: data[name] for name in ("train_on", "encoding", "max_length")}
    found = prepared(specs, tokenizer, folder.parent / "cache", template=template, bos_id=None, **how).train
    examples = [found[index] for index in range(len(RECORDS))]
    return tokenizer, [(one.ids.tolist(), one.supervised.tolist()) for one in examples]


@pytest.mark.parametrize(("family", "name"), [("qwen3", "Qwen3-0.6B"), ("qwen2", "Qwen2.5-0.5B")])
def test_ids_and_labels_are_those_of_its_renderer(family, name, tmp_path):
    folder = ZOO[family](tmp_path / name)
    data = translated({"model": str(folder)})["data"]
    tokenizer, found = ours(folder, data, data["template"])
    assert found == [theirs(tokenizer, record) for record in RECORDS]


def test_twin_the_tokenizers_own_template_also_learns_empty_thoughts(tmp_path):
    folder = ZOO["qwen3"](tmp_path / "Qwen3-0.6B")
    data = translated({"model": str(folder)})["data"]
    assert data["template"] == "llamafactory-qwen3-unthinking"
    tokenizer, found = ours(folder, data, "tokenizer")
    expected = [theirs(tokenizer, record) for record in RECORDS]
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert found != expected
