"""Translate configs of LLaMA-Factory's v1 trainer: `llamafactory-cli sft run.yaml`, or `USE_V1=1` before `train`.

Its groups (`peft_config`, `quant_config`, …) are flattened; what the other trainer has under another name is read by
that trainer's rules. Facts: src/llamafactory/v1 of August 2026. It renders with the tokenizer's chat template,
without thoughts unless the answer has one; makes an example of each answer of a conversation; has a constant rate,
torch's AdamW, and no evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.interop.backward import never
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import setting_error
from surefoot.interop.launch import Command, Options, in_processes
from surefoot.interop.llamafactory import rules
from surefoot.interop.llamafactory.methods import set_pairs
from surefoot.interop.llamafactory.rows import ROWS as OTHER
from surefoot.interop.model_templates import UNTHINKING, template_of
from surefoot.interop.settings import (
    Row,
    all_listed,
    by_name,
    carried,
    joint,
    listed,
    number,
    one_of,
    refused,
    text,
    whole,
)
from surefoot.interop.shared_rules import (
    KEEP_ALL,
    counted,
    resume_argument,
    set_duration,
    set_keep,
    set_rows,
    set_together,
    short_sources,
    switch,
)
from surefoot.interop.sharing import Names, set_sharing
from surefoot.interop.translation import Translation
from surefoot.interop.words import Word, parse_document
from surefoot.system.errors import InputError

_SAME = (
    "model_name_or_path finetuning_type lora_rank lora_alpha lora_dropout lora_target use_rslora use_dora deepspeed "
    "pissa_init pissa_iter pissa_convert additional_target adapter_name_or_path "
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules "
    "quantization_method quantization_bit quantization_type double_quantization model_revision stage do_train "
    "create_new_adapter adapter_folder use_llama_pro fsdp fsdp_config pref_beta pref_ftx simpo_gamma "
    "adam_beta1 adam_beta2 adam_epsilon weight_decay gradient_accumulation_steps "  # of a DeepSpeed file
    "dpo_label_smoothing pref_loss pref_bco_weight ref_model trust_remote_code max_grad_norm seed full_determinism"
)
_DEFAULTS = {"model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "finetuning_type": "full",
             "lora_dropout": 0.05, "do_train": True, "weight_decay": 0.01}  # fmt: skip
_NAMES = {  # v1's names -> those of the other trainer
    "model": "model_name_or_path",
    "dist_config.config_file": "deepspeed",
    "quant_config.name": "quantization_method",
    "quant_config.quantization_bit": "quantization_bit",
    "quant_config.quantization_type": "quantization_type",
    "quant_config.double_quantization": "double_quantization",
    "peft_config.name": "finetuning_type",
    "peft_config.r": "lora_rank",
    "peft_config.target_modules": "lora_target",
    "peft_config.modules_to_save": "additional_target",
    **{
        f"peft_config.{name}": name
        for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora", "adapter_name_or_path",
                     "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "export_dir",
                     "export_size", "export_hub_model_id", "export_legacy_format", "infer_dtype")
    },
}  # fmt: skip
_ATTENTION = {"sdpa": "auto", "eager": "eager", "flash_attention_2": "flash_attention_2"}
_SPEED = "affects speed only; surefoot chooses its own kernels"
_SHARDS = "surefoot shards the weights over all processes"
_DRAWS = "v1 draws as many records at random, some twice; here the first ones are used"
_JOINS = "v1 writes instruction and input one behind the other; here a line break is between them"
_DIALOGUES = "v1 makes an example of each answer, with what precedes it; here a conversation is one example"
_ALONE = "one process holds everything"
_EXAMPLES = ("normal", "padding_free")


_OWN: tuple[Row, ...] = (
    joint("custom_chat_template", None, ("data.template",), "the template itself", type=text),
    carried("flash_attn", "sdpa", "attention.implementation", one_of(_ATTENTION), type=text),
    refused("model_class", "llm", "surefoot trains causal language models"),
    *(refused(f"{name}_config", None, "is a group of settings", f"write {name}_config: {{name: …}}", same=({},))
      for name in ("peft", "quant", "dist", "optim", "kernel", "init")),
    refused("lr_scheduler_config", None, "v1 has no schedule yet, and surefoot none of that name"),
    listed("quant_config.compute_dtype", "float16", "products are computed in the type of training"),
    listed("peft_config.cast_trainable_params_to_fp32", True, "weights that train are always in fp32"),
    joint("dist_config.name", None, ("parallel.engine",), "fsdp2, fsdpturbo or deepspeed", type=text),
    refused("dist_config.dcp_path", None, "surefoot reads Hugging Face's format"),
    *all_listed("surefoot's experts are sharded like the other weights", **{
        "dist_config.ep_size": 1, "dist_config.ep_dispatcher": None}),
    joint("optim_config.name", None, ("optim.name",), "muon", type=text),
    joint("optim_config.wd", 0.1, ("optim.weight_decay",)),
    joint("optim_config.momentum", 0.95, ("optim.momentum",)),
    joint("optim_config.adamw_betas", [0.9, 0.95], ("optim.betas",)),
    joint("optim_config.adamw_eps", 1e-8, ("optim.eps",)),
    refused("optim_config.nesterov", True, "surefoot's muon has Nesterov's momentum"),
    refused("optim_config.ns_steps", 5, "surefoot's muon takes 5 steps"),
    listed("optim_config.lr", None, "learning_rate takes precedence, as there"),
    joint("train_dataset", None, ("data.train",), "a YAML file of data sets, a file or a hub id", type=text),
    listed("eval_dataset", None, "v1 evaluates nothing"),
    carried("output_dir", "outputs", "output", type=text),
    joint("micro_batch_size", 1, ("batch.size", "batch.micro")),
    joint("global_batch_size", None, ("batch.size",), "default: micro_batch_size of every process", type=whole),
    joint("batching_strategy", "normal", ("batch.row_tokens",), "normal, padding_free, dynamic_padding_free",
          type=text),
    listed("batching_workers", 16, "affects how batches are loaded, not results"),
    carried("cutoff_len", 2048, "data.max_length"),
    carried("learning_rate", 1e-4, "optim.lr"),
    joint("num_train_epochs", 3.0, ("duration",), "max_steps takes precedence"),
    joint("max_steps", None, ("duration",), type=whole),
    carried("bf16", True, "precision.compute", lambda on: "bf16" if on else "fp32"),
    carried("enable_activation_checkpointing", True, "gradient_checkpointing", switch),
    *all_listed(_SHARDS, mp_replicate_size=1, mp_shard_size=None, dp_size=None),
    joint("cp_size", 1, ("batch.size",), "processes of one batch; surefoot keeps sequences whole"),
    *all_listed("surefoot keeps sequences whole", cp_mode="ulysses"),
    listed("dist_timeout", 18000, "surefoot starts its own processes"),
    joint("resume_from_checkpoint", None, (), "--resume, from the newest checkpoint that verifies"),
    joint("save_steps", None, ("checkpoint.every",), type=whole),
    joint("save_epochs", None, ("checkpoint.every",), type=number),
    listed("save_ckpt_as_hf", False, "every checkpoint can be resumed from"),
    joint("save_total_limit", None, ("checkpoint.keep",), type=whole),
    carried("logging_steps", 1, "log_every"),
    refused("ld_alpha", None, "surefoot's losses weight all tokens of an answer equally"),
    *all_listed("applies to generation", sample_backend="hf", max_new_tokens=128),
)  # fmt: skip
ROWS = by_name(
    *(replace(OTHER[name], default=_DEFAULTS.get(name, OTHER[name].default), back=never) for name in _SAME.split()),
    joint("lora_alpha", 16, ("adapter.alpha",)),
    *_OWN,
)
_READ = (
    "pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing trust_remote_code max_grad_norm seed full_determinism"
)
_HIDDEN = {*_SAME.split()} - {*_READ.split()}  # the other trainer's names of what v1 calls otherwise, or lacks
TABLE = tuple(  # as they are written in its configs
    replace(row, name=next((own for own, theirs in _NAMES.items() if theirs == name), name))
    for name, row in ROWS.items()
    if name not in _HIDDEN or name in _NAMES.values()
)
_PARTS = {"kernel_config.": "kernel_config, which affects speed only", "init_config.": "init_config: loading alone"}


def is_v1(keys: frozenset[str]) -> bool:
    return "model" in keys and bool(keys & {"train_dataset", "peft_config"})


def renamed(words: Sequence[Word]) -> list[Word]:
    """Give the settings the other trainer's names. Raises InputError for those that v1 does not have."""
    for word in words:
        if word.name in _HIDDEN:
            raise setting_error(word.where, f"{word.name}: is no setting of the v1 trainer", "check the name")
    return [replace(word, name=_NAMES.get(word.name, word.name)) for word in words]


