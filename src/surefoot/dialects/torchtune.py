"""torchtune's recipe YAML, with `key=value` behind it, and `tune run RECIPE --config FILE key=value`.

Its files are groups of keys with a `_component_` each; here they are read flat, so `model.lora_rank` is one word, as it
is in an override. Facts: the recipes and components of torchtune 0.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.yaml_reader import Document
from surefoot.dialects.arithmetic import KEEP_ALL, counted, set_batch, switch
from surefoot.dialects.draft import Dialect, Draft
from surefoot.dialects.finetune import module_names
from surefoot.dialects.launch import Command, Options
from surefoot.dialects.rows import Row, carried, joint, listed, number, refused, text, truth, whole
from surefoot.dialects.tool import Tool
from surefoot.dialects.translation import Translation
from surefoot.dialects.words import Word, parse_document, read_pairs, top_keys
from surefoot.errors import Fault, InputError

NAME = "torchtune"
RECIPES = ("lora_finetune_single_device", "lora_finetune_distributed")
RECIPES += ("full_finetune_single_device", "full_finetune_distributed")
_COMPONENT = "_component_"
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
    "torch.optim.SGD": "sgd",
}
_LOSSES = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss")
_SETS = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_WITHOUT_TURNS = ("llama2", "mistral", "gemma", "gemma2")  # their tokenizers add nothing to a message's text
_DTYPES = ("bf16", "fp16", "fp32")
_LIBRARY = "surefoot reads what a model is from its own files"
_MEMORY = "is about memory or speed, and changes no number"
_CUT = "a longer example loses prompt tokens first"
_WHY_WRAPPED = "torchtune wraps the prompt in the model's own turn tokens as well"

_ROWS: tuple[Row, ...] = (
    carried("output_dir", None, "output", type=text),
    joint("model._component_", None, ("adapter.kind", "precision.base"), type=text),
    joint("model.lora_attn_modules", None, ("adapter.targets",), type=module_names),
    joint("model.apply_lora_to_mlp", False, ("adapter.targets",)),
    refused("model.apply_lora_to_output", False, "surefoot adapts no output head", "use modules_to_save in its config"),
    joint("model.lora_rank", 8, ("adapter.rank",)),
    joint("model.lora_alpha", 16, ("adapter.alpha",), type=number),
    joint("model.lora_dropout", 0.0, ("adapter.dropout",)),
    joint("model.use_dora", False, ("adapter.kind",)),
    joint("model.quantize_base", False, ("precision.base",)),
    listed("tokenizer._component_", None, _LIBRARY),
    listed("tokenizer.path", None, _LIBRARY),
    listed("tokenizer.merges_file", None, _LIBRARY),
    listed("tokenizer.special_tokens_path", None, _LIBRARY),
    carried("tokenizer.max_seq_len", None, "data.max_length", None, _CUT, type=whole),
    refused("tokenizer.prompt_template", None, "surefoot has its own templates", "set data.template in its config"),
    joint("checkpointer._component_", None, ("model.path",), type=text),
    joint("checkpointer.checkpoint_dir", None, ("model.path",), type=text),
    listed("checkpointer.checkpoint_files", None, "surefoot reads all weights of the folder"),
    listed("checkpointer.output_dir", None, "checkpoints lie in the run folder"),
    listed("checkpointer.model_type", None, _LIBRARY),
    listed("checkpointer.safe_serialization", None, "surefoot writes nothing else"),
    listed("checkpointer.recipe_checkpoint", None, "surefoot's checkpoints hold their whole state"),
    refused("checkpointer.adapter_checkpoint", None, "surefoot begins every run with a new adapter", "leave it out"),
    joint("resume_from_checkpoint", False, (), "--resume"),
    listed("save_adapter_weights_only", False, "every checkpoint can be resumed from"),
    joint("dataset._component_", None, ("data.train", "data.format", "data.template"), type=text),
    joint("dataset.source", None, ("data.train",), type=text),
    joint("dataset.data_files", None, ("data.train",), type=text),
    joint("dataset.split", "train", ("data.train",), type=text),
    joint("dataset.name", None, ("data.train",), "the subset", type=text),
    joint("dataset.column_map", None, ("data.train",)),
    joint("dataset.column", "text", ("data.train",), type=text),
    joint("dataset.conversation_column", None, ("data.train",), type=text),
    joint("dataset.conversation_style", None, ("data.format",), type=text),
    joint("dataset.train_on_input", None, ("data.train_on",), type=truth),
    refused("dataset.packed", False, "surefoot does not pack: a step has so many examples", "dataset.packed=False"),
    refused("dataset.new_system_prompt", None, "surefoot writes no system text of its own", "put it into the data"),
    refused("dataset.filter_fn", None, "is code", "filter the data first"),
    carried("seed", None, "seed", type=whole),
    refused("shuffle", True, "every epoch is shuffled by the seed", "leave it out"),
    joint("batch_size", 1, ("batch.micro", "batch.size")),
    joint("gradient_accumulation_steps", 1, ("batch.size",)),
    joint("epochs", 1, ("duration",)),
    joint("max_steps_per_epoch", None, ("duration",), type=whole),
    joint("optimizer._component_", None, ("optim.name",), type=text),
    carried("optimizer.lr", None, "optim.lr", type=number),
    joint("optimizer.weight_decay", None, ("optim.weight_decay",), type=number),
    carried("optimizer.betas", None, "optim.betas"),
    carried("optimizer.eps", None, "optim.eps", type=number),
    carried("optimizer.momentum", None, "optim.momentum", type=number),
    listed("optimizer.fused", None, _MEMORY),
    listed("optimizer.foreach", None, _MEMORY),
    listed("optimizer_in_bwd", False, _MEMORY),
    joint("lr_scheduler._component_", None, ("optim.schedule",), type=text),
    joint("lr_scheduler.num_warmup_steps", 0, ("optim.warmup", "optim.warmup_from_zero")),
    refused("lr_scheduler.num_cycles", 0.5, "surefoot's cosine is half a cycle", "leave it out"),
    joint("loss._component_", None, (), "cross-entropy", type=text),
    listed("loss.num_output_chunks", None, _MEMORY),
    listed("loss.ignore_index", None, "prompts and padding are masked by position"),
    carried("clip_grad_norm", None, "optim.max_grad_norm", type=number),
    joint("compile", False, ("compile",)),
    joint("metric_logger._component_", None, ("report_to",), type=text),
    joint("metric_logger.project", None, ("tracking.project",), type=text),
    joint("metric_logger.name", None, ("tracking.name",), type=text),
    listed("metric_logger.log_dir", None, "logs lie in the run folder"),
    listed("metric_logger.filename", None, "logs lie in the run folder"),
    listed("metric_logger.organize_logs", None, "logs lie in the run folder"),
    carried("log_every_n_steps", 1, "log_every"),
    listed("log_peak_memory_stats", False, "peak memory is always logged"),
    listed("log_level", "INFO", "surefoot's own lines are few"),
    joint("device", "cuda", (), "cpu hides the accelerator", type=text),
    joint("dtype", "bf16", ("precision.compute", "precision.base"), type=text),
    joint("enable_activation_checkpointing", False, ("gradient_checkpointing",)),
    listed("enable_activation_offloading", False, _MEMORY),
    listed("profiler", None, "surefoot train --profile N times forward and backward"),
    listed("profiler.enabled", None, "surefoot train --profile N times forward and backward"),
    listed("low_cpu_ram", None, _MEMORY),
    listed("custom_sharded_layers", None, "is about several processes; surefoot starts one"),
    refused("quantizer", None, "quantisation-aware training is not in surefoot", "leave it out"),
    refused("fsdp_cpu_offload", False, "several processes come with a later version", "leave it out"),
    refused("tensor_parallel_dim", 1, "several processes come with a later version", "leave it out"),
)  # fmt: skip
ROWS: Mapping[str, Row] = {row.name: row for row in _ROWS}


def _last(component: Any) -> str:
    return str(component or "").rpartition(".")[2]


def set_model(draft: Draft) -> None:
    if not draft["checkpointer.checkpoint_dir"]:
        draft.refuse("checkpointer.checkpoint_dir", "is required", "name the folder of the model")
        return
    if "Meta" in _last(draft["checkpointer._component_"]):
        fix = "use FullModelHFCheckpointer and a folder with config.json"
        draft.refuse("checkpointer._component_", "surefoot reads Hugging Face's layout", fix)
        return
    names = ("checkpointer.checkpoint_dir", "checkpointer._component_")
    draft.set("model.path", draft["checkpointer.checkpoint_dir"], *names)


def set_adapter(draft: Draft) -> None:
    builder = _last(draft["model._component_"])
    given = ("lora_attn_modules", "apply_lora_to_mlp", "lora_rank", "lora_alpha", "lora_dropout", "use_dora")
    words = [f"model.{name}" for name in given]
    if not builder.startswith(("lora_", "qlora_")):
        draft.note("model._component_", "carried", "no adapter: all weights train", "model.path")
        draft.drop("the model has no adapter", *words, "model.quantize_base")
        return
    draft.set("adapter.kind", "dora" if draft["model.use_dora"] else "lora", "model._component_", "model.use_dora")
    for name, key in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        draft.set(f"adapter.{key}", draft[f"model.{name}"], f"model.{name}")
    named = draft["model.lora_attn_modules"] or []
    if unknown := [name for name in named if name not in _ATTENTION]:
        draft.refuse("model.lora_attn_modules", f"torchtune has no {unknown[0]}", f"it has {', '.join(_ATTENTION)}")
        return
    targets = [_ATTENTION[name] for name in named] + (_MLP if draft["model.apply_lora_to_mlp"] else [])
    if not targets:
        draft.refuse("model.lora_attn_modules", "names no module", "name at least one")
        return
    draft.set("adapter.targets", targets, *words[:2])


def set_precision(draft: Draft) -> None:
    dtype, quantised = draft["dtype"], draft["model.quantize_base"]
    if dtype not in _DTYPES:
        draft.refuse("dtype", f"torchtune has no {dtype}", f"it has {', '.join(_DTYPES)}")
        return
    adapted = draft.has("adapter") is not None
    held = "" if dtype == "fp32" else "weights that train are held in fp32"
    draft.set("precision.compute", dtype, "dtype", why=held)
    if quantised or _last(draft["model._component_"]).startswith("qlora_"):
        draft.set("precision.base", "nf4", "model.quantize_base", "model._component_")
    elif adapted:
        draft.set("precision.base", dtype, "dtype", why=held)
        draft.drop("asks for nothing", "model.quantize_base")


def set_data(draft: Draft) -> None:
    kind = _last(draft["dataset._component_"])
    about = ("column_map", "column", "conversation_column", "conversation_style", "train_on_input")
    if kind not in (*_SETS, "instruct_dataset", "chat_dataset", "text_completion_dataset"):
        fix = "use alpaca_dataset, alpaca_cleaned_dataset, instruct_dataset, chat_dataset or text_completion_dataset"
        draft.refuse("dataset._component_", f"surefoot reads no {kind or 'data set without a component'}", fix)
        draft.drop(
            "the data set is refused",
            *(f"dataset.{name}" for name in (*about, "source", "data_files", "split", "name")),
        )
        return
    source = _source(draft, kind)
    draft.set("stage", "pretrain" if kind == "text_completion_dataset" else "sft", "dataset._component_")
    whole_prompt = draft["dataset.train_on_input"]
    used: list[str] = []
    if kind == "text_completion_dataset":
        source["format"] = "text"
        used = ["dataset.column"]
        source |= {"columns": {"text": draft["dataset.column"]}} if draft["dataset.column"] != "text" else {}
    elif kind == "chat_dataset":
        used = ["dataset.conversation_column", "dataset.conversation_style", "dataset.train_on_input"]
        _chat(draft, source)
    else:
        used = ["dataset.column_map", "dataset.train_on_input"]
        source["format"] = "alpaca" if kind != "instruct_dataset" else "auto"
        if kind == "instruct_dataset":
            _columns(source, draft["dataset.column_map"], {"input": "instruction", "output": "output"})
            source["format"] = "alpaca"
        else:
            _columns(source, draft["dataset.column_map"], {})
            whole_prompt = True if whole_prompt is None else whole_prompt
            family = str(draft["model._component_"]).split(".")[-2:][0]
            why = "" if family in _WITHOUT_TURNS else _WHY_WRAPPED
            draft.set("data.template", "alpaca", "dataset._component_", why=why)
    if draft.has("stage") == "sft":
        usual = "torchtune's default for this data set" if draft["dataset.train_on_input"] is None else ""
        draft.set("data.train_on", "everything" if whole_prompt else "responses", "dataset.train_on_input", why=usual)
    names = [f"dataset.{name}" for name in ("_component_", "source", "data_files", "split", "name")]
    short = source["path"] if source.keys() == {"path"} else source
    draft.set("data.train", short, *names, *(name for name in used if name != "dataset.train_on_input"))
    draft.drop(f"{kind} does not read it", *(f"dataset.{name}" for name in about if f"dataset.{name}" not in used))


def _source(draft: Draft, kind: str) -> dict[str, Any]:
    path = draft["dataset.source"] or _SETS.get(kind)
    files, split = draft["dataset.data_files"], draft["dataset.split"]
    if path is None:
        draft.refuse("dataset.source", "is required", "name a data set")
    if files is not None:
        return {"path": files}
    if not str(split).isidentifier():
        draft.refuse("dataset.split", f"takes a part of the data: {split}", "use max_samples in surefoot's config")
    subset = {"subset": draft["dataset.name"]} if draft["dataset.name"] else {}
    return {"path": path, **subset, **({"split": split} if split != "train" else {})}


def _columns(source: dict[str, Any], given: Any, ours: Mapping[str, str]) -> None:
    """column_map names the file's column for each of torchtune's; instruct_dataset's input is the instruction."""
    pairs = {name: name for name in ours} | (given or {})
    columns = {ours.get(name, name): column for name, column in pairs.items() if ours.get(name, name) != column}
    if columns:
        source["columns"] = columns


