"""Parts of a model that sees, besides its language model, by the names of its modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

Part = Literal["tower", "projector"]
PARTS: tuple[Part, ...] = ("tower", "projector")
TOWERS = ("vision_tower", "vision_model", "visual")
_PROJECTORS = ("multi_modal_projector", "embed_vision", "connector", "projector", "merger", "deepstack_merger_list")


def part_of(parameter: str) -> Part | None:
    """Return whether a parameter belongs to the vision tower or to the projector, which may be inside it; else None."""
    names = parameter.split(".")[:-1]
    if any(name in _PROJECTORS for name in names):
        return "projector"
    return "tower" if any(name in TOWERS for name in names) else None


def modules_of(part: Part, parameters: Collection[str]) -> tuple[str, ...]:
    """Return the outermost modules that contain only this part; lists are split into items, as PEFT cannot take them.

    parameters: names of all parameters of tower and projector.
    """
    others = {name for name in parameters if part_of(name) != part}
    found: dict[str, None] = {}
    for parameter in (name for name in parameters if part_of(name) == part):
        names = parameter.split(".")[:-1]
        words = TOWERS if part == "tower" else _PROJECTORS
        end = 1 + next(place for place, name in enumerate(names) if name in words)
        while end < len(names) and (names[end].isdigit() or _holds(names[:end], others)):
            end += 1
        found[".".join(names[:end])] = None
    return tuple(found)


def _holds(module: Sequence[str], parameters: Collection[str]) -> bool:
    return any(name.startswith(".".join(module) + ".") for name in parameters)
