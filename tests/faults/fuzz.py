"""Many inputs for one reader, each from a seed of its own; goes on after a failure, and names each kind of it once.

    fuzz("configs", PARSERS["configs"], 200_000, seed=7)

Input k is that of seed `seed + k`, whatever came before it: `python -m faults.fuzz configs 4711` (with tests/ on the
path) shows the one of a seed and what becomes of it.
"""

import faulthandler
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults.parsers import PARSERS, WALL, Parser, read_or_refuse

CHUNK = 500  # inputs between two looks at the clock
LAST = 2 * WALL + CHUNK  # seconds for a chunk, before the process is ended
KINDS = 20  # failures that differ, after which it is enough
_SHOWN = 3_000  # letters of an input


@dataclass
class Found:
    """wrong: of each kind of failure, by what was raised where, the seed and the input. read: inputs not refused."""

    inputs: int = 0
    read: int = 0
    seconds: float = 0.0  # of the processor
    wrong: dict[str, str] = field(default_factory=dict)


def fuzz(name: str, parser: Parser, count: int, seed: int, enough: Callable[[], bool] = lambda: False) -> Found:
    """enough: asked from time to time; ends it early. Should a reader hang where nothing can interrupt it, in C, the
    process is ended (exit 1) after a file in the folder for temporary ones was told which seeds and where."""
    found, started, draw = Found(), time.process_time(), Random()
    with tempfile.NamedTemporaryFile("w+", prefix=f"hangs-{name.replace(' ', '-')}-", suffix=".txt") as hang:
        print(f"{name}: {count} inputs, seeds from {seed}; one that hangs is named in {hang.name}", flush=True)
        for number in range(count):
            if number % CHUNK == 0:
                if enough() or len(found.wrong) >= KINDS:
                    break
                _watch(hang, f"{name}: hangs at one of the seeds {seed + number} to {seed + number + CHUNK - 1}")
            draw.seed(seed + number)
            value = parser.changed(draw)
            found.inputs += 1
            try:
                found.read += read_or_refuse(parser.read, value)
            except Exception as error:
                _note(found, seed + number, value, error)
        faulthandler.cancel_dump_traceback_later()
    found.seconds = time.process_time() - started
    return found


def _watch(file: Any, what: str) -> None:
    """The second limit is for what no signal gets through to: readers in C that never come back."""
    file.seek(0)
    file.truncate()
    file.write(what + "\n")
    file.flush()
    faulthandler.dump_traceback_later(LAST, exit=True, file=file)


def _note(found: Found, seed: int, value: Any, error: Exception) -> None:
    kind = _kind(error)
    if kind in found.wrong:
        return
    found.wrong[kind] = f"seed {seed}: {kind}: {value!r}"[:_SHOWN]
    print(found.wrong[kind], flush=True)


def _kind(error: Exception) -> str:
    """What was raised, and the last line of surefoot's that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/surefoot/" in frame.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
    return f"{type(error).__name__} at {where}"


def _show(name: str, seed: int) -> None:
    value = PARSERS[name].changed(Random(seed))
    print(repr(value))
    print("read" if read_or_refuse(PARSERS[name].read, value) else "refused")


if __name__ == "__main__":
    _show(sys.argv[1], int(sys.argv[2]))
