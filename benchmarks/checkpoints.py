"""What share of a run's time do checkpoints cost at the default interval?

    python benchmarks/checkpoints.py [--adapter lora full] [--size small] [--steps 12] [--every 4] [--keep FOLDER]

A run that saves every few steps and one that saves none but the last, both through the command line. When each step's
row appears in the log is watched from outside, and how much processor time the run has used by then: between two rows
lie a checkpoint that was begun behind the first and a step beside which it was finished. A checkpoint costs what such
steps take more than the others; the share is that cost in a whole default interval of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from bases import SIZES, build_base
from surefoot.config.schema import RunConfig
from surefoot.report.trainer_log import NAME

_LOOK = 0.01  # seconds between two looks
_FIRST = 2  # steps that are not counted
_BESIDE = 2  # steps behind a checkpoint that it may slow down
_NEVER = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--adapter", nargs="+", choices=["lora", "dora", "full"], default=["lora", "full"])
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Where the base is kept.")
    asked = parser.parse_args()
    if not asked.data.is_file():
        sys.exit(f"{asked.data}: no such file; name an alpaca .json with --data")
    if asked.every <= _BESIDE or asked.steps <= _FIRST + asked.every:
        sys.exit(f"--every: more than {_BESIDE}, and --steps more than {_FIRST} above it")
    with tempfile.TemporaryDirectory() as temporary:
        base = (asked.keep or Path(temporary)) / f"base-{asked.size}"
        if not base.is_dir():
            texts = [" ".join(record.values()) for record in json.loads(asked.data.read_text(encoding="utf-8"))]
            build_base(base, texts, SIZES[asked.size])
        for adapter in asked.adapter:
            show(adapter, Path(temporary), base, asked)


def show(adapter: str, folder: Path, base: Path, asked: argparse.Namespace) -> None:
    with_, without = (run(f"{adapter}-{every}", adapter, every, folder, base, asked) for every in (asked.every, _NEVER))
    size = sum(path.stat().st_size for path in (folder / f"{adapter}-{asked.every}").glob("checkpoint-*/*"))
    kept = len(list((folder / f"{adapter}-{asked.every}").glob("checkpoint-*")))
    interval = RunConfig.model_fields["checkpoint"].get_default(call_default_factory=True).every
    steps = int(str(interval).split()[0])
    print(
        f"\n{adapter}, {asked.size}, {asked.batch} examples a step, threads: {asked.threads}; a checkpoint has "
        f"{size / kept / 2**20:,.0f} MiB; the default interval is {interval}"
    )
    for name, at in (("wall", 0), ("processors", 1)):
        saving = [row[at] for row in with_]
        plain = statistics.median(row[at] for row in without[_FIRST - 1 :])
        costs = _costs(saving, asked.every, plain)
        cost = statistics.mean(costs)
        print(
            f"  {name:<10} a step without {plain:6.2f} s; a checkpoint costs {cost:6.2f} s "
            f"({min(costs):.2f} to {max(costs):.2f}), {cost / (steps * plain):.2%} of {steps} steps",
            flush=True,
        )


def _costs(intervals: list[float], every: int, plain: float) -> list[float]:
    """intervals: between the rows of two steps, the first one between those of steps 1 and 2. plain: of a step."""
    found = []
    for saved in range(every, len(intervals) + 1, every):
        behind = intervals[saved - 1 : saved - 1 + _BESIDE]
        if len(behind) == _BESIDE:
            found.append(sum(behind) - _BESIDE * plain)
    return found


def run(
    name: str, adapter: str, every: int, folder: Path, base: Path, asked: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds and processor seconds between the rows of each two steps."""
    lines = "" if adapter == "full" else f"adapter: {{kind: {adapter}, rank: 32}}\n"
    config = folder / f"{name}.yaml"
    config.write_text(
        f"stage: sft\nmodel: {base}\noutput: {folder / name}\nduration: {asked.steps} steps\n"
        f"data: {{train: {asked.data.resolve()}, max_length: 512, template: alpaca}}\nbatch: {{size: {asked.batch}}}\n"
        f"checkpoint: {{every: {every} steps}}\n{lines}"
    )
    command = [sys.executable, "-m", "surefoot", "train", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    with (folder / f"{name}.txt").open("w") as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        seen = _watched(child, folder / name / NAME)
    if child.returncode:
        sys.exit((folder / f"{name}.txt").read_text()[-2000:])
    return [(two[0] - one[0], two[1] - one[1]) for one, two in pairwise(seen)]


def _watched(child: subprocess.Popen, log: Path) -> list[tuple[float, float]]:
    """Wall and processor seconds at each new row of the log."""
    process, seen = psutil.Process(child.pid), list[tuple[float, float]]()
    while child.poll() is None:
        rows = log.read_bytes().count(b"\n") if log.is_file() else 0
        if rows > len(seen):
            times = process.cpu_times()
            seen += [(time.perf_counter(), times.user + times.system)] * (rows - len(seen))
        time.sleep(_LOOK)
    return seen


if __name__ == "__main__":
    main()