def _chat(draft: Draft, source: dict[str, Any]) -> None:
    layouts = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}
    style = draft["dataset.conversation_style"]
    if style not in layouts:
        draft.refuse("dataset.conversation_style", f"torchtune has no {shown(style)}", "use sharegpt or openai")
        return
    source["format"], usual = layouts[style]
    if (column := draft["dataset.conversation_column"]) not in (None, usual):
        source["columns"] = {usual: column}


def set_steps(draft: Draft) -> None:
    set_batch(draft, "batch_size", "gradient_accumulation_steps")
    epochs, most = draft["epochs"], draft["max_steps_per_epoch"]
    if epochs < 1:
        draft.refuse("epochs", f"expected a number from 1, got {epochs}")
    elif most:
        why = "as many steps in all; an epoch that has fewer ends sooner there"
        draft.set("duration", counted(epochs * most, "step"), "epochs", "max_steps_per_epoch", why=why)
    else:
        draft.set("duration", counted(epochs, "epoch"), "epochs")
    optimizer = draft["optimizer._component_"]
    if optimizer not in _OPTIMIZERS:
        draft.refuse("optimizer._component_", f"surefoot has no {optimizer}", f"it reads {', '.join(_OPTIMIZERS)}")
        return
    paged = "its moments are not paged to the CPU" if "Paged" in optimizer else ""
    draft.set("optim.name", _OPTIMIZERS[optimizer], "optimizer._component_", why=paged)
    usual = 0.0 if optimizer == "torch.optim.SGD" else 0.01
    decay = draft["optimizer.weight_decay"]
    why = "" if decay is not None else f"the default of {optimizer}"
    draft.set("optim.weight_decay", usual if decay is None else decay, "optimizer.weight_decay", why=why)
    schedule, warmup = _last(draft["lr_scheduler._component_"]), draft["lr_scheduler.num_warmup_steps"]
    if schedule not in ("", "get_cosine_schedule_with_warmup"):
        draft.refuse("lr_scheduler._component_", f"surefoot has no {schedule}", "use get_cosine_schedule_with_warmup")
        return
    constant = "without lr_scheduler the rate stays as it is"
    draft.set(
        "optim.schedule",
        "cosine" if schedule else "constant",
        "lr_scheduler._component_",
        why="" if schedule else constant,
    )
    rise = counted(warmup, "step") if schedule and warmup else 0.0
    draft.set("optim.warmup", rise, "lr_scheduler.num_warmup_steps")
    if schedule and warmup:
        draft.set("optim.warmup_from_zero", True, "lr_scheduler.num_warmup_steps")


