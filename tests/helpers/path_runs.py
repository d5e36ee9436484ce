"""Short runs of a tiny Llama on growing records (`helpers.growing_records`) with `train_run`; readers for their numbers
and for what they report about fast paths.
"""

import io
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from helpers.model_layouts import run_config
from surefoot.config.schema import RunConfig
from surefoot.planning.plan import RunPlan, plan_from_json
from surefoot.report.console import Console
from surefoot.runs.output_folder import Mode
from surefoot.runs.run import train_run

WEIGHTS = "adapter_model.safetensors"


def path_config(
    workplace: Path,
    output: Path,
    *,
    rows: str = "rows.json",
    base: str = "base",
    data: Mapping[str, Any] | None = None,
    **sections: Any,
) -> RunConfig:
    """Return a config of two LoRA steps, with two micro-batches and a checkpoint each.

    rows, base: in the workplace.
    data: keys of that section besides train and max_length.
    sections: sections of the config; adapter=None: full fine-tuning.
    """
    usual = {
        "adapter": {"kind": "lora", "rank": 4},
        "duration": "2 steps",
        "batch": {"size": 4, "micro": 2},
        "checkpoint": {"every": "1 step", "keep": 2},
    }
    given = {"train": str(workplace / rows), "max_length": 64, **(data or {})}
    return run_config(model=str(workplace / base), data=given, output=str(output), **(usual | sections))


def start(config: RunConfig, mode: Mode = "new") -> str:
    """Run it to the end and return its output as one line."""
    screen = io.StringIO()
    assert train_run(config, mode, Console(screen)) == 0, screen.getvalue()
    return " ".join(screen.getvalue().split())


def fast_paths(run: Path) -> dict[str, dict[str, Any]]:
    """Return environment.json's record of each fast path."""
    [rank] = json.loads((run / "environment.json").read_text())["ranks"]
    return rank["fast_paths"]


def saved_plan(run: Path) -> RunPlan:
    return plan_from_json(json.loads((run / "plan.json").read_text())["plan"])


def losses(run: Path) -> list[float]:
    """Return the losses of all steps, followed by those of all evaluations."""
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row] + [row["eval_loss"] for row in rows if "eval_loss" in row]


def weights(run: Path, name: str = WEIGHTS) -> bytes:
    return (run / name).read_bytes()


def ends(run: Path, step: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return weights, moments and counts of the last step's checkpoint."""
    last = run / f"checkpoint-{step}"
    state = json.loads((last / "state.json").read_text())
    del state["seconds"], state["beside"]
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}, state


def forget(run: Path, steps: Iterable[int]) -> None:
    """Delete the checkpoints of these steps, as if the process had been killed before writing them."""
    for step in steps:
        shutil.rmtree(run / f"checkpoint-{step}")
    for name in ("train_results.json", "all_results.json"):
        (run / name).unlink(missing_ok=True)
