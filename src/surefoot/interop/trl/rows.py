"""Rows of `trl sft`; those of the other methods are in `methods` and `group`. Facts: the dataclasses of TRL 1.16."""

from __future__ import annotations

from surefoot.interop import settings
from surefoot.interop.adapters import module_names, targets_or_pattern
from surefoot.interop.backward import differs, equals, held_out, longest_or_null, reverse, targets, unless
from surefoot.interop.settings import (
    ALL_POSITIONS,
    OF_THE_HUB,
    OWN_KERNELS,
    Row,
    all_listed,
    carried,
    hub_revision,
    joint,
    listed,
    number,
    one_of,
    refused,
    text,
    truth,
)
from surefoot.interop.shared_rules import switch
from surefoot.interop.trl import back
from surefoot.interop.trl.data import HANDBOOK, OWN_EOS

_STREAM = "surefoot reads a dataset whole, or its first max_samples records"
_TOKEN_LOSSES = {"nll": "cross_entropy", "chunked_nll": "cross_entropy", "dft": "dft"}
_FORMS = {name: name for name in ("eager", "sdpa", "flash_attention_2")}


OWN_ROWS: tuple[Row, ...] = (
    carried("model_name_or_path", None, "model.path", type=text, required=OF_THE_HUB),
    carried("model_revision", "main", "model.revision", hub_revision, type=text),
    joint("dtype", "float32", ("precision.base",), "dtype of the weights", type=text, null="auto", back=back.weights),
    carried("attn_implementation", None, "attention.implementation", one_of(_FORMS), type=text,
            back=unless("attention.implementation", "auto")),
    joint("use_peft", False, ("adapter.kind",), back=lambda ours: ours["adapter"] is not None),
    joint("lora_r", 16, ("adapter.rank",)),
    joint("lora_alpha", 32, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.05, ("adapter.dropout",)),
    joint("lora_target_modules", None, ("adapter.targets",), type=targets_or_pattern, back=targets),
    joint("lora_modules_to_save", None, ("adapter.modules_to_save",), type=module_names),
    refused("lora_target_parameters", None, "adapter.targets names experts", "leave it out: all-linear has them"),
    refused("lora_task_type", "CAUSAL_LM", "surefoot trains causal language models"),
    joint("use_rslora", False, ("adapter.rslora",)),
    joint("use_dora", False, ("adapter.kind",), back=equals("adapter.kind", "dora")),
    joint("load_in_8bit", False, ("precision.base",), back=equals("precision.base", "int8")),
    joint("load_in_4bit", False, ("precision.base",), back=equals("precision.base", "nf4")),
    refused("bnb_4bit_quant_type", "nf4", "surefoot's 4-bit format is nf4"),
    joint("use_bnb_nested_quant", False, ("precision.base",), back=equals("precision.base", "nf4")),
    listed("bnb_4bit_quant_storage", None, "is for multi-process launchers; surefoot starts its own processes"),
    joint("dataset_name", None, ("data.train",), type=text, back=back.of_source("path")),
    joint("dataset_config", None, ("data.train",), "the subset", type=text, back=back.of_source("subset")),
    joint("dataset_train_split", "train", ("data.train",), type=text, back=back.of_source("split")),
    joint("dataset_test_split", "test", ("data.eval",), "used unless eval_strategy is no", type=text,
          back=back.test_split),
    refused("dataset_streaming", False, _STREAM),
    joint("datasets", None, ("data.train",), back=back.mixture),
    refused("streaming", False, _STREAM),
    joint("test_split_size", None, ("data.eval",), type=number, back=held_out),
    listed("ignore_bias_buffers", False, "is for multi-process launchers; surefoot starts its own processes"),
    listed("trust_remote_code", False, "surefoot runs no code from a model's repository"),
    refused("model_init_kwargs", None, "surefoot passes no extra arguments when loading", same=({},)),
    carried("router_aux_loss_coef", None, "model.router_aux_loss_coef", type=number,
            back=unless("model.router_aux_loss_coef", "auto", "own")),
    joint("chat_template_path", None, ("data.template",), "a .jinja file", type=text, back=back.template_file),
    *HANDBOOK,
    joint("dataset_text_field", "text", ("data.train",), type=text, back=back.text_field),
    joint("dataset_kwargs", None, (), "TRL reads only skip_prepare_dataset, which is refused", type=settings.group),
    listed("dataset_num_proc", None, "affects speed only, not results"),
    OWN_EOS,
    carried("pad_token", None, "tokenizer.pad", type=text, back=unless("tokenizer.pad", "auto", "add")),
    joint("max_length", 1024, ("data.max_length",), "null: no limit", null=ALL_POSITIONS, back=longest_or_null),
    refused("truncation_mode", "keep_start", "surefoot truncates at the end"),
    listed("shuffle_dataset", False, "every epoch is shuffled with the seed"),
    joint("packing", False, ("batch.row_tokens",), "rows of max_length", back=differs("batch.row_tokens", None)),
    joint("packing_strategy", "bfd", (), "bfd only", type=text),
    listed("eval_packing", None, "evaluation reads every example once"),
    *all_listed("padding does not affect results here", padding_free=False, pad_to_multiple_of="auto"),
    joint("completion_only_loss", None, ("data.train_on",), type=truth,
          back=reverse("data.train_on", {True: "completion", False: "everything"})),
    joint("assistant_only_loss", False, ("data.train_on",), back=back.answers_only),
    carried("loss_type", "nll", "sft.loss", one_of(_TOKEN_LOSSES), type=text,
            back=lambda ours: "dft" if ours["sft.loss"] == "dft" else None),
    listed("activation_offloading", False, OWN_KERNELS),
    carried("learning_rate", 2e-5, "optim.lr"),
    joint("logging_steps", 10, ("log_every",), type=number),
    carried("gradient_checkpointing", True, "gradient_checkpointing", switch),
    joint("bf16", None, ("precision.compute",), "on unless fp16 is on", type=truth,
          back=reverse("precision.compute", {True: "bf16", False: "fp32"})),
)  # fmt: skip
