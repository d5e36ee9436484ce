"""What `surefoot capture` prints: a line per layer, what is not finite, and how two captures differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.report.tables.numbers import four_digits, mean_of_known, number_table
from surefoot.system.messages import first_few

if TYPE_CHECKING:
    from rich.table import Table

_MOST_LAYERS = 40  # lines; index.json has all
_SHOWN = 3  # names in a warning
_NAME = 22  # characters of a name; the table then fits 80 columns


def layer_table(index: Mapping[str, Any]) -> Table:
    """The residual stream into each layer and the attention on the first position."""
    entries = {(entry["layer"], entry["kind"]): entry["statistics"] for entry in index["tensors"]}
    rows = []
    for layer in index["layers"][:_MOST_LAYERS]:
        stream, maps = entries[layer, "residual_in"], entries.get((layer, "attention"))
        rest = stream["rest"]
        row = [str(layer), four_digits(stream["first"]["norm"]), four_digits(rest["norm"] if rest else None)]
        rows.append(row + ([four_digits(maps["first_mass"])] if maps else []))
    heads = ["layer", "norm into it, first position", "the rest"]
    return number_table([*heads, *(["attention on the first"] if index["attention"] else [])], rows)


def warning_lines(index: Mapping[str, Any]) -> list[str]:
    """Loud ones: tensors with values that are no numbers."""
    lines = []
    for key, what in (
        ("non_finite", "hold values that are NaN or infinite"),
        ("overflown", f"have values beyond the largest {index['stored_as']} number, stored as infinite"),
    ):
        if names := index[key]:
            lines.append(f"NOT FINITE: {len(names)} tensors {what}: {first_few(names, _SHOWN)}")
    return lines


def difference_table(differences: Sequence[Any]) -> Table:
    """By kind and role, over the layers: how far the tensors are from the reference's."""
    groups: dict[str, list[Any]] = {}
    for one in differences:
        groups.setdefault(_group(one), []).append(one)
    rows = []
    for name, found in groups.items():
        worst = max(found, key=lambda one: one.relative or 0.0)
        rows.append(
            [
                _fitted(name),
                str(len(found)),
                str(sum(one.equal for one in found)),
                *(
                    four_digits(mean_of_known([getattr(one, key) for one in found]))
                    for key in ("relative", "first", "rest")
                ),
                _place_of(worst),
            ]
        )
    return number_table(
        ["tensor", "count", "equal", "|B-A|/|A|", "first position", "the rest", "largest"], rows, left=(0, 6)
    )


def _group(one: Any) -> str:
    """Role and kind; for what has no role, such as a norm, the module's own name."""
    if one.kind.startswith("residual"):
        return one.kind
    return f"{one.role or one.name.split('.')[-2]} {one.kind}"


def _fitted(name: str) -> str:
    """Cut in the middle: norms of one layer differ in how their names begin, tensors of one module in how they end."""
    if len(name) <= _NAME:
        return name
    kind = name.rpartition(" ")[2]
    tail = max(len(kind) + 5, _NAME // 3)
    return f"{name[: _NAME - 1 - tail]}…{name[-tail:]}"


def _place_of(worst: Any) -> str:
    """The largest difference and its layer; the row says of which tensor."""
    if not worst.relative:
        return "–"
    return four_digits(worst.relative) + ("" if worst.layer is None else f" in layer {worst.layer}")
