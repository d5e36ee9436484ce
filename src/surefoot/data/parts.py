"""A source once its files are tokenised, and its parts: what a run trains on, holds out, or leaves to other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from surefoot.data.dataset import TokenisedDataset, TokenisedFile
from surefoot.data.facts import SourceFacts
from surefoot.data.sources import SourceSpec
from surefoot.data.split import part_of, split
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Loaded:
    """One source: its files, each with its facts."""

    spec: SourceSpec
    name: str
    files: tuple[tuple[TokenisedFile, SourceFacts], ...]
    examples: TokenisedDataset


def held_out_of(loaded: Sequence[Loaded], held_out: int | float, seed: int) -> tuple[list[Loaded], list[Loaded]]:
    """The sources without what is held out, and that. Whole records are: of a text in several examples all or none,
    else a model would be asked for the end of what it has learned the beginning of."""
    kept, taken = [], []
    records = [one.examples.records() for one in loaded]
    try:
        halves = split([int(places[-1]) + 1 for places in records], held_out, seed)
    except InputError as error:
        raise InputError([replace(fault, what=fault.what + _left_out(loaded)) for fault in error.faults]) from None
    for one, places, (train, evaluation) in zip(loaded, records, halves, strict=True):
        if not len(evaluation):
            kept.append(one)
            continue
        count = f"{len(evaluation)} held out"
        kept.append(_with_part(one, np.flatnonzero(np.isin(places, train)), f"without {count} for evaluation"))
        part = np.flatnonzero(np.isin(places, evaluation))
        taken.append(_with_part(one, part, f"{count} by the seed", forget=True))
    return kept, taken


def _left_out(loaded: Sequence[Loaded]) -> str:
    """Why there are fewer records than the files hold, for the end of a sentence."""
    facts = [facts for one in loaded for _, facts in one.files]
    rows, used = sum(one.rows for one in facts), sum(one.used for one in facts)
    dropped = sum(len(one.dropped) for one in facts)
    parts = [f"{rows - used:,} lie beyond max_samples"] if used < rows else []
    parts += [f"{dropped:,} have no label within max_length"] if dropped else []
    return f" (the files hold {rows:,}; {' and '.join(parts)})" if parts else ""


def shared(one: Loaded, seed: int) -> Loaded:
    """The source's part of its records, which are counted as they stand in the files: what cannot be learned in one run
    may be a prompt in the next."""
    if one.spec.share is None:
        return one
    of, take = one.spec.share
    counts = [facts.used for _, facts in one.files]
    chosen = part_of(sum(counts), of, take, seed)
    words = f"part {take} of {','.join(f'{size:g}' for size in of)}: {len(chosen):,} of {sum(counts):,} records"
    places, files = [], []
    for (file, facts), start in zip(one.files, np.cumsum([0, *counts]), strict=False):
        own = chosen[(chosen >= start) & (chosen < start + facts.used)] - start + 1
        places.append(np.isin(file.rows[:, 0], own))
        dropped = tuple(place for place in facts.dropped if place[1] in own)
        files.append((file, replace(facts, part=words, dropped=dropped)))
    found = replace(one, files=tuple(files), examples=one.examples.subset(np.flatnonzero(np.concatenate(places))))
    if not len(found.examples):
        what = f"{one.name} has nothing to learn in {words}"
        raise InputError(Fault("data.train.share", what, "take another part, or raise its size", code="SF-DATA-SHARES"))
    return found


def _with_part(one: Loaded, indices: np.ndarray, part: str, *, forget: bool = False) -> Loaded:
    """forget: what was said of the records was said of the other part already."""
    nothing = {"dropped": (), "unused": (), "notes": (), "placeholders": ()} if forget else {}
    files = tuple(
        (file, replace(facts, part="; ".join(filter(None, (facts.part, part))), **nothing)) for file, facts in one.files
    )
    return replace(one, files=files, examples=one.examples.subset(indices))
