#!/usr/bin/env python3
"""Try the BOS scaling with the small model that comes with surefoot: a few steps, offline, seconds on a CPU."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

RECORDS = [
    {"instruction": f"What is {one} and {other}?", "input": "", "output": f"{one + other}."}
    for one in range(4)
    for other in range(4)
]
WORDS = {
    "stage": "sft",
    "do_train": "true",
    "dataset": "sums",
    "template": "alpaca",
    "finetuning_type": "lora",
    "use_bos_zero_training": "true",
    "cutoff_len": "128",
    "per_device_train_batch_size": "4",
    "logging_steps": "1",
    "max_steps": "4",
    "learning_rate": "1e-3",
}


def shown(command: list[str]) -> int:
    """Run it and pass on what it prints, but for the files and commands of a folder that is gone at the end."""
    closing = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        for line in process.stdout or ():
            closing = line.startswith(("files in ", "next:")) or (closing and line[:1].isspace())
            if not closing:
                print(line, end="", flush=True)
    return process.returncode


def not_finite(run: Path) -> list[int]:
    """Steps whose loss or gradient was no finite number, which a run passes over; null in its log."""
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    if not steps:
        sys.exit(f"{run / 'trainer_log.jsonl'} holds no step")
    return [row["current_steps"] for row in steps if not all(_finite(row.get(name)) for name in ("loss", "grad_norm"))]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        resources.as_file(resources.files("surefoot.commands.quickstart")) as quickstart,
    ):
        folder = Path(name)
        (folder / "sums.json").write_text(json.dumps(RECORDS))
        (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
        for factor in ("0.1", "0.0"):
            print(f"--- bos_scaling_factor {factor}", flush=True)
            paths = {"model_name_or_path": quickstart / "base", "dataset_dir": folder, "output_dir": folder / factor}
            words = {**WORDS, **paths, "bos_scaling_factor": factor}
            flags = [f"--{key}={value}" for key, value in words.items()]
            command = [sys.executable, "-m", "surefoot", "run", "--", "llamafactory-cli", "train", *flags]
            if code := shown(command):
                sys.exit(code)
            if steps := not_finite(folder / factor):
                sys.exit(f"bos_scaling_factor {factor}: loss or gradient was not finite at steps {steps}")
    print("losses and gradients were finite at both factors")
