"""Write surefoot's sources, template and method as Axolotl's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.families.templates import OWN, OWN_OR, is_jinja
from surefoot.interop import backward
from surefoot.interop.axolotl.layouts import OF_ORPO, kinds, read_layout
from surefoot.interop.backward import Ours, launch_flags, name_or_pattern, of_model, processes, variables
from surefoot.interop.shared_rules import written_split
from surefoot.system.locations import data_kind

# Axolotl's chat_template -> (surefoot template, bos.prepend). Its other templates have no equal here.
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "tokenizer_default": (OWN, "tokenizer"),
    "chatml": ("chatml", "off"),
    "llama3": ("llama3", "on"),
    "alpaca": ("axolotl-alpaca", "on"),
    "gemma": ("gemma", "on"),
    "gemma3": ("gemma", "on"),
    "phi_3": ("axolotl-phi_3", "on"),
    "phi_35": ("axolotl-phi_3", "off"),
    "qwen_25": ("qwen", "off"),
    "falcon_h1": ("chatml", "on"),
}
# Templates for one family of models -> a pattern of the names of its models. Their own template is used.
OF_A_FAMILY: Mapping[str, str] = {
    "qwen3": "qwen3|plano-", "qwen3_5": "qwen3.5", "qwen2_vl": "vl", "gemma3n": "gemma-3n", "gemma4": "gemma-4",
    "gemma4_unified": "gemma-4", "llama4": "llama-4", "llava": "llava", "pixtral": "pixtral", "jamba": "jamba",
    "llama3_2_vision": "llama-3.2-.*vision", "cohere": "command-r", "deepseek_v2": "deepseek-v2",
}  # fmt: skip
ALPACA: Mapping[Any, str] = {
    "alpaca": "axolotl-alpaca-instruct",
    "alpaca:instruct": "axolotl-alpaca-instruct",
    "alpaca:chat": "axolotl-alpaca-chat",
    "alpaca:chatml": "axolotl-alpaca-chatml",
    "alpaca:phi": "axolotl-alpaca-phi",
    "jeopardy": "axolotl-jeopardy",
}
ITS_FIELDS = {"jeopardy": {"instruction": "question", "input": "category", "output": "answer"}}
PAIRS = "chat_template.default"  # a prompt, which may be a text, and two answers, in the config's template
FALLBACK = "tokenizer_default_fallback_"
_STACKED = "experts."
_SHAREGPT = {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}


def template(ours: Ours) -> str | None:
    """Axolotl's name of the template; jinja for one in a file or in the config."""
    name, begins = ours["data.template"], ours["bos.prepend"]
    if is_jinja(name) or name.endswith(".jinja"):
        return "jinja"
    fallback, name = (FALLBACK, name.removeprefix(OWN_OR)) if name.startswith(OWN_OR) else ("", name)
    same = [theirs for theirs, (mine, _) in TEMPLATES.items() if mine == name]
    same = [theirs for theirs in same if TEMPLATES[theirs][1] == begins] or same
    found = of_model(ours, same) or next(iter(same), None)
    return f"{fallback}{found}" if found and name != OWN else None


def jinja(ours: Ours) -> str | None:
    return ours["data.template"] if template(ours) == "jinja" else None


def train(ours: Ours) -> list[dict[str, Any]] | None:
    return None if stream(ours) else [_entry(ours, source, "train") for source in ours.train]


def stream(ours: Ours) -> list[dict[str, Any]] | None:
    """pretraining_dataset: texts of the hub that are read as they come."""
    if not (ours.facts.plain_texts and ours.only.get("streaming") and len(ours.train) == 1):
        return None
    entry = _entry(ours, {name: part for name, part in ours.only.items() if name != "max_samples"}, "train")
    return [{"text_column": entry.pop("field", "text"), **entry, "type": "pretrain"}]


def held_out(ours: Ours) -> list[dict[str, Any]] | None:
    return [_entry(ours, source, "test") for source in ours.eval] or None


