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
from surefoot.families.templates import BY_RECORD, OWN
from surefoot.interop.backward import never
from surefoot.interop.draft import Draft
from surefoot.interop.launch import FirstRecord
from surefoot.interop.settings import Refusal, Row, carried, group, joint, listed, names, number, refused, text, truth
from surefoot.interop.shared_rules import parse_split
from surefoot.interop.translation import Note

Layout = Literal[
    "text", "pairs", "completions", "turns"
]  # pairs: prompt and completion as texts; completions: as messages
_LEARNED = "TRL puts loss on completions if the first record has a prompt, else on every token"
_MASKED = "for prompt-completion records; TRL refuses others"
_TEMPLATE = "for conversations; TRL uses no template for texts"
_ABOUT_DATA = (
    "dataset_config", "dataset_train_split", "dataset_test_split", "test_split_size", "dataset_text_field",
    "completion_only_loss", "assistant_only_loss", "chat_template_path", "chat_template", "dataset_kwargs",
)  # fmt: skip
_DRAWN = "drawn with surefoot's seed, not with that of the mixture, and rounded to the nearest record"
_KEYS = {  # of an entry; alignment-handbook's names -> TRL's
    "datasets": {name: name for name in ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")},
    "dataset_mixture": {"id": "path", "config": "name", "split": "split", "columns": "columns", "weight": "weight"},
    "dataset_mixer": {},
}
_OWN_COLUMNS = "they tell the format, which reads its own of them"
_FIRST = "the first records of each, rounded to the nearest one; alignment-handbook rounds down"
_MIXER = "belongs to dataset_mixer"
_EMPTY = "alignment-handbook inserts an empty system message where the template has a place for it; surefoot none"
_CLEANED = "its scripts also leave out texts with a problem of HumanEval, and surefoot does not"
OWN_EOS = carried("eos_token", None, "tokenizer.eos", None, "checked: with another EOS the run is refused", type=text)
# Settings that alignment-handbook's scripts add to TRL's.
HANDBOOK: tuple[Row, ...] = (
    joint("dataset_mixture", None, ("data.train", "data.eval"), "alignment-handbook's", type=group, back=never),
    joint("chat_template", None, ("data.template",), "alignment-handbook's; the template itself", type=text,
          back=never),
    joint("dataset_mixer", None, ("data.train", "data.eval"), "its earlier form: a share of each data set, by name",
          type=group, back=never),
    joint("dataset_splits", ["train", "test"], ("data.train", "data.eval"), _MIXER, type=names, back=never),
    joint("dataset_configs", None, ("data.train", "data.eval"), _MIXER, type=names, back=never),
    joint("auto_insert_empty_system_msg", True, (), _EMPTY, type=truth),
    refused("tokenizer_name_or_path", None, "surefoot reads the tokenizer beside the model", "put its files there"),
    listed("preprocessing_num_workers", None, "affects speed only, not results"),
    refused("truncation_side", None, "surefoot truncates at the end", same=("right",)),
)  # fmt: skip


def set_data(draft: Draft) -> None:
    if (sources := _train_sources(draft)) is None:
        draft.drop("there is no training data", *_ABOUT_DATA)
        return
    field = draft["dataset_text_field"]
    selected = selected_columns(draft)
    layout: Layout | None = (
        "turns" if "messages" in selected else None if selected else _layout(sources, field, draft.options.first)
    )
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
    if mixture := _mixture_name(draft):
        sources = _mixture(draft, mixture)
        sampled = any("share" in _entry(source) for source in sources)
        of_mixer = ("dataset_splits", "dataset_configs") if mixture == "dataset_mixer" else ()
        why = "" if not sampled else _FIRST if of_mixer else _DRAWN
        draft.set("data.train", sources[0] if len(sources) == 1 else sources, mixture, *of_mixer, why=why)
        draft.drop(f"{mixture} takes precedence", *whole_sets)
        _set_mixer(draft, given=bool(of_mixer))
        return sources
    if draft["dataset_name"]:
        source = _source(draft["dataset_name"], draft["dataset_config"], draft["dataset_train_split"])
        draft.set("data.train", source, *whole_sets)
        _set_mixer(draft, given=False)
        return [source]
    draft.refuse("dataset_name", "is required", "name a dataset, or give datasets")
    return None


def _set_mixer(draft: Draft, *, given: bool) -> None:
    """Note what alignment-handbook's earlier scripts do besides mixing."""
    system = "auto_insert_empty_system_msg"
    if "dataset_mixer" not in draft.rows:
        return
    if not given:
        draft.drop(_MIXER, "dataset_splits", "dataset_configs", system)
        return
    if draft[system] and not draft.given(system):
        draft.assume(f"{system}: true", _EMPTY, "data.template")
    draft.note(system, "changed" if draft[system] else "listed", _EMPTY if draft[system] else "none is inserted")
    draft.assume("HumanEval", _CLEANED, "data.train")
    if "precompute_ref_log_probs" in draft.rows and not draft.given("optim"):  # of DPO
        draft.take("optim", "rmsprop")
        draft.assume("optim: rmsprop", "the default of alignment-handbook's earlier DPO", "optim.name")


def _source(path: str, subset: Any, split: str) -> Any:
    source = {"path": path}
    source |= {"subset": subset} if subset else {}
    source |= {"split": split} if split != "train" else {}
    return source if len(source) > 1 else path


def _entry(source: Any) -> dict[str, Any]:
    return {"path": source} if isinstance(source, str) else source


def _named(source: Any, field: str) -> dict[str, Any]:
    return {**_entry(source), "format": "text", "columns": {"text": field}}


def _mixture_name(draft: Draft) -> str:
    """Return the setting that lists several data sets; empty if none does."""
    return next((name for name in _KEYS if name in draft.rows and draft[name]), "")


def _entries(draft: Draft, setting: str) -> list[dict[str, Any]]:
    """Return the entries of a mixture with TRL's names. Refuses what is none, and unknown keys."""
    if setting == "dataset_mixer":
        return _mixer(draft)
    held, known = draft[setting], _KEYS[setting]
    if setting == "dataset_mixture":
        for key in held.keys() - {"datasets", "seed", "test_split_size"}:
            draft.refuse(setting, f"{key}: unknown setting of alignment-handbook")
        if "seed" in held:
            shown_seed = f"{setting}.seed: {shown(held['seed'])}"
            draft.add_note(
                Note(shown_seed, "listed", (), "order and samples follow surefoot's seed", draft.where(setting))
            )
        held = held.get("datasets")
    first = next(iter(known))
    if not isinstance(held, list) or not all(isinstance(entry, dict) and entry.get(first) for entry in held):
        draft.refuse(setting, f"expected a list of datasets, each with {first}")
        return []
    for at, entry in enumerate(held):
        for key in entry.keys() - known.keys():
            draft.refuse(setting, f"[{at}].{key}: unknown setting of TRL", f"choose from {', '.join(known)}")
        columns = entry.get("columns")
        if columns is not None and not (isinstance(columns, list) and all(isinstance(one, str) for one in columns)):
            draft.refuse(setting, f"[{at}].columns: expected a list of names, got {shown(columns)}")
            return []
        if columns:
            word = f"{setting}{'.datasets' if setting == 'dataset_mixture' else ''}[{at}].columns: {shown(columns)}"
            draft.add_note(Note(word, "carried", ("data.train",), _OWN_COLUMNS, draft.where(setting)))
    return [{known[key]: value for key, value in entry.items() if key in known} for entry in held]


def _mixer(draft: Draft) -> list[dict[str, Any]]:
    """Return the entries of alignment-handbook's earlier mixture: the first records of each data set, all of whose test
    splits are read. Its SFT reads `messages` alone, its pairs have the prompt in the answers."""
    held, splits = draft["dataset_mixer"], draft["dataset_splits"]
    subsets = draft["dataset_configs"] or [None] * len(held)
    train = [split for split in splits if "train" in split]
    if len(train) != 1 or not all("train" in split or "test" in split for split in splits):
        draft.refuse("dataset_splits", "expected one split for training, and others with test in their names")
        return []
    if len(subsets) != len(held):
        draft.refuse("dataset_configs", f"expected one for each of {len(held)} data sets, got {len(subsets)}")
        return []
    columns = ["messages"] if "dataset_text_field" in draft.rows else ["chosen", "rejected"]
    every = {"split": train[0], "columns": columns, "in_order": True}
    return [{"path": path, "name": subset, "weight": held[path], **every}
            for path, subset in zip(held, subsets, strict=True)]  # fmt: skip


def selected_columns(draft: Draft) -> set[str]:
    """Return the columns that a mixture selects; empty if it takes all."""
    setting = _mixture_name(draft)
    return {one for entry in (_entries(draft, setting) if setting else ()) for one in entry.get("columns") or ()}


def _mixture(draft: Draft, setting: str) -> list[Any]:
    sources: list[Any] = []
    for at, entry in enumerate(_entries(draft, setting)):
        place = f"{'datasets' if setting == 'dataset_mixture' else ''}[{at}]"
        if entry.get("data_dir") or entry.get("fraction") not in (None, 1, 1.0):
            draft.refuse(setting, f"{place}: selects a part of the data", "use max_samples in surefoot's config")
        files = entry.get("data_files") or entry["path"]
        if not isinstance(files, str):
            draft.refuse(setting, f"{place}.data_files: {shown(files)} is not one file", "give each its own entry")
            continue
        try:
            split, part = parse_split(str(entry.get("split", "train")))
            more = {**_columns(entry.get("columns")), **_weighed(entry), **part}
        except Refusal as refusal:
            draft.refuse(setting, f"{place}: {refusal.what}", refusal.fix)
            continue
        source = _source(files, entry.get("name"), split)
        sources.append({**_entry(source), **more} if more else source)
    return sources or ["?"]


_VALUES = "chat_template_kwargs"


def _columns(selected: Any) -> dict[str, Any]:
    """Return the format of records that keep only these columns, which other columns would make another, and the
    column of values for the template's variables, which surefoot reads where it is named."""
    names = set(selected or ())
    more = {"columns": {_VALUES: _VALUES}} if _VALUES in names else {}
    if "prompt" not in names and "messages" in names:
        return {"format": "messages", **more}
    return {"format": "preference", **more} if {"chosen", "rejected"} <= names else more


def _weighed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of the records that alignment-handbook's weight keeps. Raises Refusal."""
    weight, order = entry.get("weight"), {"in_order": True} if "in_order" in entry else {}
    if weight is None or weight == 1:
        return {}
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1:
        raise Refusal(f"weight: expected a fraction of the records, above 0 and at most 1, got {weight}")
    return {"share": {"of": [weight, 1 - weight], "take": 1, **order}}


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
    split, share, name = draft["dataset_test_split"], draft["test_split_size"], "test_split_size"
    if (mixture := _mixture_name(draft)) == "dataset_mixture":
        share, name = draft[mixture].get("test_split_size"), mixture
        try:
            share = None if share is None else number(share)
        except ValueError as error:
            draft.refuse(mixture, f"test_split_size: expected {error}, got {shown(share)}")
            return
    if mixture == "dataset_mixer":
        tests = [one for one in draft["dataset_splits"] if "test" in one and draft["eval_strategy"] != "no"]
        found = [{**{key: part for key, part in _entry(source).items() if key != "share"}, "split": one}
                 for one in tests for source in sources]  # fmt: skip
        if found:
            draft.set("data.eval", found[0] if len(found) == 1 else found, "dataset_splits")
        draft.drop("dataset_mixer takes precedence", "dataset_test_split", "test_split_size")
    elif share:
        draft.set("data.eval", int(share) if share >= 1 else share, name, why=_DRAWN if name == mixture else "")
        draft.drop(
            "test_split_size takes precedence", "dataset_test_split", *(["test_split_size"] if name == mixture else [])
        )
    elif draft["eval_strategy"] == "no" or mixture:
        draft.drop(
            "there is no evaluation data" if mixture else "eval_strategy is no", "dataset_test_split", "test_split_size"
        )
    else:
        tests = [{**_entry(one), "split": split} for one in sources]
        draft.set("data.eval", tests[0] if len(tests) == 1 else tests, "dataset_test_split")


def set_examples(draft: Draft, layout: Layout | None) -> None:
    """Set template, loss mask and encoding as TRL's trainer does. layout: None if no record could be read."""
    set_learned(draft, layout)
    texts, seen = layout in ("text", "pairs"), layout is not None
    set_template(draft, template_settings(draft), texts=texts, seen=seen, selected=bool(selected_columns(draft)))
    if draft["dataset_kwargs"] and draft["dataset_kwargs"].get("skip_prepare_dataset"):
        draft.refuse(
            "dataset_kwargs", "skip_prepare_dataset: the records are tokens already", "use data.format: tokens"
        )
    draft.drop("TRL reads only skip_prepare_dataset", "dataset_kwargs")
    draft.set("data.encoding", "whole", why="TRL tokenizes prompt and answer in one piece, and truncates at the end")


def template_settings(draft: Draft) -> list[str]:
    """Return the given settings that name or hold a template; the first takes precedence."""
    return [name for name in ("chat_template", "chat_template_path") if name in draft.rows and draft[name]]


def set_template(draft: Draft, names: Sequence[str] = (), *, texts: bool, seen: bool, selected: bool = False) -> None:
    """Set data.template and BOS.

    names: see `template_settings`.
    texts: whether the records are known to be plain texts.
    seen: whether a record could be read.
    selected: whether the data's settings select columns, which by-record does not know.
    """
    name = next(iter(names), "")
    if name == "chat_template_path" and not draft[name].endswith(".jinja"):
        draft.refuse(name, "surefoot reads a .jinja file", "write the template to one")
    elif name and not texts:
        draft.set("data.template", draft[name], name, why="" if seen else _TEMPLATE)
    elif selected:
        draft.set("data.template", OWN, why="for conversations; TRL uses no template for texts")
    else:
        draft.set(
            "data.template", BY_RECORD, why="TRL uses texts as they are and renders conversations with a template"
        )
    draft.drop("texts use no template" if texts else f"{name} takes precedence", *names[0 if texts else 1 :])
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
        learned = "everything" if selected_columns(draft) else BY_RECORD
        draft.set("data.train_on", learned, "assistant_only_loss", why=_LEARNED)
    elif completions is None:
        draft.set("data.train_on", BY_RECORD, "assistant_only_loss", why=_LEARNED)
    else:
        masked = _MASKED if completions and layout is None else ""
        draft.set("data.train_on", "completion" if completions else "everything", *words, why=masked)
