"""trainer_log.jsonl: one row per logged step and per evaluation, made from reports and appended as it happens.

The first keys are those that readers of LLaMA-Factory logs know; the rest are surefoot's. A train row has `loss`, an
evaluation row `eval_loss`, never both. Floats keep every digit, so that two runs can be compared bit for bit without
TIMING_FIELDS. A non-finite number is null and named in `non_finite`: JSON has no NaN, and 0.0 would look like success.
`trainer_state` makes Hugging Face's trainer_state.json of the rows.

Flush the file before a checkpoint is published, because no row up to a checkpoint's step is ever written again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from surefoot.report import journal
from surefoot.report.pace import Timing, clock_text
from surefoot.training.report import EvalReport, StepReport, Unit

Row = dict[str, Any]

PROFILED = "profiled"  # key of a profiled step, whose time is not representative: "clocked" by part, or "traced"
TIMING_FIELDS = frozenset(
    {"elapsed_time", "remaining_time", "throughput", "supervised_throughput", "peak_memory", "eval_runtime", PROFILED}
)
"""Fields that depend on the clock and the machine. All others are equal in two equal runs, also across a resume."""


UNITS: tuple[Unit, ...] = get_args(Unit)
EVAL_FIELDS = (
    "eval_loss",
    "eval_perplexity",
    "eval_accuracy",
    *(f"eval_{unit}" for unit in UNITS),
    "eval_runtime",
)
"""The fixed fields of an evaluation row; the other eval_ fields are metrics."""


@dataclass(frozen=True)
class Position:
    """Position of a row in the run.

    epoch: passes over the data so far.
    total_tokens: real input tokens since step 1.
    total_weight: loss weight since step 1, counted in `unit`.
    """

    total_steps: int
    epoch: float
    total_tokens: int
    total_weight: int
    unit: Unit = "tokens"


def train_row(report: StepReport, position: Position, timing: Timing) -> Row:
    """The row of one optimizer step. `loss` is that step's own mean, not an average since the last row, which would
    depend on where a session began."""
    row: Row = {
        **_place(report.step, position),
        "loss": finite(report.loss),
        "lr": report.lr,
        "grad_norm": finite(report.grad_norm),
        "step_tokens": report.tokens,
        weight_field(position.unit): report.weight,
    }
    if report.non_finite:
        row["non_finite"] = report.non_finite
    if report.decision != "stepped":
        row["skipped"] = report.decision
    if report.scale is not None:
        row["scale"] = report.scale
    if report.traced or report.profile is not None:
        row[PROFILED] = "traced" if report.traced else "clocked"
    row |= {name: finite(value) for name, value in report.metrics.items()}
    return {**row, **_times(timing)}


def eval_row(report: EvalReport, position: Position, timing: Timing) -> Row:
    """The row of one evaluation, after `report.step` optimizer steps."""
    row: Row = {
        **_place(report.step, position),
        "eval_loss": finite(report.loss),
        **({} if report.perplexity is None else {"eval_perplexity": finite(report.perplexity)}),
        **({} if report.accuracy is None else {"eval_accuracy": report.accuracy}),
        f"eval_{report.unit}": report.weight,
        **{f"eval_{name}": finite(value) for name, value in report.metrics.items()},
    }
    numbers = {"loss": report.loss, **report.metrics}
    if (unfit := next((name for name, value in numbers.items() if not math.isfinite(value)), None)) is not None:
        row["non_finite"] = f"eval_{unfit}"
    row |= {name: [list(line) for line in table] for name, table in report.tables.items()}
    return {**row, "eval_runtime": round(report.seconds, 3), **_times(timing)}


def eval_report(row: Row) -> EvalReport:
    """Convert a row back to its evaluation: the inverse of `eval_row`. Non-finite values become NaN."""

    def value(key: str) -> float:
        return math.nan if row[key] is None else row[key]

    unit = unit_of([row])
    return EvalReport(
        row["current_steps"],
        value("eval_loss"),
        value("eval_perplexity") if "eval_perplexity" in row else None,
        row.get("eval_accuracy"),
        row[f"eval_{unit}"],
        row["eval_runtime"],
        {key.removeprefix("eval_"): value(key) for key in metric_fields(row)},
        unit=unit,
    )


def weight_field(unit: Unit) -> str:
    """The field of a train row with the loss weight of the step."""
    return "supervised_tokens" if unit == "tokens" else unit


def unit_of(rows: Sequence[Row]) -> Unit:
    """The unit that the losses of these rows are means over."""
    for row in rows:
        for unit in UNITS:
            if f"eval_{unit}" in row or weight_field(unit) in row:
                return unit
    return "tokens"


def metric_fields(row: Row) -> list[str]:
    return [key for key in row if key.startswith("eval_") and key not in EVAL_FIELDS]


def step_metrics(row: Row) -> list[str]:
    """Fields of a step that only this stage has."""
    return [key for key in row if key not in _TRAIN_FIELDS and key not in TIMING_FIELDS]


def without_timing(row: Row) -> Row:
    """The part of a row that must be equal in two equal runs."""
    return {key: value for key, value in row.items() if key not in TIMING_FIELDS}


def is_train_row(row: Row) -> bool:
    return "loss" in row


def is_eval_row(row: Row) -> bool:
    return "eval_loss" in row


def trainer_state(
    rows: Sequence[Row],
    *,
    step: int,
    total_steps: int,
    epoch: float,
    epochs: float,
    total_tokens: int,
    batch_size: int,
    log_every: int,
    best_step: int | None = None,
    best_value: float | None = None,
) -> Row:
    """Return trainer_state.json as transformers' TrainerState reads it.

    epochs: length of the whole run. The best checkpoint is named relative to the run folder, so the folder can be
        moved.
    """
    return {
        "best_global_step": best_step,
        "best_metric": best_value,
        "best_model_checkpoint": None if best_step is None else f"checkpoint-{best_step}",
        "epoch": round(epoch, 6),
        "global_step": step,
        "max_steps": total_steps,
        "num_train_epochs": math.ceil(epochs),
        "num_input_tokens_seen": total_tokens,
        "train_batch_size": batch_size,
        "logging_steps": log_every,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [_history_entry(row) for row in rows],
    }


def finite(value: float | None) -> float | None:
    """The value, or None if JSON cannot represent it."""
    return value if value is not None and math.isfinite(value) else None


def _place(step: int, position: Position) -> Row:
    return {
        "current_steps": step,
        "total_steps": position.total_steps,
        "epoch": round(position.epoch, 6),
        "percentage": round(100 * step / position.total_steps, 2),
        "total_tokens": position.total_tokens,
        f"total_{weight_field(position.unit)}": position.total_weight,
    }


def _times(timing: Timing) -> Row:
    times = {
        "elapsed_time": clock_text(timing.elapsed),
        "remaining_time": None if timing.remaining is None else clock_text(timing.remaining),
        "throughput": None if timing.throughput is None else round(timing.throughput, 2),
        "supervised_throughput": (
            None if timing.supervised_throughput is None else round(timing.supervised_throughput, 2)
        ),
        "peak_memory": timing.peak_memory,
    }
    return {key: value for key, value in times.items() if value is not None}


_TRAIN_FIELDS = frozenset(
    {
        *("current_steps", "total_steps", "epoch", "percentage", "total_tokens", "loss", "lr", "grad_norm"),
        *("step_tokens", "non_finite", "skipped", "scale"),
        *(name for unit in UNITS for name in (weight_field(unit), f"total_{weight_field(unit)}")),
    }
)
# surefoot's key -> transformers' key. No times, so that equal runs write equal files.
_TRAIN_NAMES = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate", "skipped": "skipped"}
_NOT_IN_HISTORY = frozenset({*(f"eval_{unit}" for unit in UNITS), "eval_runtime"})


def _history_entry(row: Row) -> Row:
    if is_train_row(row):
        values = {theirs: row[ours] for ours, theirs in _TRAIN_NAMES.items() if ours in row}
    else:
        values = {key: row[key] for key in row if key.startswith("eval_") and key not in _NOT_IN_HISTORY}
    extra = {"non_finite": row["non_finite"]} if "non_finite" in row else {}
    return {"step": row["current_steps"], "epoch": row["epoch"], **values, **extra}


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
