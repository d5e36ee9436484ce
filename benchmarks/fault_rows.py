"""What a row of the table of faults is, and the damage that several of them do. For `faults_elsewhere.py`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_trial import Trial

Act = Callable[[Trial], None]


@dataclass(frozen=True)
class Row:
    """ideal: what would be right. says: patterns that must all be in the output for the fault to count as named, in
    any tool's words. act: spoils what it gets, and trains."""

    fault: str
    ideal: str
    says: tuple[str, ...]
    act: Act


def make_table() -> tuple[list[Row], Callable[..., Callable[[Act], Act]]]:
    """An empty table, and the decorator `@row(fault, ideal, *says)` that puts functions into it."""
    rows: list[Row] = []

    def row(fault: str, ideal: str, *says: str) -> Callable[[Act], Act]:
        def put(act: Act) -> Act:
            rows.append(Row(fault, ideal, says, act))
            return act

        return put

    return rows, row


class _Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "ran")


def payload(trial: Trial) -> bytes:
    return pickle.dumps(_Payload(trial.marker))


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, at: int) -> None:
    """One bit of the byte at this place from the end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