def set_rest(draft: Draft) -> None:
    if _last(draft["loss._component_"]) not in ("", *_LOSSES):
        draft.refuse("loss._component_", f"surefoot's loss is cross-entropy, not {_last(draft['loss._component_'])}")
    draft.note("loss._component_", "carried", "cross-entropy over the tokens of a step")
    if not draft["clip_grad_norm"]:
        draft.set("optim.max_grad_norm", None, "clip_grad_norm", why="torchtune clips nothing unless told to")
    draft.set("compile", "default" if draft["compile"] else "off", "compile")
    checkpointing = "enable_activation_checkpointing"
    draft.set("gradient_checkpointing", switch(draft[checkpointing]), checkpointing)
    draft.set("checkpoint.every", "1 epoch", why="torchtune saves after each epoch")
    draft.set("checkpoint.keep", KEEP_ALL, why="torchtune deletes no checkpoint")
    if draft["device"] == "cpu":
        draft.environment["CUDA_VISIBLE_DEVICES"] = ""
    draft.note("device", "carried", "" if draft["device"] == "cpu" else "the accelerator, where there is one")
    if draft["resume_from_checkpoint"]:
        draft.arguments.append("--resume")
    draft.note("resume_from_checkpoint", "carried", "", *(["--resume"] if draft["resume_from_checkpoint"] else []))
    loggers = {
        "WandBLogger": ["wandb"],
        "TensorBoardLogger": ["tensorboard"],
        "DiskLogger": [],
        "StdoutLogger": [],
        "": [],
    }
    logger = _last(draft["metric_logger._component_"])
    if logger not in loggers:
        draft.refuse("metric_logger._component_", f"surefoot has no {logger}", "use WandBLogger or TensorBoardLogger")
        return
    details = ("metric_logger.project", "metric_logger.name")
    draft.set("report_to", loggers[logger], "metric_logger._component_")
    if loggers[logger]:
        for name in (name for name in details if draft[name]):
            draft.set(f"tracking.{_last(name)}", draft[name], name)
    else:
        draft.drop("no run is sent anywhere", *details)
    for name in ("output_dir", "optimizer.lr"):
        if not draft.given(name):
            draft.refuse(name, "is required", "give it")


