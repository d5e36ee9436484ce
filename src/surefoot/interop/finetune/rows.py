"""Rows for the flags of the three programs called `finetune.py`.

Facts (arguments and defaults only): LLM-Adapters 8166572, NVlabs/DoRA 7e2f10a, alpaca-lora 8bb8579.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.interop.adapters import module_names
from surefoot.interop.settings import (
    OF_THE_HUB,
    Refusal,
    Row,
    all_listed,
    by_name,
    carried,
    joint,
    listed,
    number,
    one_of,
    refused,
    switches,
    text,
    whole,
)

LISTS = ("target_modules", "lora_target_modules", "Wdecompose_target_modules")
_BOTTLENECK = "is for bottleneck adapters, which surefoot does not support; no effect on LoRA or DoRA"
_WANDB = "report_to decides what is logged"
_ATTENTION = {name: name for name in ("eager", "sdpa", "flash_attention_2")}


def _share_or_count(value: Any) -> int | float:
    size = number(value)
    if size < 0 or (size >= 1 and size != int(size)):
        raise ValueError("a number of examples, or a fraction below 1")
    return int(size) if size >= 1 or size == 0 else float(size)


def _adapter(value: Any) -> str:
    name = str(value).lower()
    if name in ("bottleneck", "prefix-tuning"):
        raise Refusal(f"surefoot does not support {name} adapters", "use lora or dora")
    if name not in ("lora", "dora", "rslora"):
        raise Refusal(f"finetune.py has no adapter {value}", "use lora, dora or rslora")
    return "lora" if name == "rslora" else name


def _none(value: Any) -> Any:
    return None if value in ("None", "") else value


def _template(value: Any) -> str:
    if str(value or "alpaca") != "alpaca":
        what = f"templates/{value}.json: surefoot has only the template alpaca of alpaca-lora"
        raise Refusal(what, "write it as a .jinja file, and use it: surefoot run data.template=FILE.jinja -- …")
    return "alpaca"


_LOGGING = joint("logging_steps", None, ("log_every",), "added by surefoot: the scripts fix the number", type=whole)

GUIDE: Mapping[str, Row] = by_name(
    carried("base_model", None, "model.path", type=text, required=OF_THE_HUB),
    carried("data_path", "yahma/alpaca-cleaned", "data.train", type=text),
    carried("output_dir", "./output", "output", type=text),
    carried("adapter_name", "lora", "adapter.kind", _adapter, type=text),
    joint("load_8bit", False, ("precision.base",)),
    joint("batch_size", 128, ("batch.size",), "examples per optimizer step, over all micro-batches"),
    joint("micro_batch_size", 4, ("batch.micro",), "the original's name"),
    joint("per_device_train_batch_size", 4, ("batch.micro",), "the guide's name"),
    joint("num_epochs", 3, ("duration",), type=number),
    carried("learning_rate", 3e-4, "optim.lr"),
    carried("weight_decay", 0.01, "optim.weight_decay"),
    carried("cutoff_len", 256, "data.max_length"),
    joint("val_set_size", 2000, ("data.eval",), "split off with the seed; 0: no evaluation", type=_share_or_count),
    joint(
        "use_gradient_checkpointing", False, ("gradient_checkpointing",), "the original ignored it without load_8bit"
    ),
    joint("eval_step", 200, ("eval_every",)),
    joint("save_step", 200, ("checkpoint.every",)),
    carried("lora_r", 8, "adapter.rank"),
    carried("lora_alpha", 16, "adapter.alpha", type=number),
    carried("lora_dropout", 0.05, "adapter.dropout"),
    refused("init_lora_weights", True, "surefoot initializes LoRA as PEFT does by default"),
    listed("lora_target_modules", None, "is printed but never used there: target_modules decides"),
    joint("target_modules", None, ("adapter.targets",), type=module_names),
    *all_listed(_BOTTLENECK, bottleneck_size=256, non_linearity="tanh", adapter_dropout=0.0),
    *all_listed(_BOTTLENECK, use_parallel_adapter=False, use_adapterp=False, scaling=1.0),
    listed("num_virtual_tokens", 30, "is for prefix tuning; no effect on LoRA or DoRA"),
    refused(
        "dora_simple",
        True,
        "surefoot's DoRA treats the norm as a constant in the backward pass, as dora_simple does",
    ),
    refused(
        "Wdecompose_target_modules",
        None,
        "surefoot cannot train only the magnitude of modules",
        "leave it out, or name them in target_modules",
        same=("None", ""),
    ),
    joint("train_on_inputs", False, ("data.train_on",), "LLM-Adapters' and DoRA's default is True"),
    listed("group_by_length", False, "batches depend on the seed alone"),
    joint("wandb_project", "", ("report_to", "tracking.project"), type=text),
    joint("wandb_run_name", "", ("tracking.name",), type=text),
    joint("wandb_online", True, ("tracking.offline",)),
    *all_listed(_WANDB, wandb_watch="", wandb_log_model=""),
    joint("resume_from_checkpoint", None, (), "becomes --resume", type=_none),
    carried("seed", 42, "seed"),
    joint("bf16", False, ("precision.compute",)),
    joint("fp16", False, ("precision.compute",)),
    listed("timestamp", "", "names a folder there; output is the run folder here"),
    carried("attn_implementation", "eager", "attention.implementation", one_of(_ATTENTION), type=text),
    joint("disable_cudnn_sdpa", True, ("attention.cudnn",), "the guide's default; its code says False"),
    joint("disable_flash_sdpa", False, ("attention.flash",)),
    joint("enable_torch_compile", False, ("compile",), "in the original the call comes too late to have an effect"),
    _LOGGING,
)


_GUIDES_OWN = (
    *("per_device_train_batch_size", "init_lora_weights", "wandb_online", "seed", "bf16", "fp16", "timestamp"),
    *("attn_implementation", "disable_cudnn_sdpa", "disable_flash_sdpa", "enable_torch_compile"),
)
ORIGINAL: Mapping[str, Row] = {name: row for name, row in GUIDE.items() if name not in _GUIDES_OWN} | by_name(
    carried("output_dir", "./lora-alpaca", "output", type=text),
    joint("micro_batch_size", 4, ("batch.micro",), "examples per forward pass"),
    carried("weight_decay", 0.0, "optim.weight_decay"),
    joint("train_on_inputs", True, ("data.train_on",)),
)
_ALPACAS = (
    *("base_model", "data_path", "output_dir", "batch_size", "micro_batch_size", "num_epochs", "learning_rate"),
    *("cutoff_len", "val_set_size", "lora_r", "lora_alpha", "lora_dropout", "train_on_inputs", "group_by_length"),
    *("wandb_project", "wandb_run_name", "wandb_watch", "wandb_log_model", "resume_from_checkpoint", "logging_steps"),
)
ALPACA_LORA: Mapping[str, Row] = {name: ORIGINAL[name] for name in _ALPACAS} | by_name(
    joint("lora_target_modules", ["q_proj", "v_proj"], ("adapter.targets",), type=module_names),
    listed("add_eos_token", False, "does not change labels there: EOS ends every answer that fits in either case"),
    carried("prompt_template_name", "alpaca", "data.template", _template, type=text),
)
SWITCHES = switches({**GUIDE, **ALPACA_LORA})
