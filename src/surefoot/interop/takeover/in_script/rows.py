"""Turn the trainer's collated batches into rows of token ids and labels."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import replacing

NO_LABEL = -100
_TRIED = 8  # rows that are collated twice
PAIR = ("chosen", "rejected")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # follow from position_ids
_MASK = "attention_mask"
Collate = Callable[[list[Any]], Mapping[str, Any]]
Found = tuple[dict[str, Any], str]
"""A record for surefoot, and what is wrong with it, "" for nothing."""
Read = Callable[[Mapping[str, Any]], Found]
"""From the batch of one example, as lists, to its record."""


class Written:
    """Rows that were written.

    places: index in the data set of each.
    longest: tokens of the longest one.
    empty: number of rows left out, because they have no label.
    fault: what is wrong with the first row that cannot be taken; nothing after it was written.
    """

    def __init__(self) -> None:
        self.places: list[int] = []
        self.longest = self.empty = 0
        self.fault = ""


_LENGTHS = "seq_lengths"  # of the texts in a packed row of TRL


def is_packed(rows: Any) -> bool:
    return len(rows) > 0 and isinstance(rows[0], Mapping) and _LENGTHS in rows[0]


class Documents:
    """The texts of packed rows, one by one."""

    def __init__(self, rows: Any):
        self._rows, self._places = rows, []
        for place in range(len(rows)):
            end = 0
            for length in rows[place][_LENGTHS]:
                self._places.append((place, end, end + length))
                end += length

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        place, start, end = self._places[number]
        row = self._rows[place]
        tokens = sum(row[_LENGTHS])
        part = {
            name: value[start:end] if isinstance(value, list) and len(value) == tokens else value
            for name, value in row.items()
        }
        return {**part, _LENGTHS: [end - start]}


def collated(rows: Any, collate: Collate, places: list[int]) -> Mapping[str, Any]:
    """Return the batch of these rows; collators may change the rows that they are given."""
    return collate([copy.deepcopy(rows[place]) for place in places])


def without_led(batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the batch without the labels of tokens that padding precedes, and how many there were: a model learns to
    predict them from padding, in the rows that are shorter than others."""
    found, led = dict(batch), 0
    if hasattr(found.get("labels"), "clone") and getattr(found.get(_MASK), "shape", None) == found["labels"].shape:
        found["labels"] = found["labels"].clone()
        for labels, kept in zip(found["labels"], found[_MASK], strict=True):
            first = int(kept.ne(0).int().argmax())  # of several the first
            if first > 0 and kept[first] and labels[first] != NO_LABEL:
                labels[first] = NO_LABEL
                led += 1
    return found, led


def write_rows(path: Path, rows: Any, collate: Collate, read: Read) -> Written:
    """Write each row, collated alone and without its padding."""
    written = Written()
    with replacing(path) as file:
        for place in range(len(rows)):
            row, fault = read(_as_lists(collated(rows, collate, [place])))
            if fault:
                written.fault = f"row {place + 1} {fault}"
                break
            sides = [row[name] for name in PAIR] if PAIR[0] in row else [row]
            if not all(any(label != NO_LABEL for label in side["labels"][1:]) for side in sides):
                written.empty += 1
                continue
            written.places.append(place)
            written.longest = max(written.longest, *(len(side["input_ids"]) for side in sides))
            file.write(json.dumps(row) + "\n")
    return written


