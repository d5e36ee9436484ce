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
Collate = Callable[[list[Any]], Mapping[str, Any]]


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


def collated(rows: Any, collate: Collate, places: list[int]) -> Mapping[str, Any]:
    """Return the batch of these rows; collators may change the rows that they are given."""
    return collate([copy.deepcopy(rows[place]) for place in places])


def write_rows(path: Path, rows: Any, collate: Collate) -> Written:
    """Write each row, collated alone and without its padding."""
    written = Written()
    with replacing(path) as file:
        for place in range(len(rows)):
            row, fault = row_of(_as_lists(collated(rows, collate, [place])))
            if fault:
                written.fault = f"row {place + 1} {fault}"
                break
            if not any(label != NO_LABEL for label in row["labels"][1:]):
                written.empty += 1
                continue
            written.places.append(place)
            written.longest = max(written.longest, len(row["input_ids"]))
            file.write(json.dumps(row) + "\n")
    return written


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


def row_of(batch: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the row of a batch of one, and what is wrong with it."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, list) or len(ids) != 1 or not isinstance(labels, list):
        return {}, "the collator returns no input_ids and labels of one row"
    ids, labels = ids[0], labels[0]
    if len(labels) != len(ids):
        return {}, f"has {len(ids)} tokens and {len(labels)} labels"
    for name, value in batch.items():
        if name in ("input_ids", "labels", "attention_mask") or value is None:
            continue
        if name == "position_ids":
            if value[0] != list(range(len(ids))):
                return {}, "holds several texts in one row (packing); leave packing off, surefoot packs exactly"
        elif name == "token_type_ids":
            if any(value[0]):
                return {}, "has token types"
        else:
            return {}, f"has {name}, which surefoot does not pass to the model"
    kept = batch.get("attention_mask", [[1] * len(ids)])[0]
    if not isinstance(kept, list) or len(kept) != len(ids):
        return {}, "has an attention mask of another shape than its tokens"
    tokens = [(number, label) for number, label, keep in zip(ids, labels, kept, strict=True) if keep]
    for place, (number, label) in enumerate(tokens):
        if label not in (NO_LABEL, number):
            return {}, f"has the label {label} at token {place + 1}, whose id is {number}"
    return {"input_ids": [one for one, _ in tokens], "labels": [one for _, one in tokens]}, ""


def _as_lists(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}
