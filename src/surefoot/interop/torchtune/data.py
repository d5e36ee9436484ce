"""Translate torchtune's dataset builders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop.draft import Draft
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import counted, parse_split, short_sources
from surefoot.interop.torchtune.rows import family, last_name
from surefoot.interop.torchtune.vision import CAULDRON, FAMILY

_SETS = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_HUB = "HuggingFaceM4/the_cauldron"
_EVERY = ("_component_", "source", "data_files", "split", "name")
# Set of pairs -> (its default source, the folder of it that is read, field -> column)
_PAIRS: Mapping[str, tuple[str | None, str | None, Mapping[str, str]]] = {
    "stack_exchange_paired_dataset": (
        "lvwerra/stack-exchange-paired", "data/rl",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    ),
    "preference_dataset": (None, None, {}),
}  # fmt: skip
# Dataset -> the settings that it reads besides those of every dataset.
_READ: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_SETS, "instruct_dataset"), ("column_map", "train_on_input")),
    "chat_dataset": ("conversation_column", "conversation_style", "train_on_input"),
    "text_completion_dataset": ("column",),
    CAULDRON: ("column_map", "subset"),
    **dict.fromkeys(_PAIRS, ("column_map", "train_on_input")),
}
_ONCE = ("_component_", "train_on_input", "conversation_style")  # equal for training and validation
_STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}
_WHY_WRAPPED = "torchtune also wraps the prompt in the model's turn tokens"
_SYSTEM = "torchtune reads the turns alone, and surefoot the records' system texts too"
_BARE = "torchtune concatenates the texts between BOS and EOS"
# Model family -> (closest template to what torchtune's tokenizer writes around messages, the difference). Gemma's
# tokenizer writes nothing; the template of Llama 2 and Mistral can be turned off.
_LEARNS_HEADER = "in torchtune the header before an answer also carries loss; surefoot omits a masked EOS"
_LEARNS_BREAK = "in torchtune the header before an answer and the line break between turns also carry loss"
_OWN_PIXELS = (
    "tiles are resized by the model's own processor, in torchtune by torchvision; and tokens before the first picture "
    "read it, as in transformers"
)
_WHERE_PROMPTS_DO_NOT = (_LEARNS_HEADER, _LEARNS_BREAK)  # carry loss: else nothing differs
_CONVERTED = {
    "llama2": ("llama2", "in torchtune the blank after [/INST] belongs to the prompt"),
    "code_llama2": ("llama2", "in torchtune the blank after [/INST] belongs to the prompt"),
    "mistral": ("mistral", "in torchtune the blank after [/INST] belongs to the prompt"),
    "phi3": ("phi3", _LEARNS_HEADER),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2", "llama3_3"), ("llama3", _LEARNS_HEADER)),
    FAMILY: ("llama3", f"{_LEARNS_HEADER}; {_OWN_PIXELS}"),
    **dict.fromkeys(("qwen2", "qwen2_5", "qwen3"), ("torchtune-chatml", _LEARNS_BREAK)),
}


def set_data(draft: Draft) -> None:
    """Set data.train, data.eval and the stage."""
    _Dataset(draft, "dataset").set_train()
    every, names = draft["run_val_every_n_steps"], [name for name in draft.rows if name.startswith("dataset_val.")]
    if every is None or not draft["dataset_val._component_"]:
        draft.drop("without run_val_every_n_steps nothing is validated", "run_val_every_n_steps", *names)
        return
    other = [name for name in _ONCE if draft[f"dataset_val.{name}"] != draft[f"dataset.{name}"]]
    if other:
        what = f"{other[0]} is not that of the training data, and surefoot prepares both alike"
        draft.refuse(f"dataset_val.{other[0]}", what, "give both the same")
        return
    draft.set("eval_every", counted(every, "step"), "run_val_every_n_steps")
    evaluated = _Dataset(draft, "dataset_val")
    draft.set("data.eval", short_sources([evaluated.source()]), *evaluated.read())
    draft.drop(f"{evaluated.kind} does not read it", *evaluated.unread())


class _Dataset:
    """One of torchtune's dataset builders. group: dataset or dataset_val."""

    def __init__(self, draft: Draft, group: str):
        self.draft, self.group = draft, group
        self.kind = last_name(self["_component_"])

    def __getitem__(self, name: str) -> Any:
        return self.draft[f"{self.group}.{name}"]

    def read(self) -> list[str]:
        """Return the settings that this kind of dataset reads."""
        return [f"{self.group}.{name}" for name in (*_EVERY, *_READ.get(self.kind, ()))]

    def unread(self) -> list[str]:
        every = dict.fromkeys(name for names in _READ.values() for name in names)
        return [name for name in (f"{self.group}.{name}" for name in every) if name not in self.read()]

    def set_train(self) -> None:
        draft, kind = self.draft, self.kind
        if kind not in _READ:
            fix = f"use {', '.join(list(_READ)[:-1])} or {list(_READ)[-1]}"
            what = f"surefoot does not support {kind or 'a dataset without a component'}"
            draft.refuse("dataset._component_", what, fix)
            draft.drop("the dataset is not supported", *self.read(), *self.unread())
            return
        stage = "dpo" if kind in _PAIRS else "pretrain" if kind == "text_completion_dataset" else "sft"
        draft.set("stage", stage, "dataset._component_")
        whole_prompt = self["train_on_input"]
        if kind in _SETS:
            whole_prompt = True if whole_prompt is None else whole_prompt
        if kind != "text_completion_dataset":
            _set_turns(draft, alpaca=kind in _SETS, whole=bool(whole_prompt))
        if draft.written("stage") == "sft":
            usual = "torchtune's default for this dataset" if self["train_on_input"] is None else ""
            train_on = "everything" if whole_prompt else "responses"
            draft.set("data.train_on", train_on, "dataset.train_on_input", why=usual)
        elif stage == "dpo" and whole_prompt:
            draft.refuse("dataset.train_on_input", "surefoot compares answers alone", "leave it out")
        decided = (name for name in self.read() if name != "dataset.train_on_input")
        source = self.source()
        record = draft.options.first(source["path"]) if kind == "chat_dataset" and source["path"] else None
        why = _SYSTEM if record and "system" in record else ""
        draft.set("data.train", short_sources([source]), *decided, why=why)
        draft.drop(f"{kind} does not read it", *self.unread())

    def source(self) -> dict[str, Any]:
        """Return the source with its format, columns and part."""
        of_pairs = _PAIRS.get(self.kind, (None, None, {}))
        usual = _HUB if self.kind == CAULDRON else _SETS.get(self.kind) or of_pairs[0]
        path, files, part = self["source"] or usual, self["data_files"], {}
        split = str(self["split"])
        if path is None:
            self.draft.refuse(f"{self.group}.source", "is required", "name a dataset")
        try:
            split, part = parse_split(split)
        except Refusal as refusal:
            self.draft.refuse(f"{self.group}.split", refusal.what, refusal.fix)
        if files is not None:
            return {"path": files, **self._layout(), **part}
        below = (self["subset"] if self.kind == CAULDRON else self["name"]) or of_pairs[1]
        if path == _HUB and not below:
            self.draft.refuse(f"{self.group}.subset", "is required: torchtune's default does not exist", "name one")
        subset = {"subset": below} if below else {}
        # surefoot evaluates on a validation or test split, and torchtune on the split that is named.
        named = {"split": split} if split != "train" or self.group == "dataset_val" else {}
        return {"path": path, **subset, **named, **self._layout(), **part}

    def _layout(self) -> dict[str, Any]:
        """Return format and columns."""
        if self.kind == "text_completion_dataset":
            return {"format": "text", **_renamed({"text": self["column"]})}
        if self.kind == CAULDRON:
            return {"format": "cauldron", **_renamed(self["column_map"] or {})}
        if self.kind in _PAIRS:
            return {"format": "preference", **_renamed(self["column_map"] or _PAIRS[self.kind][2])}
        if self.kind != "chat_dataset":
            usual = {"input": "prompt", "output": "completion"} if self.kind == "instruct_dataset" else {}
            pairs = {name: name for name in usual} | (self["column_map"] or {})
            layout = "prompt-completion" if usual else "alpaca"  # which has an input beside the instruction
            return {"format": layout, **_renamed({usual.get(name, name): own for name, own in pairs.items()})}
        style = self["conversation_style"]
        if style not in _STYLES:
            what = f"torchtune has no {shown(style)}"
            self.draft.refuse(f"{self.group}.conversation_style", what, "use sharegpt or openai")
            return {}
        layout, usual = _STYLES[style]
        return {"format": layout, **_renamed({usual: self["conversation_column"] or usual})}


