"""The settings of a script's calls: what they are called in TRL's rows, and rows of those that TRL's lack."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.interop import trainer, trl
from surefoot.interop.rows import Row, carried, joint, listed, number, refused, text, whole
from surefoot.interop.script.machine import KERNELS
from surefoot.interop.translation import Fate

LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
    "bias": "lora_bias",
    "inference_mode": "lora_inference_mode",
    "init_lora_weights": "init_lora_weights",
}
QUANTISED = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}
LOADED = {
    "revision": "model_revision",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "device_map": "device_map",
    "trust_remote_code": "trust_remote_code",
    "use_cache": "use_cache",
    "low_cpu_mem_usage": "low_cpu_mem_usage",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
OF_THE_TRAINER = ("tokenizer", "processing_class", "compute_metrics", "preprocess_logits_for_metrics")
OLD_TRL = ("max_seq_length", "max_length", "dataset_text_field", "packing", "neftune_noise_alpha")
HANDLED = ("model", "args", "train_dataset", "eval_dataset", "peft_config", "model_init_kwargs")
_END: tuple[Fate, str] = ("listed", "what is too long loses its end, here too (data.encoding: whole)")
_UNCUT: tuple[Fate, str] = ("changed", "no text is cut there; here data.max_length cuts what is longer")
_PADDED: tuple[Fate, str] = ("listed", "padding is masked by position, and changes no number")
_START: tuple[Fate, str] = ("changed", "what is too long loses its begin there, and its end here")
_WORDS: tuple[Fate, str] = ("changed", "surefoot takes the tokenizer as its files have it")
TOKENIZING: Mapping[str, Mapping[str | bool | None, tuple[Fate, str]]] = {
    "truncation": {None: _END, False: _UNCUT, "do_not_truncate": _UNCUT},
    "truncation_side": {None: _START, "right": _END},
    "padding": {None: _PADDED},
    "padding_side": {None: _PADDED},
    "pad_to_multiple_of": {None: _PADDED},
    "add_special_tokens": {None: _WORDS, True: ("listed", "bos.prepend and EOS are as the tokenizer's files say")},
    **{name: {None: _WORDS} for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")},
}
"""What a tokenizer is told where it is loaded or called: value, None for any other -> its fate."""

ROWS: tuple[Row, ...] = (
    joint("dtype", "auto", ("precision.base",), "the type in which weights are held", type=text),
    joint("lora_r", 8, ("adapter.rank",)),
    joint("lora_alpha", 8, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.0, ("adapter.dropout",)),
    joint("early_stopping_patience", None, ("early_stopping.patience",), type=whole),
    joint("early_stopping_threshold", 0.0, ("early_stopping.min_delta",), type=number),
    refused("lora_bias", "none", "surefoot trains no biases beside an adapter", "leave it out"),
    listed("lora_inference_mode", False, "a run trains"),
    refused("init_lora_weights", True, "surefoot begins LoRA as PEFT's default does", "leave it out"),
    *(joint(f"enable_{kernel}_sdp", None, (f"attention.{kernel}",)) for kernel in KERNELS),
    listed("device_map", None, "training places no layers on several devices: the run is on one"),
    listed("low_cpu_mem_usage", None, "surefoot loads weights one by one"),
    listed("bnb_4bit_compute_dtype", None, "bf16 and fp16 of the training arguments decide the type of products"),
)
PLAIN_TRAINER: tuple[Row, ...] = (
    *(row for row in trainer.ROWS if row.name in ("logging_steps", "gradient_checkpointing", "learning_rate", "bf16")),
    carried("max_length", None, "data.max_length", type=trl.ROWS["max_length"].type),
)
