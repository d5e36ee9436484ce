"""Translate torchtune's dataset builders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop.draft import Draft
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import parse_split, short_sources
from surefoot.interop.torchtune.rows import last_name

_SETS = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_WHY_WRAPPED = "torchtune also wraps the prompt in the model's turn tokens"
_BARE = "torchtune concatenates the texts between BOS and EOS"
# Model family -> (closest template to what torchtune's tokenizer writes around messages, the difference). Gemma's
# tokenizer writes nothing; the template of Llama 2 and Mistral can be turned off.
_LEARNS_HEADER = "in torchtune the header before an answer also carries loss; surefoot omits a masked EOS"
_CONVERTED = {
    "llama2": ("llama2", "in torchtune the blank after [/INST] belongs to the prompt"),
    "code_llama2": ("llama2", "in torchtune the blank after [/INST] belongs to the prompt"),
    "mistral": ("mistral", "in torchtune the blank after [/INST] belongs to the prompt"),
    "phi3": ("phi3", _LEARNS_HEADER),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2", "llama3_3"), ("llama3", _LEARNS_HEADER)),
    **dict.fromkeys(("qwen2", "qwen2_5", "qwen3"), ("chatml", _LEARNS_HEADER)),
}


def set_data(draft: Draft) -> None:
    kind = last_name(draft["dataset._component_"])
    about = ("column_map", "column", "conversation_column", "conversation_style", "train_on_input")
    if kind not in (*_SETS, "instruct_dataset", "chat_dataset", "text_completion_dataset"):
        fix = "use alpaca_dataset, alpaca_cleaned_dataset, instruct_dataset, chat_dataset or text_completion_dataset"
        draft.refuse("dataset._component_", f"surefoot does not support {kind or 'a dataset without a component'}", fix)
        draft.drop(
            "the dataset is not supported",
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
        _set_turns(draft)
    else:
        used = ["dataset.column_map", "dataset.train_on_input"]
        source["format"] = "alpaca" if kind != "instruct_dataset" else "auto"
        if kind == "instruct_dataset":
            _columns(source, draft["dataset.column_map"], {"input": "instruction", "output": "output"})
            source["format"] = "alpaca"
            _set_turns(draft)
        else:
            _columns(source, draft["dataset.column_map"], {})
            whole_prompt = True if whole_prompt is None else whole_prompt
            draft.set("data.template", "alpaca", "dataset._component_", why="" if _is_bare(draft) else _WHY_WRAPPED)
    if draft.written("stage") == "sft":
        usual = "torchtune's default for this dataset" if draft["dataset.train_on_input"] is None else ""
        draft.set("data.train_on", "everything" if whole_prompt else "responses", "dataset.train_on_input", why=usual)
    names = [f"dataset.{name}" for name in ("_component_", "source", "data_files", "split", "name")]
    draft.set(
        "data.train", short_sources([source]), *names, *(name for name in used if name != "dataset.train_on_input")
    )
    draft.drop(f"{kind} does not read it", *(f"dataset.{name}" for name in about if f"dataset.{name}" not in used))


def _family(draft: Draft) -> str:
    return str(draft["tokenizer._component_"] or draft["model._component_"]).split(".")[-2:][0]


def _is_bare(draft: Draft) -> bool:
    """Return whether the tokenizer adds nothing around messages."""
    left_out = bool(draft.where("tokenizer.prompt_template"))  # null: other values are refused
    return _family(draft).startswith("gemma") or (left_out and _family(draft) in ("llama2", "code_llama2", "mistral"))


def _set_turns(draft: Draft) -> None:
    """Set data.template for messages without a prompt template of the dataset."""
    if _is_bare(draft):
        draft.set("data.template", "raw", "dataset._component_", "tokenizer.prompt_template")
        draft.set("bos.prepend", "on", why=_BARE)
    elif (found := _CONVERTED.get(_family(draft))) is not None:
        draft.set("data.template", found[0], "dataset._component_", why=found[1])
    else:
        what = f"surefoot does not know torchtune's message format for {_family(draft)}"
        draft.refuse("dataset._component_", what, "use alpaca_dataset or text_completion_dataset")


def _source(draft: Draft, kind: str) -> dict[str, Any]:
    path = draft["dataset.source"] or _SETS.get(kind)
    files, split = draft["dataset.data_files"], draft["dataset.split"]
    if path is None:
        draft.refuse("dataset.source", "is required", "name a dataset")
    try:
        split, count = parse_split(str(split))
    except Refusal as refusal:
        draft.refuse("dataset.split", refusal.what, refusal.fix)
        count = None
    part = {} if count is None else {"max_samples": count}
    if files is not None:
        return {"path": files, **part}
    subset = {"subset": draft["dataset.name"]} if draft["dataset.name"] else {}
    return {"path": path, **subset, **({"split": split} if split != "train" else {}), **part}


def _columns(source: dict[str, Any], given: Any, ours: Mapping[str, str]) -> None:
    """Set the columns from column_map (torchtune's name -> file's column). ours: torchtune's name -> surefoot's."""
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
