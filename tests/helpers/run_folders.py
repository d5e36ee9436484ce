"""Handwritten run folders, made in milliseconds: the files that reports and the board read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.plans import run_plan
from surefoot.planning.plan import plan_to_json
from surefoot.report.events import append_event, append_samples
from surefoot.report.journal import append

NASTY = "</script><img src=x onerror=alert(1)>"


def train_row(step: int, total: int, loss: float | None) -> dict[str, Any]:
    row = {
        "current_steps": step,
        "total_steps": total,
        "loss": loss,
        "lr": 1e-3 / step,
        "grad_norm": None if loss is None else 0.5 + loss,
        "elapsed_time": "0:00:09",
        "remaining_time": "0:00:21",
        "throughput": 1000.0 + step,
        "supervised_throughput": 300.0 + step,
        "peak_memory": 5 * 10**8 + step,
    }
    return row if loss is not None else {**row, "non_finite": "loss", "skipped": "non_finite"}


def eval_row(step: int, total: int, loss: float) -> dict[str, Any]:
    return {
        "current_steps": step,
        "total_steps": total,
        "eval_loss": loss,
        "eval_perplexity": 2.0,
        "eval_accuracy": 0.5,
        "eval_tokens": 40,
        "eval_runtime": 0.1,
    }


def log_rows(steps: int, total: int | None = None, *, bad: Sequence[int] = (), evaluate: int = 10) -> list[dict]:
    """Return rows with a falling loss. bad: steps with a non-finite loss. evaluate: steps between evaluations."""
    rows = []
    for step in range(1, steps + 1):
        rows.append(train_row(step, total or steps, None if step in bad else 0.2 + 4.0 / step))
        if step % evaluate == 0:
            rows.append(eval_row(step, total or steps, 0.3 + 4.0 / step))
    return rows


def audit(name: str = "train.json") -> dict[str, Any]:
    parts = [("<|begin|>", False, True), ("Say heron.", False, False), (NASTY, True, False), ("<|end|>", True, True)]
    return {
        "file": name,
        "sha256": "0" * 64,
        "format": "alpaca",
        "format_reason": "asked for",
        "template": "tokenizer",
        "records": 8,
        "examples": 8,
        "dropped": 0,
        "truncated": 0,
        "tokens": 100,
        "supervised": 40,
        "supervised_share": 0.4,
        "length": {"shortest": 3, "median": 9, "p95": 12, "longest": 14},
        "bos": "<|begin|>",
        "pad": "<|pad|>",
        "stops": ["<|end|>"],
        "answers": 8,
        "answers_with_stop": 8,
        "cautions": [],
        "samples": [
            {
                "row": 1,
                "line": 2,
                "tokens": 9,
                "parts": [
                    {"text": text, "supervised": learned, "control": control} for text, learned, control in parts
                ],
            }
        ],
    }


def write_run(
    folder: Path,
    rows: Sequence[dict[str, Any]] = (),
    *,
    finished: bool = False,
    diverged: str = "",
    data: dict[str, Any] | None = None,
    config: str = "stage: sft\n",
) -> Path:
    """Write a run folder. diverged: the message of a diverged run."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(
        json.dumps({"plan": plan_to_json(run_plan(trainable=10, parameters=100)), "verified": {}})
    )
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"cpu": "a CPU", "threads": 1, "versions": {"surefoot": "0"}}))
    (folder / "data.json").write_text(json.dumps(data if data is not None else {"train": audit(), "eval": None}))
    (folder / "trainer_log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    append_event(folder, "start", 0, "started")
    last = rows[-1]["current_steps"] if rows else 0
    if rows:
        append_event(folder, "saved", last, f"saved checkpoint-{last}")
        append_samples(folder, last, [("Say heron.", NASTY)])
    if diverged:
        append_event(folder, "diverged", last, diverged)
    if finished:
        append_event(folder, "published", last, f"published the weights of step {last}")
        (folder / "all_results.json").write_text('{"train_loss": 0.25, "eval_accuracy": 0.5, "train_runtime": 9.0}')
        (folder / "MANIFEST.json").write_text("{}")
    return folder


def log_more(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        append(folder / "trainer_log.jsonl", row)
