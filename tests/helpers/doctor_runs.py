"""Tiny runs for doctor: one without problems, and the same with a planted problem."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.config.schema import RunConfig
from surefoot.training.objective import LossSum

ROWS = [
    {"instruction": f"Say {word} {count} times.", "input": "", "output": " ".join([word] * count)}
    for word in ("one", "two", "heron", "sky", "tips")
    for count in (1, 2, 4, 9)
]


def clean_base(folder: Path, **changes: Any) -> Path:
    """Write a Llama whose generation stops at the token that ends its answers."""
    base = tiny_llama(folder, pad=True, **changes)
    path = base / "generation_config.json"
    settings = json.loads(path.read_text())
    settings["eos_token_id"] = [321, 329]  # <|end_of_text|>, <|eot_id|>
    path.write_text(json.dumps(settings))
    return base


def clean_run(folder: Path, base: Path, **changes: Any) -> RunConfig:
    """Write a run of twenty short examples, four per step. changes: sections of the config."""
    data = folder / "train.json"
    if not data.exists():
        data.write_text(json.dumps(ROWS))
    sections: dict[str, Any] = {
        "model": str(base),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(data), "max_length": 128},
        "batch": {"size": 4},
        "optim": {"lr": 1e-3},
        "duration": "20 steps",
        "output": str(folder / "out"),
    }
    return run_config(**sections | changes)


def with_task(one, **changes):
    """Return a prepared run with other parts of its task."""
    return replace(one, run=replace(one.run, task=replace(one.run.task, **changes)))


def plant_in_loss(one, change):
    """Return the objective with its loss changed by `change`."""
    objective = one.run.task.objective

    def changed(model, batch):
        out = objective(model, batch)
        return LossSum(change(out.loss, batch), out.sums)

    return with_task(one, objective=changed)
