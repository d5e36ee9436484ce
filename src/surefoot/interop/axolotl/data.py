"""Translate Axolotl's lists of datasets: their paths, splits, kinds of records and chat templates.

Facts: the dataset schema and the prompt strategies of Axolotl 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.families.templates import OWN, OWN_OR, find_row, is_jinja
from surefoot.interop.axolotl.back import ALPACA, FALLBACK, ITS_FIELDS, OF_A_FAMILY, TEMPLATES
from surefoot.interop.axolotl.layouts import FIELDS, read_layout
from surefoot.interop.axolotl.methods import method_of, stage_of
from surefoot.interop.draft import Draft
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import parse_split, short_sources
from surefoot.interop.translation import Note
from surefoot.interop.trl.data import set_template
from surefoot.system.locations import DATA_SUFFIXES
from surefoot.system.messages import did_you_mean

_OWN_INSTEAD = "the model's own template in place of Axolotl's for its family; surefoot data shows the text"
_ENDS = (
    "Axolotl learns the end of an answer only if it is EOS or one of eot_tokens, and no blanks that the template puts "
    "around the answer; surefoot always does"
)
_PIECES = "of a longer text each piece begins with the last token of the one before, and so learns its first"
_TEMPLATE_WORDS = ("chat_template", "chat_template_jinja")
_SHARDS = ("shards", "shards_idx")
_LISTED = ("ds_type", "trust_remote_code", "preprocess_shards", "input_format")
_WITHOUT = {**dict.fromkeys(_SHARDS, "as many of the shuffled records; the shuffle is surefoot's own"),
            "trust_remote_code": "surefoot runs no code of a data set", **dict.fromkeys(
    ("field_thinking", "template_thinking_key"), "thoughts in this field of an answer are learned")}  # fmt: skip
_SOURCE = {"name": "subset", "split": "split", "revision": "revision"}
_READ = ("path", "type", "data_files", *_TEMPLATE_WORDS, "conversation", "field", "field_messages")
_CONVERTED = ("message_field_role", "message_field_content", "message_property_mappings", "roles")
_TRAINED = ("roles_to_train", "train_on_eos", "train_on_eot")
_DROPPED = "drop_system_message"
_THOUGHTS = ("field_thinking", "template_thinking_key")  # thoughts in these fields of an answer are read and learned
_READ_THOUGHTS = ("thinking", "reasoning_content")
_ENTRY = (*_READ, *_SOURCE, *_CONVERTED, *_TRAINED, *_THOUGHTS, *_LISTED, *_SHARDS, _DROPPED)
_COMPARED = (*(key for key in _ENTRY if key not in (*_TRAINED, "field", _DROPPED)), *FIELDS)
PRETRAINING = "pretraining_dataset"
_TEXTS = ("path", "type", "data_files", "text_column", *_SOURCE, "ds_type", "trust_remote_code")
_FEWEST = 64  # tokens of a text on average, below which the first texts of a stream do not last for all steps
_USUAL_ROLES = {"human", "user", "gpt", "assistant", "model", "system", "tool", "ipython"}


class Sources:
    """A translated list of datasets: sources, their templates, and whether they are texts or conversations.

    stage: surefoot's stage for preference, judged or reward data; None for supervised data.
    """

    def __init__(self, draft: Draft, name: str, stage: str | None = None):
        self.draft, self.name, self.stage = draft, name, stage
        self.sources: list[Any] = []
        self.templates: list[str] = []
        self.bos = "tokenizer"  # bos.prepend for the templates
        self.kinds: set[str] = set()
        self.uses_chat_template = False
        self.uses_turns = False
        self.entries: list[dict[str, Any]] = []  # as they are in the config
        entries = [{"path": draft[name]}] if isinstance(draft[name], str) else draft[name]
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            draft.refuse(name, "expected a list of datasets, each with a path and a type")
            return
        self.entries = entries
        for number, entry in enumerate(entries):
            self._read(number, entry)

    def _read(self, number: int, entry: dict[str, Any]) -> None:
        given = {key: value for key, value in entry.items() if value is not None}
        known = _ENTRY if self.stage is None else _COMPARED
        known = _TEXTS if self.name == PRETRAINING else known
        for key in given:
            if key not in known:
                fix = did_you_mean(key, known, "surefoot does not support it; leave it out")
                self._refuse(number, key, "is not a dataset setting that surefoot supports", fix)
        for key in _THOUGHTS:
            if given.get(key, "thinking") not in _READ_THOUGHTS:
                what = f"surefoot reads thoughts from {' or '.join(_READ_THOUGHTS)}"
                self._refuse(number, key, what, "rename the field in the data")
        for key in (key for key in (*_LISTED, *_THOUGHTS, *_SHARDS) if key in given):
            word, where = f"{self.name}[{number}].{key}: {shown(given[key])}", self.draft.where(self.name)
            outcome, keys = ("changed", ("data.train",)) if key in _SHARDS else ("listed", ())
            self.draft.add_note(Note(word, outcome, keys, _WITHOUT.get(key, "affects loading only"), where))
        path = given.get("path")
        if not isinstance(path, str):
            self._refuse(number, "path", "is required", "give a file, a folder or a hub dataset")
            return
        source: dict[str, Any] = {"path": self._file(number, path, given)}
        source |= {ours: given[theirs] for theirs, ours in _SOURCE.items() if theirs in given}
        self._part(number, source)
        self._shard(number, given, source)
        if str(source["path"]).endswith(DATA_SUFFIXES):
            source.pop("split", None)  # a file has one split
        elif self.name == "test_datasets":
            source.setdefault("split", "test")  # Axolotl's default; surefoot's is the validation split, if there is one
        elif source.get("split") == "train":
            del source["split"]
        self._kind(number, given, source)
        self.sources.append(source)

    def _part(self, number: int, source: dict[str, Any]) -> None:
        """Translate `split: train[:N]` or a share to the split and the part of the source."""
        if "split" not in source:
            return
        try:
            source["split"], part = parse_split(str(source["split"]))
        except Refusal as refusal:
            self._refuse(number, "split", refusal.what, refusal.fix)
            return
        source |= part

    def _shard(self, number: int, given: Mapping[str, Any], source: dict[str, Any]) -> None:
        """Translate `shards` and `shards_idx`: one of so many equal parts, usually the first."""
        count, place = given.get("shards") or 1, given.get("shards_idx", 0)
        if not isinstance(count, int) or not isinstance(place, int) or not 0 <= place < count:
            self._refuse(number, "shards", f"expected numbers, shards_idx below shards, got {place} of {count}")
        elif count > 1 and ("share" in source or "max_samples" in source):
            self._refuse(number, "shards", "split selects a part already", "keep one")
        elif count > 1:
            of = [size for size in (place, 1, count - place - 1) if size]
            source["share"] = {"of": of, "take": 2 if place else 1}

    def _file(self, number: int, path: str, given: Mapping[str, Any]) -> str:
        """Return the data file: `path: json` with data_files names files, as in datasets.load_dataset."""
        files = given.get("data_files")
        if files is None:
            return path
        files = files if isinstance(files, list) else [files]
        word, where = f"{self.name}[{number}].path: {path}", self.draft.where(self.name)
        self.draft.add_note(Note(word, "listed", (), "data_files names the file", where))
        if len(files) != 1:
            self._refuse(number, "data_files", f"expected one file, got {len(files)}", "give each its own entry")
            return path
        return str(files[0])

    def _kind(self, number: int, given: Mapping[str, Any], source: dict[str, Any]) -> None:
        kind = given.get("type")
        if not isinstance(kind, str | dict | None):
            self._refuse(number, "type", f"expected a name or a layout of your own, got {shown(kind)}")
        elif self.stage == "grpo":
            if kind is not None:
                what = f"{shown(kind)} is code that changes the records"
                fix = "write what it makes into a file, with prompt and the fields of the rewards, and leave it out"
                self._refuse(number, "type", what, fix)
        elif self.stage is not None:
            self._compared(self.stage, number, given, source)
        elif isinstance(kind, str) and kind in ALPACA:
            source["format"] = "alpaca"
            if kind in ITS_FIELDS:
                source["columns"] = ITS_FIELDS[kind]
            if (self.draft.options.first(source["path"]) or {}).get("system"):
                source["drop_system"] = True  # these types do not read it
            self._conversations(ALPACA[kind])
        elif kind in ("chat_template", "chat_template.default"):
            self.uses_turns = True
            self._turns(number, given, source)
            self._conversations(self._chat_template(number, given))
            if self.draft["processor_type"] is None:  # a text with pictures is not encoded as a whole
                self.draft.set("data.encoding", "whole", why="Axolotl tokenizes a rendered conversation in one piece")
        elif kind == "completion" or self.name == PRETRAINING:
            source["format"] = "text"
            if (field := given.get("field" if kind == "completion" else "text_column", "text")) != "text":
                source["columns"] = {"text": field}
            self.kinds.add("texts")
        elif kind is None:
            source["format"] = "tokens"  # input_ids and labels, as the file has them
            self.kinds.add("tokens")
        else:
            fix = f"use chat_template, completion, {', '.join(ALPACA)}"
            self._refuse(number, "type", f"surefoot does not support the layout {shown(kind)} of Axolotl", fix)

    def _compared(self, stage: str, number: int, given: Mapping[str, Any], source: dict[str, Any]) -> None:
        """Translate an entry with preference pairs or judged answers."""
        source["format"] = "judged" if stage == "kto" else "preference"
        try:
            layout = read_layout(stage, given, orpo=self.draft["rl"] == "orpo")
        except Refusal as refusal:
            self._refuse(number, "type", refusal.what, refusal.fix)
            return
        self._layout(number, given)
        if layout.columns:
            source["columns"] = dict(layout.columns)
        self._conversations(layout.template or self._chat_template(number, given))

    def _chat_template(self, number: int, given: Mapping[str, Any]) -> str:
        """Return the template of the entry, else of the config."""
        own = _named_template(given)
        self.uses_chat_template |= not own
        return self._template(number, own or _configs_template(self.draft))

    def _layout(self, number: int, given: Mapping[str, Any]) -> tuple[str, str] | None:
        """Check roles and fields of turns. Returns the format that reads them and its field of turns, None for none."""
        mapping = self._mapping(number, given, "message_property_mappings")
        role = str(given.get("message_field_role") or mapping.get("role") or "role")
        content = str(given.get("message_field_content") or mapping.get("content") or "content")
        found = {"role content": ("messages", "messages"), "from value": ("sharegpt", "conversations")}
        if f"{role} {content}" not in found:
            what = f"no format reads turns with the fields {role} and {content}"
            self._refuse(number, "message_property_mappings", what, "rename them in the data")
        roles = self._mapping(number, given, "roles").values()
        listed = [name for names in roles for name in (names if isinstance(names, list) else [names])]
        if unusual := [name for name in listed if str(name) not in _USUAL_ROLES]:
            self._refuse(number, "roles", f"surefoot does not support the role {unusual[0]}", "rename it in the data")
        return found.get(f"{role} {content}")

    def _mapping(self, number: int, given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        mapping = given.get(key) or {}
        if not isinstance(mapping, dict):
            self._refuse(number, key, "is not a mapping", "write it as key: value")
            return {}
        return mapping

    def _turns(self, number: int, given: Mapping[str, Any], source: dict[str, Any]) -> None:
        if (layout := self._layout(number, given)) is None:
            return
        source["format"], usual = layout
        if given.get(_DROPPED):
            source["drop_system"] = True
        if (field := given.get("field_messages", "messages")) != usual:
            source["columns"] = {usual: field}
        if given.get("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
            self._refuse(
                number, "roles_to_train", "surefoot trains on assistant turns", "leave it out, or train_on_inputs"
            )
        for key in ("train_on_eos", "train_on_eot"):
            if given.get(key, "turn") not in ("turn", True):
                self._refuse(number, key, "surefoot trains on the end of every trained turn", "leave it out")

    def _template(self, number: int, requested: str) -> str:
        if _is_own(requested):
            return requested
        name = requested.removeprefix(FALLBACK)
        if name in OF_A_FAMILY and re.search(OF_A_FAMILY[name], str(self.draft["base_model"]).lower()):
            self.draft.note("chat_template", "changed", _OWN_INSTEAD)
            return OWN
        if name not in TEMPLATES:
            known = ", ".join(TEMPLATES)
            fix = f"use one of {known}; or chat_template: jinja, with its text or FILE.jinja in chat_template_jinja"
            self._refuse(
                number, "chat_template", f"surefoot has no equivalent of Axolotl's template {shown(name)}", fix
            )
            return OWN
        ours, bos = TEMPLATES[name]
        if requested != name:
            return f"{OWN_OR}{ours}"
        self.bos = bos
        return ours

    def _conversations(self, template: str) -> None:
        self.kinds.add("conversations")
        self.templates.append(template)

    def _refuse(self, number: int, key: str, what: str, fix: str = "") -> None:
        self.draft.refuse(self.name, f"[{number}].{key}: {what}", fix)


def _named_template(settings: Mapping[str, Any]) -> str:
    """Return the template of the config or of an entry: a name, a .jinja file, or Jinja's text; empty for none."""
    name, own = settings.get("chat_template"), settings.get("chat_template_jinja")
    return str(own if own and name in (None, "jinja") else name or "")