def _renamed(columns: Mapping[str, str]) -> dict[str, Any]:
    """Return `columns` of a source: the fields with another name in the file."""
    renamed = {field: own for field, own in columns.items() if field != own}
    return {"columns": renamed} if renamed else {}


def _family(draft: Draft) -> str:
    return family(draft["tokenizer._component_"] or draft["model._component_"])


def _is_bare(draft: Draft) -> bool:
    """Return whether the tokenizer adds nothing around messages."""
    left_out = bool(draft.where("tokenizer.prompt_template"))  # null: other values are refused
    return _family(draft).startswith("gemma") or (left_out and _family(draft) in ("llama2", "code_llama2", "mistral"))


def _set_turns(draft: Draft, *, alpaca: bool, whole: bool) -> None:
    """Set data.template. alpaca: messages are Alpaca's prompts. whole: they carry loss."""
    if _is_bare(draft):
        draft.set("data.template", "alpaca" if alpaca else "raw", "dataset._component_", "tokenizer.prompt_template")
        draft.set("bos.prepend", "on", why=_BARE)
    elif (found := _CONVERTED.get(_family(draft))) is not None:
        name, why = found
        name = f"torchtune-alpaca-{name.removeprefix('torchtune-')}" if alpaca else name
        told = "" if whole and why in _WHERE_PROMPTS_DO_NOT else why
        draft.set("data.template", name, "dataset._component_", why=told)
    elif alpaca:
        draft.set("data.template", "alpaca", "dataset._component_", why=_WHY_WRAPPED)
    else:
        what = f"surefoot does not know torchtune's message format for {_family(draft)}"
        draft.refuse("dataset._component_", what, "use alpaca_dataset or text_completion_dataset")
