"""Does a resumed run have the step time and the memory of the uninterrupted one?

Trains the same steps twice, once straight through and once in two sessions, in turns, and compares the second half:
median real tokens/s per step and peak memory, from the runs' own logs.

    python benchmarks/resume_cost.py [--data FILE.json] [--steps 16] [--turns 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bases import Shape, build_base
from surefoot.report.trainer_log import NAME, is_train_row, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    texts = [" ".join(str(v) for v in row.values()) for row in json.loads(options.data.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build_base(folder / "base", texts, Shape(layers=6, hidden=384))
        speeds, memories = [], []
        for turn in range(options.turns):
            straight = train(options, folder, f"straight-{turn}", [options.steps])
            resumed = train(options, folder, f"resumed-{turn}", [options.steps // 2, options.steps])
            speeds.append(resumed[0] / straight[0])
            memories.append(resumed[1] / straight[1])
            print(
                f"turn {turn + 1}: straight {straight[0]:,.0f} tok/s, {straight[1] / 1e6:,.0f} MB; "
                f"resumed {resumed[0]:,.0f} tok/s, {resumed[1] / 1e6:,.0f} MB"
            )
    print(
        f"resumed / straight: speed {statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f}), "
        f"peak memory {statistics.median(memories):.2f}"
    )


def train(options: argparse.Namespace, folder: Path, name: str, ends: list[int]) -> tuple[float, int]:
    """Train to each step of `ends` in a session of its own; (median tokens/s, peak bytes) of the second half."""
    config = folder / f"{name}.yaml"
    config.write_text(
        f"stage: sft\nmodel: {folder / 'base'}\noutput: {folder / name}\nprecision: bf16\n"
        f"adapter: {{kind: lora, rank: 32}}\n"
        f"data: {{train: {options.data}, max_length: 512}}\nbatch: {{size: 8}}\n"
    )
    for end in ends:
        command = [sys.executable, "-m", "surefoot", "train", str(config), "--resume", f"duration={end} steps"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
    rows = [row for row in read_rows(folder / name / NAME) if is_train_row(row)]
    half = [row for row in rows if row["current_steps"] > options.steps // 2 + 1]
    return statistics.median(row["throughput"] for row in half), max(row["peak_memory"] for row in half)


if __name__ == "__main__":
    main()
