"""The parts of a report: a process each, with a time limit, whose result is a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CELLS = (
    "1b-lora",
    "8b-lora",
    "1b-full-dialogues",
    "1b-lora-short",
    "8b-dora",
    "8b-lora-dialogues",
    "8b-dora-dialogues",
)
_LEAST = 20.0  # seconds below which nothing begins
_SHOWN = 300  # letters of a reason
_LINES = 25  # of what a part that failed said last


@dataclass(frozen=True)
class Call:
    """end: by time.monotonic. data: folder of the cells' data; None for the repository's own pages. peers: words for
    peers.py."""

    out: Path
    rehearse: bool
    end: float
    data: Path | None = None
    peers: tuple[str, ...] = ()

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


@dataclass(frozen=True)
class Part:
    """minutes: that it takes on one GPU, by a guess; it is not begun with less. command: is given the file that the
    process writes its result to, also in between. read: makes the result from that file. rehearsed: what a rehearsal
    does of it, where that is less than all in small shapes."""

    name: str
    what: str
    minutes: float
    command: Callable[[Call, Path], list[str]]
    read: Callable[[Path], Any] = lambda path: json.loads(path.read_text(encoding="utf-8"))
    rehearsed: str = ""

    def shown(self, rehearse: bool) -> str:
        return self.rehearsed if rehearse and self.rehearsed else self.what


def _measured(name: str) -> Callable[[Call, Path], list[str]]:
    """A function of gpu_measures.py."""

    def command(call: Call, result: Path) -> list[str]:
        words = [sys.executable, str(HERE / "gpu_measures.py"), name, "--result", str(result), "--out", str(call.out)]
        return words + ["--small"] * call.rehearse

    return command


def _tests(call: Call, result: Path) -> list[str]:
    # In a rehearsal those that the pretend GPU's lack of real kernels and clocks says something about.
    small, whole = ["gpu/test_training.py"], ["gpu", "kernels", "planning/probes", "system"]
    return _pytest(result, *(f"tests/{one}" for one in (small if call.rehearse else whole)))


def _methods(call: Call, result: Path) -> list[str]:
    """Several at a time: nothing of theirs is timed."""
    if call.rehearse:
        return _pytest(result, "tests/rehearsal/test_runs.py", "-k", "lora")
    several = find_spec("xdist") is not None
    return _pytest(result, "tests/rehearsal", *(["-n", str(min(8, os.cpu_count() or 1))] if several else []))


def _pytest(result: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={result}", *words]


def _passed(path: Path) -> dict[str, Any]:
    """Of pytest's XML: how many passed, and why others did not."""
    from xml.etree import ElementTree

    found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        trouble = [one for one in case if one.tag in ("failure", "error", "skipped")]
        if not trouble:
            found["passed"].append(name)
            continue
        message = (trouble[0].get("message") or "").splitlines() or [""]
        found["skipped" if trouble[0].tag == "skipped" else "failed"][name] = message[0][:_SHOWN]
    return found


def _memory(adapter: str) -> Callable[[Call, Path], list[str]]:
    def command(call: Call, result: Path) -> list[str]:
        case = f"22 M 256 {adapter} off" if call.rehearse else f"1.2 B 1024 {adapter}"
        program = str(ROOT / "benchmarks" / "memory.py")
        return [sys.executable, program, "--device", "cuda", "--only", case, "--out", str(result)]

    return command


def _cell(name: str) -> Callable[[Call, Path], list[str]]:
    def command(call: Call, result: Path) -> list[str]:
        words = [*_measured("cell")(call, result), "--cell", name, "--minutes", f"{call.left() / 60:.2f}"]
        return words + (["--data", str(call.data)] if call.data else []) + list(call.peers)

    return command


PARTS = (
    Part("machine", "GPU, driver, versions", 0.3, _measured("machine")),
    Part("tests", "the tests that need a GPU", 4, _tests, _passed, "of the tests that need a GPU, those that train"),
    Part(
        "methods",
        "every method, killed and resumed, and every command",
        4,
        _methods,
        _passed,
        "LoRA, killed and resumed, in place of every method and command (make rehearsal runs them)",
    ),
    Part("probes", "kernels against float64, and their times", 1, _measured("probes")),
    Part("cudnn", "shapes at which cuDNN's attention is wrong", 0.5, _measured("cudnn")),
    Part("runs", "runs beside their plain fp32 path; death and resume bit for bit", 4, _measured("runs")),
    *(Part(f"memory-{one}", f"forecast and peak, {one}", 0.7, _memory(one)) for one in ("lora", "dora", "full")),
    *(Part(f"cell-{name}", f"beside other trainers: {name}", 2, _cell(name)) for name in CELLS),
)


def place_of(call: Call, part: Part) -> Path:
    return call.out / "parts" / f"{part.name}.json"


def read(call: Call, part: Part) -> dict[str, Any] | None:
    """What is known of a part; None where nothing is."""
    place = place_of(call, part)
    return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else None


def run_part(call: Call, part: Part) -> dict[str, Any]:
    """Run it and keep what came out.

    state: done | failed (it ended by itself, and not well) | cut off (at the end of the minutes) | left out (not begun,
    or it says itself that it cannot be). found: also of a part that failed or was cut off, as far as it came.
    """
    needs, left = max(_LEAST, 0 if call.rehearse else 60 * part.minutes), call.left()
    if left < needs:
        return _kept(call, part, "left out", f"needs some {needs / 60:.1f} minutes, {max(0.0, left) / 60:.1f} are left")
    result = place_of(call, part).with_suffix(".result")
    result.unlink(missing_ok=True)
    log = place_of(call, part).with_suffix(".log")
    began = time.monotonic()
    code = _ended(part.command(call, result), log, left)
    seconds = time.monotonic() - began
    try:
        found = part.read(result)
    except (OSError, ValueError, SyntaxError):  # nothing, or the half of it
        found = None
    if isinstance(found, dict) and "left out" in found:
        return _kept(call, part, "left out", found["left out"], seconds)
    if code is None:
        return _kept(call, part, "cut off", "the minutes were over", seconds, found)
    if code or found is None:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LINES:] or ["it said nothing"]
        why = f"exit code {code}: {lines[-1].strip()[:_SHOWN]}"
        return _kept(call, part, "failed", why, seconds, found, lines)
    return _kept(call, part, "done", "", seconds, found)


def _ended(command: list[str], log: Path, seconds: float) -> int | None:
    """The exit code; None if the time was over, at which the process and its children are ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _paths() -> list[str]:
    """surefoot and the helpers of tests first; what the pretend GPU put there stays."""
    return [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _kept(
    call: Call, part: Part, state: str, why: str, seconds: float = 0.0, found: Any = None, log: Sequence[str] = ()
) -> dict[str, Any]:
    told = {"state": state, "why": why, "seconds": round(seconds, 1), "found": found, "log": list(log)}
    unfinished = place_of(call, part).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(place_of(call, part))
    return told
