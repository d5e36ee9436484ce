"""LLaMA-Factory configs and commands, written from its documentation, each with the surefoot config that it means."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
import yaml

from helpers.faults import gives, refused_settings, setting
from helpers.model_layouts import LLAMA31_8B, model_facts
from surefoot.config.schema import RunConfig
from surefoot.interop.backward import Ours
from surefoot.interop.export import export, targets
from surefoot.interop.launch import Options, no_files
from surefoot.interop.registry import file_tool, translate_command, translate_file
from surefoot.models.wrapped import freeze_others
from surefoot.planning.notes import Notes
from surefoot.planning.trained import with_layers
from surefoot.system.errors import InputError

ONE_WAY = {  # what a config with nothing but the required words becomes
    "stage": "sft",
    "model": {"path": "hub/base"},
    "adapter": {"kind": "lora", "rank": 8, "alpha": 16.0, "targets": "all-linear"},
    "data": {"train": {"path": "data", "name": "identity"}, "template": "llamafactory-llama3"},
    "gradient_checkpointing": "on",
    "batch": {"size": 8, "micro": 8},
    "optim": {"lr": 5e-5, "schedule": "linear", "warmup": 0.0},
    "duration": "3 epochs",
    "log_every": 500,
    "checkpoint": {"every": "500 steps", "keep": 1000},
    "bos": {"prepend": "on"},
    "output": "out",
}
REQUIRED = {
    "model_name_or_path": "hub/base",
    "stage": "sft",
    "do_train": True,
    "dataset": "identity",
    "template": "llama3",
    "output_dir": "out",
    "lora_target": "all",
}


def merged(base: dict, changes: dict) -> dict:
    """changes over base; a value of None takes the key away."""
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict) and key != "train":
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


CASES = {
    "all of a model that sees": (
        {
            "finetuning_type": "full", "lora_target": None, "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False, "image_max_pixels": 262144,
        },
        {
            "adapter": None,
            "vision": {"tower": "trained", "projector": "trained"},
            "data": {"max_pixels": 262144},
        },
    ),
    "a projector beside all of a language model": (
        {
            "finetuning_type": "full", "lora_target": None, "freeze_vision_tower": True,
            "freeze_multi_modal_projector": False,
        },
        {"adapter": None, "vision": {"projector": "trained"}},
    ),
    "LoRA in the tower": ({"freeze_vision_tower": False}, {"vision": {"tower": "adapter"}}),
    "with LoRA the projector's word changes nothing there": ({"freeze_multi_modal_projector": False}, {}),
    "the required words alone": ({}, {}),
    "lora_sft.yaml of its examples": (
        {
            "trust_remote_code": True, "finetuning_type": "lora", "lora_rank": 8, "cutoff_len": 2048,
            "dataset": "identity,alpaca_en_demo", "max_samples": 1000, "preprocessing_num_workers": 16,
            "dataloader_num_workers": 4, "logging_steps": 10, "save_steps": 500, "plot_loss": True,
            "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
            "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
            "ddp_timeout": 180000000, "resume_from_checkpoint": None,
        },
        {
            "data": {
                "train": [{"path": "data", "name": "identity"}, {"path": "data", "name": "alpaca_en_demo"}],
                "max_length": 2048,
                "max_samples": 1000,
                "workers": 4,
            },
            "precision": {"compute": "bf16"},
            "batch": {"size": 8, "micro": 1},
            "optim": {"lr": 1e-4, "schedule": "cosine", "warmup": 0.1, "warmup_from_zero": True},
            "log_every": 10,
            "report_to": [],
        },
    ),
    "its evaluation block": (
        {"val_size": 0.1, "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 500},
        {"data": {"eval": 0.1}, "eval_every": "500 steps", "checkpoint": {"best": "none"}},
    ),
    "evaluation sets, the best kept": (
        {
            "eval_dataset": "a, b", "max_samples": 50, "evaluation_strategy": "epoch", "save_strategy": "epoch",
            "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
            "early_stopping_steps": 2, "save_total_limit": 2,
        },
        {
            "data": {
                "eval": [
                    {"path": "data", "name": "a", "max_samples": 50},
                    {"path": "data", "name": "b", "max_samples": 50},
                ],
                "max_samples": 50,
            },
            "eval_every": "1 epoch",
            "checkpoint": {"every": "1 epoch", "keep": 2, "best": "loss"},
            "early_stopping": {"patience": 2},
        },
    ),
    "a held-out count, evaluated at the end": (
        {"val_size": 20, "do_eval": True, "eval_strategy": "no"},
        {"data": {"eval": 20}, "eval_every": "null", "checkpoint": {"best": "none"}},
    ),
    "eval_steps left out is logging_steps": (
        {"val_size": 0.2, "eval_strategy": "steps", "logging_steps": 25},
        {"data": {"eval": 0.2}, "eval_every": "25 steps", "log_every": 25, "checkpoint": {"best": "none"}},
    ),
    "full_sft": (
        {"finetuning_type": "full", "bf16": True, "learning_rate": 1e-5},
        {"adapter": None, "precision": {"compute": "bf16"}, "optim": {"lr": 1e-5}},
    ),
    "some modules of the last layers": (
        {"finetuning_type": "freeze", "freeze_trainable_modules": "self_attn,mlp", "freeze_extra_modules": "lm_head"},
        {
            "adapter": None,
            "model": {"trained": [r".*\.(30|31)\.self_attn.*", r".*\.(30|31)\.mlp.*", ".*lm_head.*"]},
        },
    ),
    "qlora: bitsandbytes": (
        {"quantization_bit": 4, "quantization_method": "bnb", "double_quantization": True},
        {"precision": {"base": "nf4"}},
    ),
    "8 bits": ({"quantization_bit": 8}, {"precision": {"base": "int8"}}),
    "dora and rslora": (
        {"use_dora": True, "use_rslora": True, "lora_rank": 16, "lora_alpha": 64, "lora_dropout": 0.05},
        {"adapter": {"kind": "dora", "rank": 16, "alpha": 64.0, "dropout": 0.05, "rslora": True}},
    ),
    "named targets and modules trained in full": (
        {"lora_target": "q_proj,v_proj", "additional_target": "lm_head,embed_tokens"},
        {"adapter": {"targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}},
    ),
    "targets as a list": ({"lora_target": ["q_proj"]}, {"adapter": {"targets": ["q_proj"]}}),
    "warm-up in steps goes before a share": (
        {"warmup_steps": 20, "warmup_ratio": 0.1},
        {"optim": {"warmup": "20 steps", "warmup_from_zero": True}},
    ),
    "warm-up as a share of known steps is rounded up": (
        {"max_steps": 25, "warmup_ratio": 0.1},
        {"duration": "25 steps", "optim": {"warmup": "3 steps", "warmup_from_zero": True}},
    ),
    "a constant rate has no warm-up": (
        {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
        {"optim": {"schedule": "constant"}},
    ),
    "a constant rate with warm-up": (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
        {"optim": {"schedule": "constant", "warmup": 0.1, "warmup_from_zero": True}},
    ),
    "shares of all steps": (
        {"max_steps": 100, "logging_steps": 0.05, "save_steps": 0.25},
        {"duration": "100 steps", "log_every": 5, "checkpoint": {"every": "25 steps"}},
    ),
    "optimizer": (
        {"optim": "adamw_8bit", "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0, "adam_epsilon": 1e-7},
        {
            "optim": {
                "name": "adamw_8bit", "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-7, "max_grad_norm": "null",
            }
        },
    ),
    "adafactor": ({"optim": "adafactor"}, {"optim": {"name": "adafactor"}}),
    "muon": ({"use_muon": True}, {"optim": {"name": "muon"}}),
    "neftune, fp16, eager attention, no checkpointing": (
        {"neftune_noise_alpha": 5, "fp16": True, "flash_attn": "disabled", "disable_gradient_checkpointing": True},
        {
            "optim": {"neftune_alpha": 5},
            "precision": {"compute": "fp16"},
            "attention": {"implementation": "eager"},
            "gradient_checkpointing": "off",
        },
    ),
    "flash attention 2": ({"flash_attn": "fa2"}, {"attention": {"implementation": "flash_attention_2"}}),
    "qwen": (
        {"template": "qwen"},
        {"data": {"template": "llamafactory-qwen"}, "bos": {"prepend": "off"}},
    ),
    "the tokenizer's template": (
        {"template": None},
        {"data": {"template": "tokenizer"}, "bos": None},
    ),
    "what is learned": ({"train_on_prompt": True}, {"data": {"train_on": "everything"}}),
    "the last turn": ({"mask_history": True}, {"data": {"train_on": "last"}}),
    "mixed by shares": (
        {"dataset": "a,b", "mix_strategy": "interleave_under", "interleave_probs": "0.7,0.3"},
        {
            "data": {
                "train": [{"path": "data", "name": "a", "weight": 0.7}, {"path": "data", "name": "b", "weight": 0.3}]
            }
        },
    ),
    "hub data sets, streamed": (
        {"dataset": "org/set", "dataset_dir": "ONLINE", "streaming": True, "max_steps": 10,
         "per_device_train_batch_size": 4},
        {
            "data": {"train": {"path": "org/set", "streaming": True, "max_samples": 40}},
            "duration": "10 steps",
            "batch": {"size": 4, "micro": 4},
        },
    ),
    "trackers": (
        {"report_to": ["wandb", "tensorboard"], "run_name": "first"},
        {"report_to": ["wandb", "tensorboard"], "tracking": {"name": "first", "project": "llamafactory"}},
    ),
    "scaled BOS, factor left out": (
        {"use_bos_zero_training": True, "template": "phi"},
        {"data": {"template": "llamafactory-phi"}, "bos": {"prepend": "on", "scale": 0.1}},
    ),
    "scaled BOS": (
        {"use_bos_zero_training": True, "bos_scaling_factor": 0.0},
        {"bos": {"prepend": "on", "scale": 0.0}},
    ),
    "compiled, TF32, seed": (
        {"torch_compile": True, "tf32": True, "seed": 7, "eval_on_start": True, "val_size": 0.1},
        {
            "compile": "default", "precision": {"tf32": "on"}, "seed": 7, "eval_at_start": True,
            "data": {"eval": 0.1}, "eval_every": "null", "checkpoint": {"best": "none"},
        },
    ),
    "saved at the end only": ({"save_strategy": "no"}, {"checkpoint": {"every": "3 epochs"}}),
    "continued pre-training": (
        {"stage": "pt", "template": None, "dataset": "c4_demo", "packing": False},
        {
            "stage": "pretrain",
            "data": {
                "train": {"path": "data/c4_demo.jsonl", "format": "text", "columns": {"text": "prompt"}},
                "template": None,
            },
            "bos": None,
        },
    ),
}  # fmt: skip
DESCRIPTION = {"c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "prompt"}}}
FILES = {
    "x.yaml": yaml.safe_dump(REQUIRED | {"lora_rank": 4}),
    "data/dataset_info.json": json.dumps(DESCRIPTION),
    "hub/base/config.json": json.dumps({"num_hidden_layers": 32}),
}


def from_files(path: str) -> str:
    return FILES[path] if path in FILES else no_files(path)


OPTIONS = Options(read=from_files)


def plain(config: object) -> object:
    return RunConfig.model_validate(config).model_dump(mode="json")


def real(value: object) -> object:
    """ "null" stands for a null that the table wants to see written."""
    if isinstance(value, dict):
        return {key: real(one) for key, one in value.items()}
    return None if value == "null" else value


@pytest.mark.parametrize("form", ["yaml", "json", "overrides"])
def test_each_config_means_what_it_says(form):
    for name, (words, changes) in CASES.items():
        if form == "overrides":
            given = [f"{key}={json.dumps(value)}" for key, value in words.items()]
            found = translate_file("run.yaml", yaml.safe_dump(REQUIRED), given, OPTIONS)
        else:
            dump = yaml.safe_dump if form == "yaml" else json.dumps
            found = translate_file(f"run.{form}", dump(REQUIRED | words), [], OPTIONS)
        assert plain(found.config) == plain(real(merged(ONE_WAY, changes))), name
        assert found.command == "train"
        assert found.arguments == ("--overwrite" if words.get("overwrite_output_dir") else "--resume",), name


def flags(words: dict[str, object]) -> list[str]:
    found: list[str] = []
    for key, value in words.items():
        if value is True:
            found.append(f"--{key}")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found += [f"--{key}", text]
    return found


def test_flags_mean_the_same_as_a_file():
    for name in CASES.keys() - {"the tokenizer's template"}:  # null cannot be a flag
        words = REQUIRED | CASES[name][0]
        from_flags = translate_command(["llamafactory-cli", "train", *flags(words)], OPTIONS)
        from_file = translate_file("run.yaml", yaml.safe_dump(words), [], OPTIONS)
        assert plain(from_flags.config) == plain(from_file.config), name


def test_the_command_of_the_experiment():
    text = """CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --stage sft --do_train
        --model_name_or_path microsoft/Phi-3-mini-4k-instruct --dataset alpaca_en --template phi --finetuning_type lora
        --lora_target all --lora_rank 16 --lora_alpha 32 --lora_dropout 0.1 --use_bos_zero_training
        --output_dir saves/phi3-bos-zero-lora-alpaca --overwrite_output_dir --per_device_train_batch_size 2
        --gradient_accumulation_steps 4 --lr_scheduler_type cosine --logging_steps 10 --save_steps 500
        --learning_rate 5e-4 --num_train_epochs 3.0 --plot_loss --bf16"""
    found = translate_command(shlex.split(text), OPTIONS)
    config = RunConfig.model_validate(found.config)
    assert (config.batch.size, config.batch.micro, str(config.duration)) == (8, 2, "3 epochs")
    assert (config.bos.prepend, config.bos.scale) == ("on", 0.1)
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.dropout) == (16, 32, 0.1)
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert found.arguments == ("--overwrite",)


def test_a_file_behind_the_command_with_overrides():
    found = translate_command(shlex.split("lmf train x.yaml lora_rank=32 output_dir=other"), OPTIONS)
    assert found.config["adapter"]["rank"] == 32
    assert found.config["output"] == "other"
    why = {note.word: note.why for note in found.notes}
    assert gives(why["lora_rank: 4"], "lora_rank=32")  # which takes its place
    assert gives(why["output_dir: out"], "output_dir=other")


REFUSED = [  # of several settings the last one is refused
    "lora_rnk: 8",
    "template: phi2",
    "template: glm4",
    "stage: grpo",
    "finetuning_type: freeze\nfreeze_trainable_layers: 0",
    "finetuning_type: freeze\nuse_llama_pro: true\nfreeze_trainable_layers: 5",
    "finetuning_type: freeze\nuse_llama_pro: true\nfreeze_trainable_layers: -4",
    "finetuning_type: freeze\nfreeze_multi_modal_projector: false",
    "finetuning_type: freeze\nuse_dora: true",
    "finetuning_type: lora\nuse_llama_pro: true",
    "finetuning_type: oft",
    "template: qwen3_vl\nfreeze_vision_tower: false",
    "freeze_multi_modal_projector: false\nfreeze_vision_tower: false",
    "freeze_language_model: true",
    "use_badam: true",
    "use_galore: true",
    "pure_bf16: true",
    "quantization_bit: 3",
    "flash_attn: fa3",
    "optim: lion_32bit",
    "lr_scheduler_type: reduce_lr_on_plateau",
    "lr_scheduler_type: cosine_with_min_lr",
    "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2.0}",
    "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 2}",
    "report_to: swanlab",
    "packing: true",
    "adapter_name_or_path: saves/old",  # whose files cannot be read
    "adapter_name_or_path: saves/one,saves/two",
    "adapter_name_or_path: saves/one\ncreate_new_adapter: true",
    "adapter_name_or_path: saves/one\nadapter_folder: inner",
    "finetuning_type: full\nadapter_name_or_path: saves/one",
    "stage: rm\nadapter_name_or_path: saves/one",
    "bos_scaling_factor: 0.1",
    "template: qwen\ndefault_system: ''",
    "predict_with_generate: true",
    "val_size: 0.1\nmetric_for_best_model: eval_rouge-l",
    "eval_strategy: steps",
    "load_best_model_at_end: true",
    "early_stopping_steps: 3",
    "eval_dataset: a\nval_size: 0.1",
    "train_on_prompt: true\nmask_history: true",
    "finetuning_type: full\nuse_dora: true",
    "finetuning_type: full\nquantization_bit: 4",
    "bf16: true\nfp16: true",
    "streaming: true",
    "resume_from_checkpoint: other/checkpoint-5",
    "lora_rank: eight",
    "do_train: false",
    "logging_steps: 0.1",
    "per_device_train_batch_size: 0",
]


def test_what_cannot_be_given_is_refused_at_its_line():
    def refusals(text: str) -> list[str]:
        text = yaml.safe_dump(REQUIRED | yaml.safe_load(text))
        return refused_settings(lambda: translate_file("run.yaml", text, [], OPTIONS), text=text)

    assert {text: refusals(text) for text in REFUSED} == {text: [[*yaml.safe_load(text)][-1]] for text in REFUSED}


FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=12)),
    "tied": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(num_hidden_layers=12, tie_word_embeddings=True)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12)),
}
FROZEN = [  # family, layers, modules, extra modules, use_llama_pro
    ("llama", 2, ["all"], None, False),
    ("llama", -2, ["all"], None, False),
    ("llama", 1, ["self_attn", "input_layernorm"], ["lm_head"], False),
    ("llama", -11, ["mlp"], ["norm"], False),  # a piece of the names of three norms
    ("llama", 3, ["all"], ["embed_tokens"], True),
    ("llama", 4, ["mlp"], None, True),
    ("llama", 20, ["all"], None, False),
    ("llama", 0, ["all"], ["lm_head"], False),
    ("tied", 2, ["all"], ["embed_tokens"], False),
    ("gpt2", 2, ["attn", "ln_1"], ["wte", "ln_f"], False),
]


def trainable(names, count, layers, modules, extra, pro):
    """`_setup_freeze_tuning` of LLaMA-Factory 0.9.5, for the names of a model's parameters."""
    if pro:
        stride = count // layers
        ids = range(stride - 1, count + stride - 1, stride)
    elif layers > 0:
        ids = range(max(0, count - layers), count)
    else:
        ids = range(min(-layers, count))
    pieces = [f".{number}.{'' if module == 'all' else module}" for module in modules for number in ids]
    return {name for name in names if any(piece in name for piece in [*pieces, *(extra or [])])}


