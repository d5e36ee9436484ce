"""What ranks say to each other in the store when the run ends: who found which fault, and that they are done.

The first word counts, so that one fault is printed and all ranks leave with its code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LINGER = 5.0  # seconds that the rank with the store stays, so that the others can read why it ends
_FAULT = "fault"


@dataclass(frozen=True)
class Told:
    """A fault that ends the run: by which rank it was told, with which exit code, in which lines."""

    rank: int
    code: int
    lines: tuple[str, ...]

    def to_text(self) -> str:
        return json.dumps([self.rank, self.code, self.lines])

    @classmethod
    def from_bytes(cls, data: bytes) -> Told:
        rank, code, lines = json.loads(data)
        return cls(rank, code, tuple(lines))


def tell(store: Store, told: Told) -> Told:
    """Say a fault to all ranks; returns the one that was told first."""
    return Told.from_bytes(store.compare_set(_FAULT, "", told.to_text()))


def told_fault(store: Store) -> Told | None:
    """What some rank has told, if any."""
    return Told.from_bytes(store.get(_FAULT)) if store.check([_FAULT]) else None


def say_over(store: Store, rank: int, world: int, seconds: float) -> None:
    """This rank needs the store no longer. Rank 0, with which the store may go, waits for the others to say so."""
    store.set(f"over/{rank}", "")
    if rank == 0:
        store.wait([f"over/{other}" for other in range(world)], timedelta(seconds=seconds))