def write_prompts(path: Path, rows: Any) -> str:
    """Write the records of prompts as they are. Returns what is wrong with them, "" for nothing."""
    try:
        with replacing(path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:
        return f"has what JSON has not: {error}"
    return ""


def is_random(rows: Any, collate: Collate) -> bool:
    """Whether the same row gives other tokens or labels with another seed."""
    import torch

    for place in range(min(_TRIED, len(rows))):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            found.append(_as_lists(collated(rows, collate, [place])))
        if found[0] != found[1]:
            return True
    return False


def row_of(batch: Mapping[str, Any]) -> Found:
    """Return the row of a batch of one, as the format tokens."""
    if not isinstance(batch.get("labels"), list):
        return {}, "the collator returns no input_ids and labels of one row"
    return _row(batch, 0, 1, ("labels", "label"))  # a column label is for other models: none of text reads it


def pair_of(limit: int | None) -> Read:
    """Read the pair of a batch of one: the better row, then the worse one, as the format token-pairs.

    limit: tokens of prompt and answer, for versions of TRL that cut them in the model's pass.
    """

    def read(batch: Mapping[str, Any]) -> Found:
        if "chosen_labels" in batch:  # of TRL before 0.12
            return sides_of(batch)
        if not is_sided(batch):
            return _pair(batch)
        both = _joined(batch)
        longest = max(map(len, both["input_ids"]))
        if limit is not None and longest > limit:
            return {}, f"has {longest} tokens, and max_length is {limit}: this TRL cuts it only where it trains"
        return _pair(both)

    return read


def is_sided(batch: Mapping[str, Any]) -> bool:
    """Whether it is of DPO in TRL 0.12: columns for the prompt and for each answer. ORPO's answers have the prompt."""
    return "prompt_input_ids" in batch and "chosen_labels" not in batch


def _joined(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of TRL 0.12 as later versions have it: prompt and answer in one row, the better one first."""
    prompt, others = batch["prompt_input_ids"][0], {name for name in batch if not name.startswith(("prompt_", *PAIR))}
    answers = [batch[f"{name}_input_ids"][0] for name in PAIR]
    masks = [batch["prompt_attention_mask"][0] + batch[f"{name}_attention_mask"][0] for name in PAIR]
    return {
        "input_ids": [prompt + answer for answer in answers],
        _MASK: masks,
        "completion_mask": [[0] * len(prompt) + [1] * len(answer) for answer in answers],
        **{name: batch[name] for name in others},
    }


def _pair(batch: Mapping[str, Any]) -> Found:
    if not isinstance(batch.get("completion_mask"), list):
        return {}, "the collator returns no input_ids and completion_mask of two answers"
    return _two(batch, ("completion_mask", "ref_chosen_logps", "ref_rejected_logps"))


def sides_of(batch: Mapping[str, Any]) -> Found:
    """Return the pair of a batch of one in which each side has columns of its own, as TRL's for ORPO and CPO."""
    pair = {}
    for name in PAIR:
        columns = {column: batch.get(f"{name}_{column}") for column in ("input_ids", _MASK, "labels")}
        pair[name], fault = row_of(columns)
        if fault:
            return {}, fault
    return pair, ""


def scored_pair(pad: int | None) -> Read:
    """Read pairs whose scores are those of their last token other than PAD, as transformers' classifiers compute them.

    pad: id of PAD, which may also be the last token of an answer.
    """

    def read(batch: Mapping[str, Any]) -> Found:
        if batch.get("margin") is not None:
            return {}, "has a margin, which surefoot's loss does not have"
        if "input_ids_chosen" in batch:  # of TRL 0.12
            columns = {name: [batch[f"{name}_{side}"][0] for side in PAIR] for name in ("input_ids", _MASK)}
            batch = {**columns, **{name: one for name, one in batch.items() if not name.endswith(PAIR)}}
            batch.pop("return_loss", None)
        pair, fault = _two(batch, ())
        for side in pair.values():
            while len(side["input_ids"]) > 1 and side["input_ids"][-1] == pad:
                side["input_ids"].pop()
                side["labels"].pop()
        return pair, fault

    return read


def judged_of(batch: Mapping[str, Any]) -> Found:
    """Return the judged answer of a batch of one, as the format token-judged."""
    if not isinstance(batch.get("completion_mask"), list) or not isinstance(batch.get("label"), list):
        return {}, "the collator returns no input_ids, completion_mask and label of one answer"
    others = tuple(name for name in batch if name.startswith(("KL_", "ref_")))  # computed anew, from the whole step
    row, fault = _row(batch, 0, 1, ("completion_mask", "label", *others))
    return {**row, "label": bool(batch["label"][0])}, fault


def _two(batch: Mapping[str, Any], known: tuple[str, ...]) -> Found:
    pair = {}
    for place, name in enumerate(PAIR):
        pair[name], fault = _row(batch, place, 2, known)
        if fault:
            return {}, fault
    return pair, ""


def _row(batch: Mapping[str, Any], place: int, count: int, known: tuple[str, ...]) -> Found:
    """Return one row of a batch, with labels by labels or completion_mask, else for every token, and what is wrong with
    it.

    known: columns that may be there, beside ids, masks and positions.
    """
    all_ids = batch.get("input_ids")
    if not isinstance(all_ids, list) or len(all_ids) != count:
        return {}, f"the collator returns no input_ids of {count} rows"
    ids = all_ids[place]
    for name, value in batch.items():
        if name in ("input_ids", _MASK, *_BOUNDS, *known) or value is None:
            continue
        if name == "position_ids":
            if value[place] != list(range(len(ids))):
                return (
                    {},
                    "holds several texts, and does not say where each ends; leave packing off, surefoot packs exactly",
                )
        elif name == "token_type_ids":
            if any(value[place]):
                return {}, "has token types"
        else:
            return {}, f"has {name}, which surefoot does not pass to the model"
    labels = ids
    if "labels" in known:
        labels = batch["labels"][place]
    elif "completion_mask" in known:
        marks = batch["completion_mask"][place]
        labels = [number if mark else NO_LABEL for number, mark in zip(ids, marks, strict=True)]
    if len(labels) != len(ids):
        return {}, f"has {len(ids)} tokens and {len(labels)} labels"
    kept = batch[_MASK][place] if _MASK in batch else [1] * len(ids)
    if not isinstance(kept, list) or len(kept) != len(ids):
        return {}, "has an attention mask of another shape than its tokens"
    if any(label != NO_LABEL and not keep for label, keep in zip(labels, kept, strict=True)) and "labels" in known:
        return {}, "learns tokens that its attention mask hides, such as padding"
    tokens = [(number, label) for number, label, keep in zip(ids, labels, kept, strict=True) if keep]
    for at, (number, label) in enumerate(tokens):
        if label not in (NO_LABEL, number):
            return {}, f"has the label {label} at token {at + 1}, whose id is {number}"
    return {"input_ids": [one for one, _ in tokens], "labels": [one for _, one in tokens]}, ""


def _as_lists(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}