def freezing(layers: int, modules: Any, extra: Any, pro: bool) -> dict[str, Any]:
    return {
        "finetuning_type": "freeze", "freeze_trainable_layers": layers, "freeze_trainable_modules": ",".join(modules),
        "freeze_extra_modules": extra, "use_llama_pro": pro, "lora_target": None,
    }  # fmt: skip


@pytest.mark.parametrize(("family", "layers", "modules", "extra", "pro"), FROZEN)
def test_what_freeze_trains_is_llama_factorys(family, layers, modules, extra, pro):
    """Forth, in a model of transformers, and back: the same patterns from the settings that export writes."""
    with torch.device("meta"):
        model = FAMILIES[family]()
    words = freezing(layers, modules, extra, pro)
    options = Options(read=lambda path: model.config.to_json_string() if path == "hub/base/config.json" else "{}")
    trained = translate_file("l.json", json.dumps(REQUIRED | words), [], options).config["model"]["trained"]
    freeze_others(model, trained)
    ours = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = [name for name, _ in model.named_parameters()]
    assert ours == trainable(names, 12, layers, modules, extra, pro)
    twin = -layers if 0 < abs(layers) < 12 else 1
    assert ours != trainable(names, 12, twin, modules, extra, False)
    config = RunConfig.model_validate(
        {"stage": "sft", "model": {"path": "hub/base", "trained": trained}, "data": {"train": "org/d"}, "output": "o"}
    )
    written = export(targets()["llamafactory"], config, {"model.trained"}, Ours(config, options=options))
    assert [fate.outcome for fate in written.fates if fate.key == "model.trained"] == ["carried"]
    away = export(targets()["llamafactory"], config, {"model.trained"}, Ours(config))  # the number of layers is unknown
    first = layers == 0 or r".*\.(0|" in trained[0]
    assert [fate.outcome for fate in away.fates if fate.key == "model.trained"] == ["carried" if first else "different"]


