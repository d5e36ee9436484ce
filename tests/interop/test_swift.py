"""ms-swift's commands and files, each with the config that it means; ids and labels as its source makes them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import transformers
import yaml

from helpers.faults import raises_fault, refused_settings
from helpers.prepared import prepared
from helpers.zoo import ZOO
from surefoot.data.sources.resolve import SourceSpec
from surefoot.interop.launch import Options
from surefoot.interop.registry import file_tool, translate_command, translate_file
from surefoot.interop.swift import rows

# Its settings and their defaults: the dataclasses of ms-swift 3602360a.
FACTS = json.loads((Path(__file__).parent / "facts" / "ms_swift.json").read_text())
LEAST = "--model m --dataset d.jsonl --output_dir out"


def command(words, *, verb="sft", read=None, environment=""):
    reading = Options(read=(read or {}).__getitem__)
    return translate_command(shlex.split(f"{environment} swift {verb} {LEAST} {words}"), reading)


def config(words="", **how):
    return command(words, **how).config


def test_every_setting_has_a_row():
    alone, every = rows.rows_of(""), [rows.rows_of(method) for method in ("dpo", "kto", "reward", "gkd", "grpo")]
    assert [name for name in FACTS["sft"] if name not in alone and not name.startswith(tuple(rows.PARTS))] == []
    for known in every:
        named = {*known, *rows.RLHF_ALIASES}
        assert [
            name for name in FACTS["rlhf"] if name not in named and not name.startswith(tuple(rows.RLHF_PARTS))
        ] == []


def test_defaults_are_its_own():
    known = rows.rows_of("")
    numbers = {name: value for name, value in FACTS["sft"].items() if isinstance(value, int | float)}
    other = {name for name, value in numbers.items() if name in known and known[name].default != value}
    assert other == {"warmup_ratio", "max_new_tokens", "temperature"}  # 0 is no warm-up, the others apply to generation
    found = config()
    assert found["optim"] == {"lr": 1e-4, "betas": [0.9, 0.95], "warmup": 0.0, "weight_decay": 0.1}
    assert (found["batch"], found["log_every"]) == ({"micro": 1}, 5)  # 16 examples in a step, as by default here
    assert found["adapter"] == {"kind": "lora", "rank": 8, "dropout": 0.05}
    full = config("--tuner_type full --per_device_train_batch_size 3", environment="NPROC_PER_NODE=2")
    assert full["optim"]["lr"] == 1e-5
    assert (full["batch"], full["parallel"]) == ({"size": 18, "micro": 3}, {"nproc": 2})
    assert "adapter" not in full


def test_its_files_and_commands_are_known():
    text = yaml.safe_dump({"model": "m", "dataset": ["d.jsonl"], "output_dir": "out", "tuner_type": "lora"})
    tool = file_tool("sft.yaml", str(text))
    assert tool is not None and tool.name == "ms-swift"  # noqa: PT018
    alone = translate_file("sft.yaml", str(text), [], Options()).config
    assert alone == config("--tuner_type lora")
    asked = shlex.split("swift sft sft.yaml --learning_rate 3e-5")
    assert translate_command(asked, Options(read={"sft.yaml": str(text)}.__getitem__)).config["optim"]["lr"] == 3e-5
    for words, where in (("swift infer --model m", "swift infer"), ("megatron sft --model m", "megatron sft")):
        with raises_fault("SF-TRANSLATE-COMMAND", where):
            translate_command(words.split(), Options())


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ("a/b#30", {"path": "a/b", "max_samples": 30}),
        ("a/b:part", {"path": "a/b", "subset": "part"}),
        ("HF::a/b", {"path": "a/b"}),
        ("AI-ModelScope/alpaca-gpt4-data-en", {"path": "vicgalle/alpaca-gpt4", "format": "alpaca"}),
        (
            "swift/self-cognition --model_name Ada --model_author Lab --system Hello",
            {
                "path": "modelscope/self-cognition",
                "system": "Hello",
                "fill": {"NAME": "Ada", "AUTHOR": "Lab"},
            },
        ),
    ],
)
def test_data_sets(words, source):
    found = translate_command(shlex.split(f"swift sft --model m --output_dir o --dataset {words}"), Options()).config
    assert found["data"]["train"] == (source["path"] if source.keys() == {"path"} else source)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--torch_dtype bfloat16", "precision", {"compute": "bf16", "base": "bf16"}),
        ("--torch_dtype bfloat16 --quant_method bnb --quant_bits 4", "precision", {"compute": "bf16", "base": "nf4"}),
        ("--packing true --max_length 512 --attn_impl flash_attn", "batch", {"row_tokens": 512}),
        ("--early_stop_interval 3 --split_dataset_ratio 0.1", "early_stopping", {"patience": 3}),
        ("--lora_rank 4 --lora_alpha 9 --use_rslora true --target_modules q_proj v_proj", "adapter",
         {"kind": "lora", "rank": 4, "alpha": 9.0, "dropout": 0.05, "rslora": True, "targets": ["q_proj", "v_proj"]}),
    ],
)  # fmt: skip
def test_what_settings_become(words, key, value):
    assert config(words)[key] == value


@pytest.mark.parametrize(
    ("model", "environment", "pixels"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "MAX_PIXELS=50000", 63 * 28 * 28),
        ("Qwen/Qwen3-VL-4B-Instruct", "MAX_PIXELS=50000 IMAGE_MAX_TOKEN_NUM=100", 102400),
        ("Qwen/Qwen2.5-7B-Instruct", "MAX_PIXELS=50000", None),
        ("Qwen/Qwen3.5-4B", "MAX_PIXELS=50000", 48 * 32 * 32),
    ],
)
def test_variables_of_qwens_own_package(model, environment, pixels):
    assert config(f"--model {model}", environment=environment)["data"].get("max_pixels") == pixels


def test_variables_of_a_file():
    text = {"model": "m", "dataset": "d.jsonl", "tuner_type": "lora", "ENV": {"NPROC_PER_NODE": 2}}
    found = translate_file("sft.json", json.dumps(text), [], Options())
    assert (found.config["parallel"]["nproc"], found.environment["NPROC_PER_NODE"]) == (2, "2")
    with raises_fault("SF-TRANSLATE-SETTING", "sft.json:1:60"):
        translate_file("sft.json", json.dumps({**text, "ENV": "NPROC_PER_NODE=2"}), [], Options())


def test_a_stream_is_read_as_far_as_the_steps_need():
    data = config("--dataset a/b --streaming true --max_steps 10")["data"]
    assert data["train"] == {"path": "a/b", "streaming": True, "max_samples": 160}
    packed = config("--dataset a/b --streaming true --max_steps 10 --packing true --max_length 640", verb="pt")
    assert (packed["stage"], packed["data"]["train"]["max_samples"]) == ("pretrain", 1600)
    assert refused_settings(lambda: command("--dataset a/b --streaming true")) == ["streaming"]


def test_shards_of_several_processes():
    found = config("--deepspeed zero3_offload", environment="NPROC_PER_NODE=2")["parallel"]
    assert found == {"engine": "deepspeed", "nproc": 2, "zero_stage": 3, "offload": "all"}
    together = config("--sequence_parallel_size 2 --gradient_accumulation_steps 2", environment="NPROC_PER_NODE=4")
    assert (together["batch"]["size"], together["parallel"]["nproc"]) == (4, 2)


def test_methods():
    dpo = config("--rpo_alpha 0.1 --loss_type hinge", verb="rlhf")
    assert (dpo["stage"], dpo["alignment"]) == ("dpo", {"loss": "hinge", "sft": 0.1})
    assert dpo["model"]["dropout"] == 0.0
    assert "dropout" not in dpo["adapter"]
    simpo = config("--rlhf_type simpo", verb="rlhf")["alignment"]
    assert (simpo["loss"], simpo["beta"], simpo["margin"], simpo["sft"]) == ("simpo", 2.0, 1.0, 1.0)
    orpo = config("--rlhf_type orpo", verb="rlhf")["alignment"]
    assert orpo == {"loss": "orpo"}  # its labels leave out the prompt, which TRL's own ORPO counts
    gkd = config("--rlhf_type gkd --teacher_model t --lmbda 0.2 --sft_alpha 0.3", verb="rlhf")
    assert (gkd["stage"], gkd["distill"]["temperature"], gkd["distill"]["sft"]) == ("distill", 0.9, 0.3)
    assert (gkd["distill"]["on_policy"], gkd["distill"]["max_new_tokens"]) == (0.2, 512)
    words = "--rlhf_type grpo --reward_funcs accuracy format --num_generations 4 --per_device_train_batch_size 8"
    grpo = config(words, verb="rlhf")["grpo"]
    assert [term["name"] for term in grpo["rewards"]] == ["math", "regex"]
    assert (grpo["group"], grpo["kl"], grpo["loss"], grpo["temperature"]) == (4, 0.04, "grpo", 0.9)
    assert "kl_by_ratio" not in grpo


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--tuner_type adalora", "tuner_type"),
        ("--task_type embedding", "task_type"),
        ("--external_plugins p.py", "external_plugins"),
        ("--loss_scale react", "loss_scale"),
        ("--truncation_strategy left", "truncation_strategy"),
        ("--truncation_strategy middle", "truncation_strategy"),
        ("--freeze_vit false", "freeze_vit"),
        ("--attn_impl flex", "attn_impl"),
        ("--template other", "template"),
        ("--dataset AI-ModelScope/coco", "dataset"),
        ("--model AI-ModelScope/one", "model"),
        ("--dataset swift/self-cognition --model_name A B", "model_name"),
        ("--train_dataloader_shuffle false", "train_dataloader_shuffle"),
        ("--max_epochs 1", "max_epochs"),
        ("--max_model_len 512", "max_model_len"),
        ("--load_args true", "load_args"),
        ("--columns '{\"a\": [1]}'", "columns"),
    ],
)
def test_what_has_no_counterpart_is_refused(words, name):
    assert refused_settings(lambda: command(words)) == [name]


GKD, GRPO = "--rlhf_type gkd --teacher_model t", "--rlhf_type grpo --reward_funcs accuracy"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--rlhf_type [1]", "rlhf_type"),
        ("--ref_model r --ref_model_revision abc", "ref_model_revision"),
        *((f"{method} {words}", words.split()[0].strip("-")) for method in (GKD, GRPO) for words in
          ("--stop_words END", "--structured_outputs_regex x", "--response_prefix x", "--enable_thinking false")),
        (f"{GRPO} --model Qwen/Qwen3-8B --enable_thinking true", "enable_thinking"),
        (f"{GRPO} --gradient_accumulation_steps 0", "gradient_accumulation_steps"),
        *((f"{GKD} {words}", words.split()[0].strip("-")) for words in ("--top_p 0.5", "--top_k 5")),
    ],
)  # fmt: skip
def test_what_changes_a_method_is_refused(words, name):
    assert refused_settings(lambda: command(words, verb="rlhf")) == [name]


def test_what_applies_to_generation_alone_is_listed():
    """And what a method that draws answers has by default is not refused."""
    config("--stop_words END --top_p 0.5 --enable_thinking false")
    config(f"{GKD} --top_p 1.0 --top_k -1 --lmbda 0 --enable_thinking true", verb="rlhf")
    unthinking = config(f"{GRPO} --model Qwen/Qwen3-8B --enable_thinking false", verb="rlhf")["data"]["template"]
    assert unthinking == config(f"{GRPO} --model Qwen/Qwen3-8B", verb="rlhf")["data"]["template"]
    assert config(f"{GRPO} --top_p 0.5 --top_k -1", verb="rlhf")["grpo"]["top_p"] == 0.5


TURNS = [("Add 2 and 3.", "It is 5."), ("Twice that?", "It is 10.")]
RECORDS = [
    {
        "messages": [
            {"role": role, "content": one[at]} for one in TURNS for at, role in enumerate(("user", "assistant"))
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A color?"},
            {"role": "assistant", "content": "Red"},
        ]
    },
]
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def theirs(tokenizer, record, *, system, thought="", last=False):
    """`_swift_encode` with ChatML: answers and the ends of turns that are learned have labels, each text has its own
    ids, and `_add_dynamic_eos` learns the separator behind an answer."""
    turns = list(record["messages"])
    system = turns.pop(0)["content"] if turns[0]["role"] == "system" else system
    parts = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for place in range(0, len(turns), 2):
        learned = not last or place == len(turns) - 2
        parts.append((f"<|im_start|>user\n{turns[place]['content']}<|im_end|>\n<|im_start|>assistant\n", False))
        parts += [(thought, False), (turns[place + 1]["content"], learned), ("<|im_end|>\n", learned)]
    ids, labels = [], []
    for text, learned in parts:
        own = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        ids += own
        labels += [learned] * len(own)
    return ids, labels


@pytest.mark.parametrize(
    ("family", "name", "words", "how"),
    [
        ("qwen2", "Qwen2.5-0.5B-Instruct", "", {"system": QWEN}),
        ("qwen2", "Qwen2.5-0.5B-Instruct", "--system Other", {"system": "Other"}),
        ("qwen2", "Qwen2.5-0.5B-Instruct", "--system ''", {"system": ""}),
        ("qwen2", "Qwen2-0.5B", "--loss_scale last_round", {"system": "You are a helpful assistant.", "last": True}),
        ("qwen3", "Qwen3-0.6B", "", {"system": "", "thought": "<think>\n\n</think>\n\n"}),
        ("qwen3", "Qwen3-4B-Instruct-2507", "", {"system": ""}),
    ],
)
def test_ids_and_labels_are_those_of_its_template(family, name, words, how, tmp_path):
    folder = ZOO[family](tmp_path / name)
    found = config(f"--model {folder} --max_length 256 {words}")["data"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [theirs(tokenizer, record, **how) for record in RECORDS]
    assert encoded(found, tokenizer, tmp_path) == expected
    other = {**found, "template": "chatml", "train_on": "responses"}  # twin: ChatML of the publishers
    assert encoded(other, tokenizer, tmp_path) != expected


def encoded(data, tokenizer, folder):
    file = folder / "d.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    source = data["train"] if isinstance(data["train"], dict) else {}
    specs = [SourceSpec(str(file), format="messages", system=source.get("system"))]
    how = {"template": data["template"], "train_on": data.get("train_on", "responses"), "bos_id": None}
    found = prepared(specs, tokenizer, folder / "cache", **how).train
    return [(found[at].ids.tolist(), found[at].supervised.tolist()) for at in range(len(RECORDS))]