def _configs_template(draft: Draft) -> str:
    return _named_template({key: draft[key] for key in _TEMPLATE_WORDS}) or "tokenizer_default"


def _is_own(template: str) -> bool:
    return template.endswith(".jinja") or is_jinja(template)


def _first_texts(draft: Draft) -> int | None:
    """Return how many texts of a stream the steps need at most, if these have `_FEWEST` tokens on average."""
    steps, passes = draft["max_steps"], draft["gradient_accumulation_steps"]
    if not steps or steps < 1:
        draft.refuse("max_steps", f"{PRETRAINING} is a stream, whose end is not known", "give a number of steps")
        return None
    rows = steps * passes * draft["micro_batch_size"] * draft.processes
    return max(1, rows * draft["sequence_len"] // _FEWEST)


def _stream(draft: Draft) -> Sources:
    """Return the texts of pretraining_dataset, as many of them as the steps need."""
    found = Sources(draft, PRETRAINING)
    others = [entry for entry in found.entries if entry.get("type", "pretrain") not in ("pretrain", "completion")]
    if draft.given("datasets") or others:
        draft.refuse(PRETRAINING, "surefoot reads texts alone, of the type pretrain", "leave the other data out")
    count = _first_texts(draft)
    for source in found.sources:
        if not str(source["path"]).endswith(DATA_SUFFIXES):
            source |= {"streaming": True, "max_samples": count}
    return found


_STREAMED = (
    f"the first texts are read, enough for the steps if they have {_FEWEST} tokens on average, and shuffled whole; the "
    "pieces of a text that is too long overlap there, and each ends with EOS"
)


def _set_prompts(draft: Draft, sources: list[Any]) -> None:
    """Set the template of prompts: texts have none, conversations the config's or the tokenizer's."""
    record = draft.options.first(sources[0]["path"]) if sources else None
    if record is not None and isinstance(record.get("prompt"), str):
        draft.drop("texts use no template", *_TEMPLATE_WORDS)
        set_template(draft, texts=True, seen=True)
        return
    named = _configs_template(draft)
    own = named if _is_own(named) else TEMPLATES.get(named, ("",))[0]
    if not own:
        draft.refuse("chat_template", f"surefoot has no equivalent of Axolotl's template {named}", "use jinja with it")
    elif own == OWN:
        draft.drop("is the default", *_TEMPLATE_WORDS)
        set_template(draft, texts=False, seen=record is not None)
    else:
        why = "" if record is not None else "for conversations; texts use no template there"
        draft.set("data.template", own, *_TEMPLATE_WORDS, why=why)
        draft.set("bos.prepend", TEMPLATES.get(named, ("", "tokenizer"))[1], why="the chat template decides")


def _set_ends(draft: Draft, templates: list[str]) -> None:
    """Note eot_tokens: surefoot learns the end that the template writes behind an answer."""
    given, row = draft["eot_tokens"], find_row(templates[0]) if templates else None
    if not templates:
        draft.drop("is for chat_template", "eot_tokens")
    elif given is None:
        draft.assume("eot_tokens: EOS", _ENDS, "data.template")
    elif row is not None and row.stops and not set(row.stops) & set(given):
        what = f"the template ends an answer with {row.stops[0]}, not with {given[0]}"
        draft.refuse("eot_tokens", what, f"give {row.stops[0]}")
    else:
        draft.note("eot_tokens", "carried" if row is not None else "changed",
                   "the end that the template writes behind an answer is learned", "data.template")  # fmt: skip


def _set_chosen(draft: Draft, *, supervised: bool) -> None:
    """Set which examples are left out: with skip_prepare_dataset (pictures) Axolotl leaves out none."""
    why = "test_datasets keep theirs here" if draft.given("test_datasets") else ""
    prepared = not draft["skip_prepare_dataset"]
    reads = {"min_sample_len": prepared and supervised, "dataset_exact_deduplication": prepared}
    for name, is_read in reads.items():
        if is_read and draft[name]:
            draft.set(draft.rows[name].keys[0], draft[name], name, why=why)
        else:
            draft.drop("Axolotl does not read it here" if draft[name] else "is off or not set", name)


def set_data(draft: Draft) -> None:
    """Set data.train, data.eval, data.template and the stage."""
    method = method_of(draft)
    stage = None if method is None else stage_of(method)
    streams = draft.given(PRETRAINING)
    name = PRETRAINING if streams else "datasets"
    train = _stream(draft) if streams else Sources(draft, name, stage)
    kinds, templates = set(train.kinds), list(train.templates)
    rendered = train.uses_chat_template
    if draft.given("test_datasets"):
        test = Sources(draft, "test_datasets", stage)
        kinds, templates = kinds | test.kinds, [*templates, *test.templates]
        rendered |= test.uses_chat_template
        draft.set("data.eval", short_sources(test.sources), "test_datasets")
    if len(kinds) > 1:
        draft.refuse("datasets", "mixes plain texts and conversations", "train on one of the two")
    if len(set(templates)) > 1:
        what = f"a run has one template, but these need {', '.join(dict.fromkeys(templates))}"
        draft.refuse("datasets", what, "give all of them the same type, or train on one after the other")
    draft.set("stage", stage or ("pretrain" if kinds == {"texts"} else "sft"), *([name] if stage is None else []))
    draft.set("data.train", short_sources(train.sources), name, why=_STREAMED if streams else "")
    draft.note("streaming", "changed", "the data are read whole, and shuffled whole in every epoch")
    if kinds == {"texts"} and not streams:
        draft.note("sequence_len", "changed", _PIECES, "data.max_length")
    _set_chosen(draft, supervised=stage is None)
    if stage == "grpo":
        _set_prompts(draft, train.sources)
        return
    if stage is None and templates:
        draft.set("bos.prepend", train.bos, why="in Axolotl the chat template decides, or the tokenizer for alpaca")
    _set_ends(draft, templates if stage is None and train.uses_turns else [])
    draft.note("tokenizer_use_mistral_common", "changed" if draft["tokenizer_use_mistral_common"] else "listed",
               draft.rows["tokenizer_use_mistral_common"].about)  # fmt: skip
    if templates:
        draft.set("data.template", templates[0], "datasets", *(_TEMPLATE_WORDS if rendered else ()))
    if not rendered:
        draft.drop("no dataset uses it", *_TEMPLATE_WORDS)
