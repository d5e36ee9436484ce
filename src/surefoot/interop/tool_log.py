"""Print another tool's log lines, which its users search for.

A ToolLog formats them from facts of the run. A line that would not be true of this run is left out or reworded. A row
of the log is told on the screen once, by the tool's line if it has one; run.log has surefoot's, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config.schema import RunConfig


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that is ready to train.

    embedding: module name of the token embedding.
    bos: token id prepended to every example, None for none.
    pad, pad_id, added_rows: the PAD token, its id, and the number of rows added to the embedding for it.
    base, compute: dtypes of the frozen weights and of matrix products.
    attention: attention implementation.
    device: "cpu" or "cuda".
    ids, learned: token ids of the first training example, and which of them carry loss; same length.
    text, answer: that example decoded, and only its tokens that carry loss decoded.
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

    folder, files: the run folder and the names of its files.
    results: the content of all_results.json.
    """

    folder: str
    files: frozenset[str]
    results: Mapping[str, Any]


Lines = Sequence[str]


@dataclass(frozen=True)
class ToolLog:
    """What to print when.

    started: before anything is loaded.
    ready: before step 1.
    row: for every row of trainer_log.jsonl.
    finished: after the model is published; not after a stop.
    """

    started: Callable[[], Lines] = lambda: ()
    ready: Callable[[RunFacts], Lines] = lambda facts: ()
    row: Callable[[Mapping[str, Any]], Lines] = lambda row: ()
    finished: Callable[[End], Lines] = lambda end: ()


NO_LINES = ToolLog()


def trainer_row(row: Mapping[str, Any]) -> Lines:
    """Format a log row as transformers' Trainer does: a dict of measurements."""
    if "eval_loss" in row:
        accuracy = {"eval_accuracy": round(row["eval_accuracy"], 4)} if "eval_accuracy" in row else {}
        return [str({"eval_loss": _number(row["eval_loss"]), **accuracy, "epoch": round(row["epoch"], 2)})]
    measured = {"loss": _number(row["loss"]), "grad_norm": _number(row["grad_norm"])}
    return [str({**measured, "learning_rate": float(f"{row['lr']:.4g}"), "epoch": round(row["epoch"], 2)})]


def _number(value: float | None) -> float:
    """Round a value for the log; a non-finite loss is null in surefoot's log and nan in Trainer's."""
    return math.nan if value is None else round(value, 4)
