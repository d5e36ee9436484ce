"""Translate how TRL turns a dataset into examples.

TRL tokenizes prompt and answer in one piece, with a BOS if the chat template or tokenizer writes one, truncates at the
end, and puts loss on completions if the records have them, else on every token. Texts use no template. The run itself
detects the kind of records from the first one (`by-record`), as a hub dataset is not available here. A local file is
read only for cases that TRL treats differently for texts, or refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from surefoot.config.dump import shown
from surefoot.families.templates import BY_RECORD
from surefoot.interop.draft import Draft
from surefoot.interop.launch import FirstRecord
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import parse_split

Layout = Literal[
    "text", "pairs", "completions", "turns"
]  # pairs: prompt and completion as texts; completions: as messages
_LEARNED = "TRL puts loss on completions if the first record has a prompt, else on every token"
_MASKED = "for prompt-completion records; TRL refuses others"
_TEMPLATE = "for conversations; TRL uses no template for texts"
_ABOUT_DATA = (
    "dataset_config", "dataset_train_split", "dataset_test_split", "test_split_size", "dataset_text_field",
    "completion_only_loss", "assistant_only_loss", "chat_template_path",
)  # fmt: skip


def set_data(draft: Draft) -> None:
    if (sources := _train_sources(draft)) is None:
        draft.drop("there is no training data", *_ABOUT_DATA)
        return
    field = draft["dataset_text_field"]
    layout = _layout(sources, field, draft.options.first)
    if field != "text" and layout in (None, "text"):
        sources = [_named(source, field) for source in sources]
        draft.set("data.train", sources[0] if len(sources) == 1 else sources, "dataset_text_field")
        layout = "text"
    draft.note(
        "dataset_text_field",
        "carried" if layout == "text" else "listed",
        "" if layout == "text" else "the records are not plain texts",
    )
    draft.set("stage", "sft")
    _set_evaluation(draft, sources)
    set_examples(draft, layout)


def set_sources(draft: Draft) -> list[Any] | None:
    """Set data.train and data.eval for preference and reward methods. Returns the sources, None if there are none."""
    sources = _train_sources(draft)
    if sources is None:
        draft.drop("there is no training data", "dataset_config", "dataset_train_split", "dataset_test_split",
                   "test_split_size")  # fmt: skip
        return None
    _set_evaluation(draft, sources)
    return sources


def _train_sources(draft: Draft) -> list[Any] | None:
    whole_sets = ("dataset_name", "dataset_config", "dataset_train_split")
    if draft["datasets"]:
        sources = _mixture(draft)
        draft.set("data.train", sources[0] if len(sources) == 1 else sources, "datasets")
        draft.drop("datasets takes precedence", *whole_sets)
        return sources
    if draft["dataset_name"]:
        source = _source(draft["dataset_name"], draft["dataset_config"], draft["dataset_train_split"])
        draft.set("data.train", source, *whole_sets)
        return [source]
    draft.refuse("dataset_name", "is required", "name a dataset, or give datasets")
    return None


def _source(path: str, subset: Any, split: str) -> Any:
    source = {"path": path}
    source |= {"subset": subset} if subset else {}
    source |= {"split": split} if split != "train" else {}
    return source if len(source) > 1 else path


def _entry(source: Any) -> dict[str, Any]:
    return {"path": source} if isinstance(source, str) else source


def _named(source: Any, field: str) -> dict[str, Any]:
    return {**_entry(source), "format": "text", "columns": {"text": field}}


def _mixture(draft: Draft) -> list[Any]:
    known = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
    entries = draft["datasets"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
        draft.refuse("datasets", "expected a list of datasets, each with a path")
        return ["?"]
    sources: list[Any] = []
    for at, entry in enumerate(entries):
        for key in entry:
            if key not in known:
                draft.refuse("datasets", f"[{at}].{key}: unknown setting of TRL", f"choose from {', '.join(known)}")
        if entry.get("data_dir") or entry.get("fraction") not in (None, 1, 1.0):
            draft.refuse("datasets", f"[{at}]: selects a part of the data", "use max_samples in surefoot's config")
        files = entry.get("data_files") or entry["path"]
        if not isinstance(files, str):
            draft.refuse("datasets", f"[{at}].data_files: {shown(files)} is not one file", "give each its own entry")
            continue
        try:
            split, count = parse_split(str(entry.get("split", "train")))
        except Refusal as refusal:
            draft.refuse("datasets", f"[{at}].split: {refusal.what}", refusal.fix)
            continue
        source = _source(files, entry.get("name"), split)
        sources.append(source if count is None else {**_entry(source), "max_samples": count})
    return sources or ["?"]


def _layout(sources: Sequence[Any], field: str, first: FirstRecord) -> Layout | None:
    """Return the layout of the first records of all sources; None if unknown or if they differ."""
    records = [first(source if isinstance(source, str) else source["path"]) for source in sources]
    kinds: set[Layout | None] = {_kind(record, field) for record in records}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(record: Mapping[str, Any] | None, field: str) -> Layout | None:
    if record is None:
        return None
    if "prompt" in record:
        return "pairs" if isinstance(record["prompt"], str) else "completions"
    if field in record:
        return "text"
    return "turns" if {"messages", "conversations"} & record.keys() else None


def _set_evaluation(draft: Draft, sources: Sequence[Any]) -> None:
    split, share = draft["dataset_test_split"], draft["test_split_size"]
    if share:
        draft.set("data.eval", int(share) if share >= 1 else share, "test_split_size")
        draft.drop("test_split_size takes precedence", "dataset_test_split")
    elif draft["eval_strategy"] == "no":
        draft.drop("eval_strategy is no", "dataset_test_split", "test_split_size")
    else:
        tests = [{**_entry(one), "split": split} for one in sources]
        draft.set("data.eval", tests[0] if len(tests) == 1 else tests, "dataset_test_split")


def set_examples(draft: Draft, layout: Layout | None) -> None:
    """Set template, loss mask and encoding as TRL's trainer does. layout: None if no record could be read."""
    set_learned(draft, layout)
    set_template(draft, draft["chat_template_path"], texts=layout in ("text", "pairs"), seen=layout is not None)
    draft.set("data.encoding", "whole", why="TRL tokenizes prompt and answer in one piece, and truncates at the end")