@pytest.mark.parametrize(("family", "layers", "modules", "extra", "pro"), FROZEN)
def test_layers_counted_from_the_last_are_resolved_by_the_plan(tmp_path, family, layers, modules, extra, pro):
    """Where the translation cannot read the model's config.json: the same patterns, and the same settings back."""
    with torch.device("meta"):
        model = FAMILIES[family]()
    words = freezing(layers, modules, extra, pro)

    def translated(read):
        found = translate_file("l.json", json.dumps(REQUIRED | words), [], Options(read=read))
        return RunConfig.model_validate(dict(found.config))

    known = translated(lambda path: model.config.to_json_string() if path == "hub/base/config.json" else "{}")
    unknown = translated(lambda path: "{}")
    notes = Notes()
    facts = replace(model_facts(tmp_path, LLAMA31_8B), layers=model.config.num_hidden_layers)
    assert with_layers(unknown, facts, notes).model.trained == known.model.trained
    assert not notes.faults
    if layers > 0:
        assert unknown.model.trained != known.model.trained  # twin
        more = with_layers(unknown, replace(facts, layers=model.config.num_hidden_layers + layers), notes)
        assert more.model.trained != known.model.trained
    written = export(targets()["llamafactory"], unknown, {"model.trained"}, Ours(unknown))
    assert [fate.outcome for fate in written.fates if fate.key == "model.trained"] == ["carried"]


