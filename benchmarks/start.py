"""How long `surefoot train` takes until its first line and until step 1, in this checkout and in another one.

    python benchmarks/start.py CONFIG.yaml --rounds 5 --other ../before

Each start is a process of its own that ends where the first optimizer step would begin. The checkouts take turns, so
that a busy minute of the machine meets both. Printed for each: median (and range) of wall-clock and processor seconds
since the interpreter started, and the modules imported by then.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fresh import told_by

ROOT = Path(__file__).resolve().parent.parent
STEP = "surefoot.training.step"
FIRST_LINE, STEP_1 = "first line", "step 1"


class StartTimer(importlib.abc.MetaPathFinder):
    """Ends the process at the moment `last`, with the moments of the start as JSON on the last line."""

    def __init__(self, started: float, last: str = STEP_1):
        """started: seconds since the epoch. last: FIRST_LINE, or STEP_1: the first call of `train_step`."""
        self.started, self.last = started, last
        self.moments: dict[str, Any] = {}

    def note(self, moment: str) -> None:
        """Keeps wall-clock and processor seconds, and the names of imported modules, of the first such moment."""
        if moment not in self.moments:
            wall, cpu = time.time() - self.started, sum(os.times()[:2])
            self.moments[moment] = {"wall": wall, "processor": cpu, "modules": sorted(sys.modules)}
            if moment == self.last:
                print(f"\n{json.dumps(self.moments)}", flush=True)
                os._exit(0)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Replaces `train_step` as soon as its module is executed, before others import it by name."""
        if fullname != STEP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: Any) -> None:
            execute(module)
            module.train_step = lambda *arguments, **settings: self.note(STEP_1)

        spec.loader.exec_module = execute_and_replace
        return spec


class TimedOutput(io.TextIOWrapper):
    """Standard output that notes its first line."""

    timer: StartTimer

    def write(self, text: str) -> int:
        self.timer.note(FIRST_LINE)
        return super().write(text)


def start(started: float, last: str, words: list[str]) -> None:
    """`surefoot train` with these words, up to `last`, in this process, of the checkout that PYTHONPATH names."""
    timer = StartTimer(started, last)
    sys.meta_path.insert(0, timer)
    sys.stdout = output = TimedOutput(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
    output.timer = timer
    from surefoot.commands.main import main

    main(["train", *words])


def measure(words: list[str], checkout: Path = ROOT, last: str = STEP_1) -> dict[str, dict[str, Any]]:
    """The moments of one start up to `last`, in a new process."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    return told_by([sys.executable, __file__, "--start", str(time.time()), last, *words], environment)


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        start(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG.yaml [KEY=VALUE]...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path, help="Another checkout, measured in turn with this one.")
    asked = parser.parse_args()
    checkouts = [ROOT, *([asked.other.resolve()] if asked.other else [])]
    found: dict[Path, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
    for _ in range(asked.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as folder:
                found[checkout].append(measure([*asked.words, f"output={folder}/run"], checkout))
    for name, rounds in zip(("here", "other"), found.values(), strict=False):
        for moment in (FIRST_LINE, STEP_1):
            times = [_shown([one[moment][clock] for one in rounds]) for clock in ("wall", "processor")]
            modules = rounds[0][moment]["modules"]
            own = sum(name.partition(".")[0] == "surefoot" for name in modules)
            line = f"{name:<6} {moment:<11} wall {times[0]} s, processor {times[1]} s"
            print(f"{line}, {len(modules)} modules, {own} of them surefoot's")


if __name__ == "__main__":
    main()
