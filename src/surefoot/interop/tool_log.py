"""Log lines of another tool, which its users search a log for, printed beside surefoot's own.

A ToolLog makes them from facts of the run and reports nothing that the run did not do: where the other tool's line
would not be true here, it is left out or worded truly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config.schema import RunConfig


@dataclass(frozen=True)
class RunFacts:
    """A run that is set up.

    embedding: name of the token embedding among the model's modules.
    bos: id that stands before every example, None for none.
    pad, pad_id, added_rows: the PAD token, its id, and rows added to the embedding for it.
    base, compute: dtypes of the frozen weights and of the products.
    attention: the implementation.
    device: "cpu" or "cuda".
    ids, learned: the first training example, and which of its tokens carry loss.
    text, answer: that example decoded, and its learned tokens alone.
    """

    config: RunConfig
    embedding: str
    bos: int | None
    pad: str
    pad_id: int
    added_rows: int
    base: str
    compute: str
    attention: str
    device: str
    ids: tuple[int, ...]
    learned: tuple[bool, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class End:
    """A finished run.

    folder, files: of the run.
    results: what all_results.json holds.
    """

    folder: str
    files: frozenset[str]
    results: Mapping[str, Any]


Lines = Sequence[str]


@dataclass(frozen=True)
class ToolLog:
    """What to print at which moment.

    started: before anything is loaded.
    ready: before step 1.
    row: on every row of trainer_log.jsonl.
    finished: once the outcome is published; not after a stop.
    """

    started: Callable[[], Lines] = lambda: ()
    ready: Callable[[RunFacts], Lines] = lambda facts: ()
    row: Callable[[Mapping[str, Any]], Lines] = lambda row: ()
    finished: Callable[[End], Lines] = lambda end: ()


NO_LINES = ToolLog()


def trainer_row(row: Mapping[str, Any]) -> Lines:
    """Trainer's own lines: a dict of what was measured."""
    if "eval_loss" in row:
        accuracy = {"eval_accuracy": round(row["eval_accuracy"], 4)} if "eval_accuracy" in row else {}
        return [str({"eval_loss": _number(row["eval_loss"]), **accuracy, "epoch": round(row["epoch"], 2)})]
    rate = float(f"{row['lr']:.4g}")
    return [str({"loss": _number(row["loss"]), "learning_rate": rate, "epoch": round(row["epoch"], 2)})]


def _number(value: float | None) -> float:
    """A loss that is not finite is null in the log; Trainer prints nan."""
    return math.nan if value is None else round(value, 4)