def _entry(ours: Ours, source: dict[str, Any], usual: str) -> dict[str, Any]:
    where = written_split({"split": usual, **source})
    said = {"name": source.get("subset"), "revision": source.get("revision")}
    said["split"] = None if where == usual and data_kind(source["path"]) else where
    found = {"path": source["path"], **{key: value for key, value in said.items() if value is not None}}
    return found | _kind(ours, source)


def _kind(ours: Ours, source: dict[str, Any]) -> dict[str, Any]:
    columns: Mapping[str, str] = source.get("columns", {})
    if ours.facts.rollouts:
        return {}
    if not ours.facts.learns_tokens:
        kind = _compared(ours, source, columns)
        return {"type": kind} | (_fields(ours, source, columns) if kind == PAIRS else {})
    if source["format"] == "text" or ours.facts.plain_texts:
        return {"type": "completion"} | ({"field": columns["text"]} if "text" in columns else {})
    if source["format"] == "tokens":
        return {}
    turns = columns.get("conversations" if source["format"] == "sharegpt" else "messages")
    named: dict[str, Any] = {"field_messages": turns} if turns else {}
    named |= {"drop_system_message": True} if source.get("drop_system") else {}
    if source["format"] == "sharegpt":
        return {"type": "chat_template", **_SHAREGPT, **named}
    if source["format"] == "messages":
        return {"type": "chat_template", **named}
    return {"type": next((kind for kind, mine in ALPACA.items() if mine == ours["data.template"]), "alpaca")}


def _compared(ours: Ours, source: dict[str, Any], columns: Mapping[str, str]) -> str:
    """Return the type with this template and these columns, else the one that leaves most to other settings."""
    if ours["alignment.loss"] == "orpo":
        return OF_ORPO
    for kind in kinds(ours["stage"]):
        layout = read_layout(ours["stage"], {"type": kind})
        if layout.template == ours["data.template"] and dict(layout.columns) == columns:
            return kind
    if ours["stage"] == "kto":  # no type leaves the template open
        return "llama3.prompt_pairs" if ours["data.template"] == "llama3" else "chatml.prompt_pairs"
    if ours["stage"] == "reward":
        return "bradley_terry.chat_template"
    whole = isinstance((ours.record(source["path"]) or {}).get(columns.get("chosen", "chosen")), list)
    return "chat_template.argilla_chat" if whole and not _opening(ours, source, columns) else PAIRS


def _opening(ours: Ours, source: dict[str, Any], columns: Mapping[str, str]) -> str | None:
    """Return the field of a pair's prompt, None if there is none or the record cannot be read."""
    record = ours.record(source["path"]) or {}
    named = (columns.get(name, name) for name in ("prompt", "messages"))
    return next((name for name in named if record.get(name) is not None), None)