def test_everything_wrong_is_told_at_once_with_what_was_meant():
    given = REQUIRED | {"lora_rnk": 8, "use_badam": True, "template": "phi2"}
    with pytest.raises(InputError) as caught:
        translate_file("run.yaml", yaml.safe_dump(given), [], OPTIONS)
    fixes = {setting(fault): fault.fix for fault in caught.value.faults}
    assert fixes.keys() == {"lora_rnk", "use_badam", "template"}
    assert "lora_rank" in fixes["lora_rnk"]
    assert "phi" in fixes["template"]


@pytest.mark.parametrize("environment", ["", "ALLOW_EXTRA_ARGS=1 "])
def test_unknown_words_are_listed_on_request(environment):
    words = [*shlex.split(environment), "llamafactory-cli", "train", *flags(REQUIRED), "--new_thing", "3"]
    options = Options(allow_unknown=not environment)
    (note,) = (note for note in translate_command(words, options).notes if note.word == "--new_thing 3")
    assert note.outcome == "listed"


def test_names_in_the_environment():
    def translated(environment: str):
        return translate_command([*environment.split(), "llamafactory-cli", "train", *flags(REQUIRED)], OPTIONS)

    assert refused_settings(lambda: translated("NPROC_PER_NODE=four")) == ["NPROC_PER_NODE"]
    for name in ("MIN_NNODES=2", "USE_MODELSCOPE_HUB=1"):
        assert refused_settings(lambda name=name: translated(name), "SF-TRANSLATE-COMMAND") == [name.partition("=")[0]]
    notes = translated("FORCE_TORCHRUN=1 NNODES=1 DISABLE_VERSION_CHECK=1").notes[:3]
    assert [note.outcome for note in notes] == ["listed"] * 3


