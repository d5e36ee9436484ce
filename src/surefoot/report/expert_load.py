"""expert_load.json: how many tokens each expert of a mixture of experts got in the run, by layer, and which got none.

An expert without tokens learns nothing, and its adapter keeps its initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAME = "expert_load.json"
_NAMED = 12  # experts without tokens in a row of the table


def load_record(load: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The file's content. load: counts of the whole run, by layer."""
    return {"tokens": {layer: list(counts) for layer, counts in load.items()}, "dead": dead_experts(load)}


def dead_experts(load: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Experts that got no token, by layer; layers without any are left out."""
    found = {layer: [number for number, count in enumerate(counts) if not count] for layer, counts in load.items()}
    return {layer: numbers for layer, numbers in found.items() if numbers}


def dead_caution(load: Mapping[str, Sequence[int]]) -> list[str]:
    """A caution at the end of a run about experts that learned nothing; empty if all got tokens."""
    dead = dead_experts(load)
    if not dead:
        return []
    count, of = sum(map(len, dead.values())), sum(map(len, load.values()))
    named = "; ".join(f"layer {layer}: {_some(numbers)}" for layer, numbers in list(dead.items())[:3])
    more = "; …" if len(dead) > 3 else ""
    return [
        f"{count:,} of {of:,} experts got no token in the whole run and learned nothing ({named}{more}): see {NAME}"
    ]


COLUMNS = ("layer", "experts", "least", "even share", "most", "without tokens")


def load_rows(load: Mapping[str, Sequence[int]]) -> list[tuple[str, ...]]:
    """One row per layer with a text for each of `COLUMNS`. Shares are of the tokens that the layer routed."""
    rows = []
    for layer, counts in load.items():
        total = sum(counts)
        if total:
            shares = (min(counts) / total, 1 / len(counts), max(counts) / total)
            idle = [number for number, count in enumerate(counts) if not count]
            rows.append((layer, str(len(counts)), *(f"{share:.2%}" for share in shares), _some(idle)))
    return rows


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