def _fields(ours: Ours, source: dict[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    opening = _opening(ours, source, columns) or columns.get("messages", "messages")
    own = {"messages": opening, **{name: columns[name] for name in ("chosen", "rejected") if name in columns}}
    return {f"field_{name}": field for name, field in own.items() if field != name}


def modules(ours: Ours) -> Any:
    """lora_target_modules, which may be one pattern."""
    named = ours["adapter.targets"]
    if not isinstance(named, list):
        return None
    return name_or_pattern([one for one in named if not one.startswith(_STACKED)]) or None


def parameters(ours: Ours) -> list[str] | None:
    """lora_target_parameters: experts that are stacked in one tensor."""
    named = ours["adapter.targets"]
    return [one for one in named if one.startswith(_STACKED)] or None if isinstance(named, list) else None


def processor(ours: Ours) -> str | None:
    return "AutoProcessor" if ours.sees else None


def frozen_vision(ours: Ours) -> bool | None:
    """freeze_mm_modules"""
    return True if ours.sees and ours["vision.tower"] == ours["vision.projector"] == "frozen" else None


def fixed(ours: Ours) -> dict[str, bool]:
    """What Axolotl demands: columns of judged answers, and of pictures, are read when a batch is made."""
    kept = {"remove_unused_columns": False} if ours.sees or ours.facts.records == "judged" else {}
    return kept | ({"skip_prepare_dataset": True} if ours.sees else {})


def _rows_in_one(ours: Ours) -> int:
    """Rows of sequence_len that are joined into one of batch.row_tokens."""
    tokens, limit = ours["batch.row_tokens"], ours["data.max_length"]
    return tokens // limit if tokens and isinstance(limit, int) and tokens % limit == 0 else 1


def micro(ours: Ours) -> int:
    return _rows_in_one(ours) if ours["batch.row_tokens"] else backward.micro(ours)


def real_batches(ours: Ours) -> bool | None:
    return False if _rows_in_one(ours) > 1 else None


def in_turn(ours: Ours) -> bool | None:
    """sample_packing_sequentially"""
    return True if ours["data.order"] == "file" and ours["batch.row_tokens"] else None


def longest(ours: Ours) -> int | None:
    return ours["data.max_length"] if _rows_in_one(ours) > 1 else backward.longest(ours)


def schedule(ours: Ours) -> str | None:
    """lr_scheduler, whose cosine has its floor in a setting of its own."""
    return "cosine" if ours["optim.schedule"] == "cosine" else backward.schedule(ours)


def floor(ours: Ours) -> float | None:
    return ours["optim.floor"] or None if ours["optim.schedule"] == "cosine" else None


def warmup_steps(ours: Ours) -> float | None:
    return 0 if not ours["optim.warmup"] else backward.length("optim.warmup", "steps")(ours)


def adapter(ours: Ours) -> str | None:
    return None if ours["adapter"] is None else "qlora" if ours["precision.base"] == "nf4" else "lora"


def tokens(ours: Ours) -> dict[str, str] | None:
    said = {f"{role}_token": ours[f"tokenizer.{role}"] for role in ("pad", "bos", "eos", "unk")}
    return {name: token for name, token in said.items() if token not in (None, "auto", "add")} or None


def added(ours: Ours) -> list[str] | None:
    """tokens"""
    return [*ours["tokenizer.add"], *ours["tokenizer.add_special"]] or None


def method(ours: Ours) -> str | None:
    """rl"""
    stage, loss = ours["stage"], ours["alignment.loss"]
    compared = loss if loss in ("ipo", "orpo", "simpo") else "dpo"
    return {"dpo": compared, "kto": "kto", "grpo": "grpo"}.get(stage)


def pair_losses(ours: Ours) -> list[str] | None:
    usual = ours["alignment.loss"] == "sigmoid" and not ours["alignment.sft"]
    return None if usual or method(ours) != "dpo" else backward.pair_losses(ours)


def pair_weights(ours: Ours) -> list[float] | None:
    return [1.0, ours["alignment.sft"]] if ours["alignment.sft"] and method(ours) == "dpo" else None


def qat(ours: Ours) -> dict[str, Any] | None:
    size, after = ours["precision.qat_group_size"], ours["precision.qat_after"]
    if ours["precision.qat"] == "int8-int4":
        asked = {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": size}
        return asked | ({"fake_quant_after_n_steps": after} if after else {})
    # Its nvfp4 ends in an error of torchao's, and a later start does not reach the layers of mxfp4.
    both = {"weight_dtype": "mxfp4", "activation_dtype": "mxfp4", "group_size": 32}
    return both if ours["precision.qat"] == "mxfp4" and not after else None


def sharding(ours: Ours) -> dict[str, Any] | None:
    """fsdp_config, which alone enables FSDP."""
    return {"offload_params": ours["parallel.offload"] == "all"} if ours["parallel.engine"] == "fsdp2" else None


def start(ours: Ours, method: str, path: str) -> list[str]:
    launch = ["accelerate", "launch", *launch_flags(ours), "-m", "axolotl.cli.train", path]
    return [*variables(ours), *(launch if processes(ours) > 1 else ["axolotl", "train", path])]
