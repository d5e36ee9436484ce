"""Where the time before step 1 goes: a line for the user, and the same in environment.json.

phases = Phases(imports=hardware.process_seconds())
...
phases.end("data")        # what went by since the last call
...
console.say(phases.sentence())
"""

from __future__ import annotations

import time

COMPILE = "compile"
START = "start_seconds"  # the key of environment.json, for each rank
_SHOWN = 0.05  # seconds; less is not worth a word


class Phases:
    """Wall seconds of each phase, in their order. imports: from the start of the process until now; 0 where it was not
    started for this run."""

    def __init__(self, imports: float = 0.0) -> None:
        self.seconds: dict[str, float] = {"imports": imports} if imports else {}
        self._since = time.perf_counter()

    def end(self, phase: str) -> None:
        """What went by since the last call, or since the beginning, was this phase; one may come in several parts."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def compiling(self) -> float:
        return self.seconds.get(COMPILE, 0.0)

    def sentence(self) -> str:
        """ready in 9.1 s: imports 5.2, data 0.3, model 0.6, comparison 2.9"""
        shown = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if seconds >= _SHOWN)
        return f"ready in {self.whole:.1f} s{': ' if shown else ''}{shown}"

    def to_json(self) -> dict[str, float]:
        """To milliseconds."""
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
