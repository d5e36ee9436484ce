"""trainer_log.jsonl: one row per logged step and per evaluation, appended as it happens.

Half a line at the end, as a power failure can leave it, is dropped when reading and cut off on resume. Rows are handed
to the system at once, so a killed process loses none. `durable.flush` makes them survive a power failure too; it
belongs before a checkpoint is published, because no row up to a checkpoint's step is ever written again.
"""

from __future__ import annotations

import json
from pathlib import Path

from surefoot import durable
from surefoot.errors import Fault, IntegrityError
from surefoot.report.rows import Row, is_eval_row

NAME = "trainer_log.jsonl"


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file that `cut_to_step` has left whole."""
    durable.append_line(path, _json(row))


def read_rows(path: Path) -> list[Row]:
    """All rows, oldest first; none when there is no file. IntegrityError names the line that is no JSON object."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif line.endswith("\n"):
            raise IntegrityError(Fault(f"{path}:{number}", "is not a row of a training log", "delete this line"))
    return rows


def cut_to_step(path: Path, step: int, *, evaluated: bool) -> list[Row]:
    """Keep the rows up to `step` and return them; the file is replaced in one move.

    evaluated: whether the checkpoint was written after the evaluation of that very step. If it was not, that
    evaluation is done again, and its row must not stand there twice.
    """
    rows = read_rows(path)
    kept = [
        row
        for row in rows
        if row["current_steps"] < step or (row["current_steps"] == step and (evaluated or not is_eval_row(row)))
    ]
    durable.write_text(path, "".join(f"{_json(row)}\n" for row in kept))
    return kept


def _json(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
