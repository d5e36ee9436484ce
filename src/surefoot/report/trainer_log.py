"""trainer_log.jsonl: one row per logged step and per evaluation, appended as it happens.

Flush it before a checkpoint is published, because no row up to a checkpoint's step is ever written again.
"""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.report import journal
from surefoot.report.rows import Row, is_eval_row

NAME = "trainer_log.jsonl"
_CLOCK = re.compile(r"[0-9]{1,9}:[0-9]{2}:[0-9]{2}")
_NUMBERS = ("loss", "eval_loss", "lr", "grad_norm", "total_tokens", "step_tokens")


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file that `cut_to_step` has left without damage."""
    journal.append(path, row)


def read_rows(path: Path) -> list[Row]:
    """Return all rows, oldest first; empty if there is no file. Raises IntegrityError naming an invalid line."""
    return journal.read(path, "a row of a training log", _is_row)


def _is_row(record: journal.Record) -> bool:
    """Whether a resumed run can continue from this row."""
    numbers = (record.get(name) for name in _NUMBERS)
    return (
        type(record.get("current_steps")) is int
        and _CLOCK.fullmatch(str(record.get("elapsed_time", "0:00:00"))) is not None
        and all(number is None or (isinstance(number, int | float) and type(number) is not bool) for number in numbers)
    )


def stays(row: Row, step: int, evaluated: bool) -> bool:
    """Whether `cut_to_step` keeps a row."""
    at = row.get("current_steps", 0)
    return at < step or (at == step and (evaluated or not is_eval_row(row)))


def cut_to_step(path: Path, step: int, *, evaluated: bool) -> list[Row]:
    """Keep the rows up to `step` and return them; the file is replaced in one rename.

    evaluated: whether the checkpoint was written after that step's evaluation. If not, the evaluation is repeated, and
        its row must not appear twice.
    """
    kept = [row for row in read_rows(path) if stays(row, step, evaluated)]
    journal.rewrite(path, kept)
    return kept
