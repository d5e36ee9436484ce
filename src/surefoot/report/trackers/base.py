"""What a tracker is: started once with the facts of the run, given numbers by step, told how the run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from surefoot.report.rows import Row, is_eval_row

Status = Literal["finished", "stopped", "failed"]
Numbers = dict[str, float]

_PLACE = ("current_steps", "total_steps", "percentage")  # the step is handed over by itself


@dataclass(frozen=True)
class RunFacts:
    """run: its folder. config: flat, see `flat_config`. step: steps done before this session; 0 at a fresh start.
    run_id: under which the tracker knows the run from an earlier session; None for a new one."""

    run: Path
    project: str
    name: str
    offline: bool
    config: Mapping[str, str | int | float | bool]
    step: int
    run_id: str | None


class Tracker(Protocol):
    """An adapter to one library. Every method may raise and may take long: the caller stands in between."""

    def start(self, facts: RunFacts) -> str:
        """Open or reopen the run; returns the id under which a resumed run goes on."""
        ...

    def log(self, step: int, numbers: Numbers) -> None: ...
    def finish(self, status: Status) -> None: ...


def numbers_of(row: Row) -> tuple[int, Numbers]:
    """Step and numbers of a row of the training log, as "train/loss" and "eval/loss". What is null or text is left out:
    a value that was not finite is no number to plot."""
    part = "eval" if is_eval_row(row) else "train"
    numbers: Numbers = {
        f"{part}/{key.removeprefix('eval_')}": value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _PLACE
    }
    return row["current_steps"], numbers


def flat_config(config: Mapping[str, Any], group: str = "") -> dict[str, str | int | float | bool]:
    """{"optim": {"lr": 1e-4}} -> {"optim.lr": 1e-4}. Lists become text, null "none": not all trackers take them."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        key = f"{group}.{name}" if group else name
        if isinstance(value, Mapping):
            flat |= flat_config(value, key)
        elif isinstance(value, str | int | float | bool):
            flat[key] = value
        else:
            flat[key] = "none" if value is None else str(value)
    return flat