def test_the_project_of_wandb():
    words = [
        "WANDB_PROJECT=demo",
        "WANDB_MODE=offline",
        "llamafactory-cli",
        "train",
        *flags(REQUIRED),
        "--report_to",
        "wandb",
    ]
    assert translate_command(words, OPTIONS).config["tracking"] == {"project": "demo", "offline": True}


def test_commands_without_counterpart_say_what_to_use():
    for verb in ("eval", "api", "webui", "webchat", "version"):
        with pytest.raises(InputError) as caught:
            translate_command(["llamafactory-cli", verb], OPTIONS)
        (fault,) = caught.value.faults
        assert (fault.code, fault.where) == ("SF-TRANSLATE-COMMAND", f"llamafactory-cli {verb}")
        assert "surefoot" in fault.fix


def test_a_system_message_of_the_config_is_that_of_the_sources():
    given = yaml.safe_dump({**REQUIRED, "default_system": "Be brief.", "eval_dataset": "other", "template": "qwen"})
    data = translate_file("run.yaml", str(given), [], OPTIONS).config["data"]
    assert (data["train"]["system"], data["eval"]["system"]) == ("Be brief.", "Be brief.")


def test_export_becomes_words_of_ours():
    text = """llamafactory-cli export --model_name_or_path phi3 --adapter_name_or_path saves/run --template phi
        --finetuning_type lora --export_dir merged --export_size 2 --export_device cpu --export_legacy_format false"""
    found = translate_command(shlex.split(text), OPTIONS)
    assert (found.command, found.config) == ("export", {})
    assert " ".join(found.arguments) == (
        "phi3 --adapter saves/run --merge --out merged --max-shard-size 2GB --device cpu"
    )
    assert len(found.notes) == 8


