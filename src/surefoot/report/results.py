"""train_results.json, eval_results.json and all_results.json, with the key names of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.report.trainer_log import Row, finite, weight_field
from surefoot.system import durable
from surefoot.training.report import EvalReport, Unit
from surefoot.training.state import BEFORE_FIRST_STEP, OVERHEADS

TRAIN, EVAL, ALL = "train_results.json", "eval_results.json", "all_results.json"
STEP_RATE = "steps_tokens_per_second"  # over the time in steps only


def train_results(
    *,
    loss: float | None,
    steps: int,
    epoch: float,
    examples: int,
    tokens: int,
    supervised: int,
    skipped: int,
    scaler_skips: int,
    rollbacks: int = 0,
    seconds: float,
    beside: Mapping[str, float],
    unit: Unit = "tokens",
) -> dict[str, Any]:
    """The content of train_results.json. Counts and seconds cover all sessions, without steps that were rolled back.

    loss: mean over everything that was learned from.
    supervised: how much that is, in `unit`.
    rollbacks: number of rollbacks.
    seconds: time in steps.
    beside: time outside of steps, see `RunState`.

    `train_runtime` and the rates per second are defined as in Hugging Face's Trainer: from the first step to the last
    checkpoint, including evaluations and saving. `whole_runtime` also includes the set-up.
    """
    # Hugging Face's Trainer counts evaluation and saving as training time; these names follow it.
    whole = seconds + sum(beside.values())
    training = whole - sum(beside.get(what, 0.0) for what in BEFORE_FIRST_STEP)
    return {
        "epoch": round(epoch, 6),
        "train_loss": loss,
        "train_steps": steps,
        "train_examples": examples,
        "train_tokens": tokens,
        f"train_{weight_field(unit)}": supervised,
        "skipped_steps": skipped,
        "scaler_skipped_steps": scaler_skips,
        **({"rollbacks": rollbacks} if rollbacks else {}),
        "train_runtime": round(training, 3),
        "train_steps_per_second": _rate(steps, training),
        "train_samples_per_second": _rate(examples, training),
        "train_tokens_per_second": _rate(tokens, training),
        "whole_runtime": round(whole, 3),
        "steps_runtime": round(seconds, 3),
        **{f"{what.replace('-', '')}_runtime": round(beside.get(what, 0.0), 3) for what in OVERHEADS},
        STEP_RATE: _rate(tokens, seconds),
    }


def eval_results(report: EvalReport, epoch: float) -> dict[str, Any]:
    """The content of eval_results.json; loss and accuracy are means over the unit, accuracy is between 0 and 1. Metrics
    have their own keys."""
    return {
        "epoch": round(epoch, 6),
        "eval_step": report.step,
        "eval_loss": finite(report.loss),
        **({} if report.accuracy is None else {"eval_accuracy": report.accuracy}),
        **({} if report.perplexity is None else {"perplexity": finite(report.perplexity)}),
        **{f"eval_{name}": finite(value) for name, value in report.metrics.items()},
        f"eval_{report.unit}": report.weight,
        "eval_runtime": round(report.seconds, 3),
    }


ROLLOUT = ("reward", "kl", "response_length")  # the main figures of a rollout; grpo has no kl without a reference


def rollout_results(rows: Sequence[Row]) -> dict[str, Any]:
    """First and last logged rollout of stages ppo and grpo; empty for other stages."""
    rollouts = [row for row in rows if row.get("reward") is not None]
    ends = {"first": rollouts[0], "last": rollouts[-1]} if rollouts else {}
    return {
        f"train_{when}_{name}": row[name] for when, row in ends.items() for name in ROLLOUT if row.get(name) is not None
    }


def write_results(
    run: Path, train: Mapping[str, Any], evaluation: Mapping[str, Any] | None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the files and return the content of all_results.json. more: further figures for all_results.json only."""
    durable.write_json(run / TRAIN, train)
    if evaluation is not None:
        durable.write_json(run / EVAL, evaluation)
    together = {**(evaluation or {}), **train, **(more or {})}
    durable.write_json(run / ALL, together)
    return together


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None
