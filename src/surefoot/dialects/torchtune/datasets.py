"""What torchtune's dataset builders make of records, in surefoot's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.dialects.draft import Draft
from surefoot.dialects.torchtune.rows import last_name

_SETS = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_WITHOUT_TURNS = ("llama2", "mistral", "gemma", "gemma2")  # their tokenizers add nothing to a message's text
_WHY_WRAPPED = "torchtune wraps the prompt in the model's own turn tokens as well"


def set_data(draft: Draft) -> None:
    kind = last_name(draft["dataset._component_"])
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