def translate(words: Sequence[Word], options: Options, command: Command, stage: str = "") -> Translation:
    """Translate v1's settings, as `renamed` returns them. stage: sft or dpo; "": as the data sets tell."""
    count = command.facts.get("processes", 1)
    command = replace(command, facts={**command.facts, "stage": stage})
    draft = Draft(Dialect("LLaMA-Factory", ROWS, _RULES, parts=_PARTS), words, command, options)
    found = draft.finish("train")
    return in_processes(found, replace(command, processes=draft.facts.get("processes", count)))


def _set_data(draft: Draft) -> None:
    path = draft["train_dataset"]
    if path is None:
        draft.refuse("train_dataset", "is required", "name a YAML file of data sets, a data file or a hub data set")
        return
    entries: dict[str, Any] = {"default": {"path": path, "source": "local"}}
    if path.endswith((".yaml", ".yml")):
        try:
            entries = dict(parse_document(draft.options.read(path), path).data)
        except InputError as error:
            for fault in error.faults:
                draft.refuse("train_dataset", f"{fault.where}: {fault.what}", "give a file that can be read here")
            return
    if not entries or not all(map(_is_entry, entries.values())):
        draft.refuse("train_dataset", f"{path}: expected data sets, each with its path", "write name: {path: …}")
        return
    kinds = {entry.get("converter") for entry in entries.values()}
    stage = draft.facts["stage"] or ("dpo" if kinds == {"pair"} else "sft")
    draft.set("stage", stage, why="the data sets' converter tells the method" if not draft.facts["stage"] else "")
    why: list[str] = []
    sources = [_source(draft, name, entry, stage, why) for name, entry in entries.items()]
    seen = any(_is_pictured(draft, entry) for entry in entries.values())
    why += [f"{_WHOLE}; with pictures here in parts"] * seen
    if not draft.faults:
        draft.set("data.train", short_sources(sources), "train_dataset", why="; ".join(dict.fromkeys(why)))
    learned = "completion" if kinds == {"alpaca"} else "responses"
    if stage == "sft":
        draft.set("data.train_on", learned, why="v1 learns all behind the prompt" if learned == "completion" else "")
        if not seen:
            draft.set("data.encoding", "whole", why=_WHOLE)
    _set_template(draft)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        return False
    return isinstance(entry.get("converter"), str | None)


