"""What trials drew and what came of it: a line of JSON for each as soon as it is over, and tables of their sums.

make soak SOAK="--records build/soak.jsonl"                  # keeps the lines; the tables are printed in any case
PYTHONPATH=tests python -m faults.records build/soak.jsonl   # the tables again, of all sessions that wrote there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Record:
    """part: the table. row: its line there. seed: None where nothing was drawn. seconds: of the processor. wrong: ""
    where all was right. counts: summed up; longest: the largest counts. drawn: what else would make it again."""

    part: str
    row: str
    seed: int | None = None
    seconds: float = 0.0
    wrong: str = ""
    trials: int = 1
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)


_kept: Path | None = None


def keep_in(path: Path | None) -> None:
    """From here on, of this process; None keeps nothing."""
    global _kept
    _kept = path


def add(record: Record) -> None:
    """One write to the end of the file: several processes may share it, and what is there outlives a broken session."""
    if _kept is not None:
        with _kept.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def tables(records: Iterable[Record]) -> list[str]:
    """Lines of Markdown: a table for each part in the order of their first records, a line for each of its rows."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(record.part, []).append(record)
    return [line for name, found in parts.items() for line in _table(name, found)]


def _table(name: str, records: list[Record]) -> list[str]:
    counts = list(dict.fromkeys(key for record in records for key in record.counts))
    longest = list(dict.fromkeys(key for record in records for key in record.longest))
    heads = [name, "trials", "wrong", *counts, *longest, "processor minutes"]
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(record.row, []).append(record)
    lines = [_line(row, found, counts, longest) for row, found in sorted(rows.items())]
    if len(rows) > 1:
        lines.append(_line("**all**", records, counts, longest))
    seeds = _seeds({record.seed for record in records if record.seed is not None})
    told = [f"- {record.row}: {record.wrong}" for record in records if record.wrong]
    return ["", f"{name}: {seeds}", "", _cells(heads), _cells(["---"] * len(heads)), *lines, *told]


def _line(row: str, records: Sequence[Record], counts: Sequence[str], longest: Sequence[str]) -> str:
    trials = sum(record.trials for record in records)
    wrong = sum(bool(record.wrong) for record in records)
    sums = [sum(record.counts.get(key, 0) for record in records) for key in counts]
    most = [max((record.longest.get(key, 0.0) for record in records), default=0.0) for key in longest]
    minutes = sum(record.seconds for record in records) / 60
    return _cells([row, trials, wrong, *sums, *(f"{value:.2f}" for value in most), f"{minutes:.2f}"])


def _cells(values: Sequence[object]) -> str:
    return f"| {' | '.join(str(value) for value in values)} |"


def _seeds(seeds: set[int]) -> str:
    """Runs of them by their ends."""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and runs[-1][-1] + 1 == seed:
            runs[-1][-1] = seed
        else:
            runs.append([seed, seed])
    return f"seeds {', '.join(f'{first} to {last}' for first, last in runs)}" if runs else "nothing drawn"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of the process that tells the results: where several share the tests out, they wrote to one file."""
    if _kept is not None:
        for line in tables(read(_kept)):
            terminalreporter.write_line(line)


if __name__ == "__main__":
    print("\n".join(tables(read(Path(sys.argv[1])))))
