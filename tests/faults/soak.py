"""The parts of `make soak`: how many trials each has, and about how long one takes.

    make soak                                                  # all of it, about 90 minutes of one processor
    make soak SOAK="--scale 0.01"                              # a hundredth of each part
    make soak SOAK="-k killed --trials 'killed runs=50'"       # one part, so many trials
    make soak SOAK="--records build/soak.jsonl"                # keeps every trial, see records.py

A test marked `soak("killed runs")` belongs to that part and asks the fixture `trials` how many it is to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Part:
    """trials: of each of its tests. seconds: of the processor, for one trial. tests: that have so many trials each."""

    trials: int
    seconds: float
    tests: int = 1


PARTS = {
    "inputs": Part(200_000, 0.001, tests=17),
    "killed runs": Part(200, 5.0),
    "stopped runs": Part(100, 4.0),
    "power failures": Part(500, 0.1, tests=2),
    "each operation of a run": Part(1, 60.0),
    "mutations": Part(500, 0.05),
    "NaN and infinity": Part(100, 0.1, tests=2),
    "failing disks": Part(60, 2.0),
    "each write of a run that goes back": Part(1, 300.0),
    "gradient spikes": Part(200, 0.5),
}


def sizes(scale: float, asked: Sequence[str]) -> dict[str, int]:
    """Trials of each part, at least one. asked: "PART=COUNT". Raises pytest.UsageError for a part that there is not."""
    found = {name: max(1, round(part.trials * scale)) for name, part in PARTS.items()}
    for words in asked:
        name, _, count = words.rpartition("=")
        if name not in PARTS or not (count.isascii() and count.isdigit() and int(count)):
            raise pytest.UsageError(f"--trials {words}: give PART=COUNT, where PART is one of {', '.join(PARTS)}")
        found[name] = int(count)
    return found


def forecast(counts: dict[str, int]) -> list[str]:
    """What will run, with an estimate in minutes of one processor."""
    lines, whole = [], 0.0
    for name, part in PARTS.items():
        minutes = counts[name] * part.seconds * part.tests / 60
        each = f" for each of {part.tests} tests" if part.tests > 1 else ""
        lines.append(f"soak: {name}: {counts[name]:,} trials{each}, about {minutes:.1f} minutes")
        whole += minutes
    return [*lines, f"soak: about {whole:.0f} minutes of one processor in all; seeds are printed with each part"]


class Told:
    """Prints what the parts say as soon as each ends, also where several processes share them out."""

    def __init__(self, config: pytest.Config, forecast: Sequence[str]):
        self.config, self.forecast, self.started = config, forecast, 0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        """Not as a header: -q leaves that out."""
        for line in self.forecast:
            self._say(line)

    def _say(self, text: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.started += 1
        self._say(f"soak: part {self.started} starts: {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.capstdout.strip():
            self._say(report.capstdout.rstrip())
        if report.when == "call":
            self._say(f"soak: {report.outcome} after {report.duration / 60:.1f} minutes: {report.nodeid}")