_FORMATS = {None: "messages", "alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
_WHOLE = "v1 tokenizes prompt and answer in one piece, and truncates at the end"


def _is_pictured(draft: Draft, entry: dict[str, Any]) -> bool:
    """Whether the data set's own records have pictures, where the file can be read here."""
    if entry.get("converter") is not None or entry.get("source") != "local":
        return False
    try:
        return '"image_url"' in draft.options.read(entry["path"])
    except InputError:
        return False


def _source(draft: Draft, name: str, entry: dict[str, Any], stage: str, why: list[str]) -> dict[str, Any]:
    converter, path = entry.get("converter"), entry["path"]
    if unknown := entry.keys() - {"path", "source", "converter", "split", "size", "weight", "streaming"}:
        draft.refuse("train_dataset", f"{name}.{min(unknown)}: unknown key of a v1 data set")
    if converter not in _FORMATS:
        draft.refuse("train_dataset", f"{name}: {converter}", "name a converter: alpaca, sharegpt or pair, or none")
    elif (converter == "pair") != (stage == "dpo"):
        draft.refuse("train_dataset", f"{name}: converter {converter} is for another method than {stage}")
    if entry.get("streaming"):
        draft.refuse("train_dataset", f"{name}: v1 trains on no streams", "leave streaming out")
    size, weight = entry.get("size"), entry.get("weight")
    why += [_DRAWS] * (size is not None or weight is not None) + [_JOINS] * (converter == "alpaca")
    why += [_DIALOGUES] * (converter in ("sharegpt", None))
    more = {"split": entry.get("split"), "max_samples": size, "epochs": weight}
    return {"path": path, "format": _FORMATS.get(converter, "auto")} | {
        key: value for key, value in more.items() if value is not None
    }


def _set_template(draft: Draft) -> None:
    if own := draft["custom_chat_template"]:
        draft.set("data.template", own, "custom_chat_template")
    elif (named := template_of(draft["model_name_or_path"])) == UNTHINKING:
        draft.set("data.template", named, why="v1 renders without thoughts, and learns none of their empty marks")
    else:
        draft.set("data.template", "tokenizer", why="v1 renders with the tokenizer's chat template")
    draft.set("bos.prepend", "tokenizer", why="in v1 the chat template decides")


def _set_batch(draft: Draft) -> None:
    micro, size = draft["micro_batch_size"], draft["global_batch_size"]
    set_together(draft, "cp_size", "sequences")
    if micro < 1:
        draft.refuse("micro_batch_size", f"expected a number from 1, got {micro}")
        return
    count = draft.processes
    whole_step = size or micro * count
    if whole_step < 1 or whole_step % (micro * count):
        draft.refuse("global_batch_size", f"v1 needs a multiple of {micro * count}, got {whole_step}")
        return
    draft.set("batch.size", whole_step, "micro_batch_size", "global_batch_size")
    draft.set("batch.micro", micro, "micro_batch_size")
    how = draft["batching_strategy"]
    if how == "dynamic_padding_free":
        draft.set("batch.size", whole_step // micro, "micro_batch_size", "global_batch_size")
        why = "a micro-batch there is a row here: as many whole examples as fit"
        set_rows(draft, draft["cutoff_len"] * micro, "batching_strategy", "cutoff_len", "micro_batch_size", why=why)
    elif how not in _EXAMPLES:
        what = "fills a step with examples by their padded lengths, and surefoot pads no rows that it fills"
        draft.refuse("batching_strategy", what, f"use {', '.join(_EXAMPLES)} or dynamic_padding_free")
    else:
        draft.note("batching_strategy", "carried", "the same examples in a step", "batch.size")


def _set_steps(draft: Draft) -> None:
    set_duration(draft, "num_train_epochs", "max_steps")
    draft.assume("drop_last: true", "v1 leaves out an epoch's last short batch, which is a step here", "duration")
    draft.assume("weights in the checkpoint's type", "weights that train are in fp32 here", "precision.compute")
    draft.set("optim.schedule", "constant", why="v1's rate is constant")
    draft.set("optim.warmup", 0.0, why="v1 does not warm up")
    own = ("optim_config.wd", "optim_config.momentum", "optim_config.adamw_betas", "optim_config.adamw_eps")
    if (name := draft["optim_config.name"]) is None:
        draft.set("optim.weight_decay", 0.01, why="torch's default for AdamW")
        draft.drop("there is no optimizer of its own", *own)
    elif name == "muon":
        draft.set("optim.name", "muon", "optim_config.name")
        for key, setting in zip(("weight_decay", "momentum", "betas", "eps"), own, strict=True):
            draft.set(f"optim.{key}", draft[setting], setting)
    else:
        draft.refuse("optim_config.name", f"v1 has no optimizer {name}", "use muon, or leave optim_config out")


def _set_saving(draft: Draft) -> None:
    steps, epochs, limit = draft["save_steps"], draft["save_epochs"], draft["save_total_limit"]
    every = counted(epochs, "epoch") if epochs else counted(steps, "step") if steps else draft.written("duration")
    why = "" if epochs or steps else "v1 saves at the end"
    draft.set("checkpoint.every", every or "3 epochs", "save_epochs", "save_steps", why=why)
    set_keep(draft, limit or KEEP_ALL, "save_total_limit")
    if draft["resume_from_checkpoint"] == "auto":
        draft.arguments.append("--resume")
        draft.note("resume_from_checkpoint", "carried", "", "--resume")
    else:
        resume_argument(draft, "resume_from_checkpoint", draft["output_dir"])


def _set_shards(draft: Draft) -> None:
    name, several = draft["dist_config.name"], draft.facts["processes"] > 1
    if name not in (None, "fsdp2", "fsdpturbo", "deepspeed"):
        draft.refuse("dist_config.name", f"surefoot has no {name}", "use fsdp2 or deepspeed")
    elif name in ("fsdp2", "fsdpturbo") and several:
        draft.set("parallel.engine", "fsdp2", "dist_config.name")
        draft.set("parallel.nproc", draft.processes, why="the processes that have a batch of their own")
    else:
        draft.note("dist_config.name", "listed" if not several else "carried", "" if several else _ALONE)
    set_sharing(
        draft, Names("micro_batch_size", "gradient_accumulation_steps", "optim_config.name", "lr_scheduler_config")
    )


def _set_pairs(draft: Draft) -> None:
    names = ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing")
    if draft.written("stage") == "dpo":
        set_pairs(draft)
    else:
        draft.drop("belongs to dpo", *names)


_RULES = (_set_data, rules.set_adapter, rules.set_quantization, _set_batch, _set_steps, _set_saving, _set_shards,
          _set_pairs)  # fmt: skip
