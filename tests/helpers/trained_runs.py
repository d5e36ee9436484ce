"""A tiny model and eight records that repeat a word, trained from the command line, to test what a run writes."""

import json
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main


def heron_folder(folder: Path) -> Path:
    """Make a folder with `base` and `train.json`."""
    tiny_llama(folder / "base")
    rows = [{"instruction": f"Say {n}.", "output": "heron " * n} for n in range(1, 9)]
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


def heron_train(folder: Path, name: str, *arguments: str, **changes: Any) -> Result:
    """Train into `folder/name`, with dropout and two micro-batches per step.

    changes: sections of the config; None removes one.
    """
    return CliRunner().invoke(main, ["train", str(heron_config(folder, name, **changes)), *arguments])


def heron_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the YAML of that run."""
    config = {
        "stage": "sft",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1},
        "data": {"train": str(folder / "train.json"), "max_length": 128},
        "batch": {"size": 4, "micro": 2},
        "output": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (config | changes).items() if value is not None}))
    return path


def heron_trained(folder: Path, name: str, *arguments: str, **changes: Any) -> str:
    """Train like `heron_train`, require success, and return the output."""
    result = heron_train(folder, name, *arguments, **changes)
    assert result.exit_code == 0, result.output
    return result.output