def test_a_file_for_export_is_known():
    given = {"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "qwen", "export_dir": "d"}
    found = translate_file("merge.yaml", yaml.safe_dump(given), [], OPTIONS)
    assert found.command == "export"
    for wrong in (
        {"export_dir": None},
        {"export_quantization_bit": 4},
        {"quantization_bit": 4},
        {"export_legacy_format": True},
    ):
        words = flags({name: value for name, value in (given | wrong).items() if value})
        assert refused_settings(lambda: translate_command(["lmf", "export", *words], OPTIONS)) == [*wrong]  # noqa: B023


def test_chat_becomes_words_of_ours():
    found = translate_command(shlex.split("llamafactory-cli chat --model_name_or_path m --template qwen"), OPTIONS)
    assert " ".join(found.arguments) == "m --max-new-tokens 1024 --temperature 0.95 --top-p 0.7"


@pytest.mark.parametrize(
    ("name", "text", "ours"),
    [
        ("run.yaml", yaml.safe_dump(REQUIRED), False),
        ("run.json", json.dumps(REQUIRED), False),
        ("run.yaml", "model: m\ntrain_dataset: d.yaml\n", False),
        ("run.yaml", "stage: sft\nmodel: m\ndata: {train: d.json}\noutput: out\n", True),
        ("run.yaml", "stage: sft\nmodel_name_or_pth: m\n", True),
        ("run.yaml", "broken: [", True),
        ("run.txt", yaml.safe_dump(REQUIRED), True),
    ],
)
def test_a_file_is_known_by_its_keys(name, text, ours):
    assert (file_tool(name, text) is None) == ours