_DIALECT = Dialect(NAME, ROWS, (set_model, set_adapter, set_precision, set_data, set_steps, set_rest))


def claims_file(path: str, text: str) -> bool:
    return {"model", "tokenizer", "checkpointer"} <= top_keys(path, text)


def claims_command(command: Command) -> bool:
    return command.name == "tune"


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    return _translate([*_flat(parse_document(text, path)), *read_pairs(overrides)], options)


def from_command(command: Command, options: Options) -> Translation:
    left = list(command.arguments)
    if left[:1] != ["run"]:
        raise InputError(Fault(" ".join(("tune", *left[:1])), "is no training", "surefoot reads `tune run`"))
    del left[0]
    if left[:1] in (["--nproc_per_node"], ["--nproc-per-node"]):
        if left[1:2] != ["1"]:
            raise InputError(Fault(" ".join(left[:2]), "surefoot starts one process", "leave it out"))
        del left[:2]
    recipe = left.pop(0) if left else ""
    if recipe not in RECIPES:
        raise InputError(
            Fault(f"tune run {recipe}".strip(), "is no recipe of surefoot's", f"it reads {', '.join(RECIPES)}")
        )
    if left[:1] != ["--config"] or len(left) < 2:
        raise InputError(Fault(f"tune run {recipe}", "names no config", "write --config FILE behind the recipe"))
    path, pairs = left[1], left[2:]
    if not path.endswith((".yaml", ".yml")):
        raise InputError(Fault(path, "is a config that comes with torchtune", f"copy it first: tune cp {path} my.yaml"))
    return from_file(path, options.read(path), pairs, options)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _flat(document: Document) -> list[Word]:
    """Every leaf as a dotted word; `${output_dir}` is what that key says. column_map and lists stay whole."""
    words: list[Word] = []

    def walk(group: Mapping[str, Any], before: str) -> None:
        for name, value in group.items():
            path = f"{before}{name}"
            if isinstance(value, dict) and value and path not in ROWS:
                walk(value, f"{path}.")
                continue
            if isinstance(value, str):
                value = _REFERENCE.sub(lambda found: str(_at(document.data, found[1])), value)
            position = document.keys.get(path)
            where = document.path if position is None else f"{document.path}:{position.line}:{position.column}"
            words.append(Word(path, value, where, f"{path}: {shown(value)}"))

    walk(document.data, "")
    return words


def _at(data: Any, path: str) -> Any:
    for step in path.split("."):
        data = data.get(step) if isinstance(data, dict) else None
    return data


def _translate(words: Sequence[Word], options: Options) -> Translation:
    draft = Draft(_DIALECT, words, allow_unknown=options.allow_unknown)
    return draft.finish("train", environment=draft.environment)


TORCHTUNE = Tool(NAME, claims_command, from_command, claims_file, from_file)