def set_template(draft: Draft, path: str | None, *, texts: bool, seen: bool) -> None:
    """Set data.template and BOS.

    path: file of a chat template, or None.
    texts: whether the records are known to be plain texts.
    seen: whether a record could be read.
    """
    if path is not None and not path.endswith(".jinja"):
        draft.refuse("chat_template_path", "surefoot reads a .jinja file", "write the template to one")
    elif path is not None and not texts:
        draft.set("data.template", path, "chat_template_path", why="" if seen else _TEMPLATE)
    else:
        draft.set(
            "data.template", BY_RECORD, why="TRL uses texts as they are and renders conversations with a template"
        )
    if texts and path is not None:
        draft.drop("texts use no template", "chat_template_path")
    draft.set("bos.prepend", "tokenizer", why="in TRL the chat template and the tokenizer decide")


def set_learned(draft: Draft, layout: Layout | None) -> None:
    completions, answers = draft["completion_only_loss"], draft["assistant_only_loss"]
    words = ("completion_only_loss", "assistant_only_loss")
    if layout in ("text", "pairs") and answers:
        draft.refuse(
            "assistant_only_loss", "TRL supports it only for conversations, and these are texts", "leave it out"
        )
    elif answers:
        both = "with completion_only_loss: false TRL also puts loss on answers within prompts"
        changed = both if layout in (None, "completions") and completions is False else ""
        draft.set("data.train_on", "responses", *words, why=changed)
    elif layout in ("text", "turns"):
        draft.drop("the records have no completions", "completion_only_loss")
        draft.set("data.train_on", BY_RECORD, "assistant_only_loss", why=_LEARNED)
    elif completions is None:
        draft.set("data.train_on", BY_RECORD, "assistant_only_loss", why=_LEARNED)
    else:
        masked = _MASKED if completions and layout is None else ""
        draft.set("data.train_on", "completion" if completions else "everything", *words, why=masked)
