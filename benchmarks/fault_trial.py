"""One fault against one side: a folder with everything a run needs, the commands given in it, and what came of them.

trial = Trial(side, folder, world, server)
trial.change("lr", ".nan")
trial.train()
trial.outcome(says=("learning_rate|optim.lr",))
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from fault_child import HANGS
from fault_sides import Side

_SECONDS = 90  # a run takes two to four of them
WEIGHTS = "out/adapter_model.safetensors"


class Raw(str):
    """Text that goes into a config as it stands: `1e-4`, `.nan`."""


@dataclass(frozen=True)
class Outcome:
    """codes: exit codes of the commands. traceback: whether one was printed. named: whether the output names the fault.
    end: the weights beside those of the undisturbed run: same, other, not finite, none. ran: whether a payload did.
    note: what a row wants told besides. says: the end of the output."""

    fault: str
    side: str
    codes: tuple[int, ...]
    traceback: bool
    named: bool
    end: str
    ran: bool
    note: str
    says: str


class Server:
    """The process of a side that forks its commands. Nothing it starts goes online."""

    def __init__(self, side: Side, folder: Path):
        script = Path(__file__).with_name("fault_child.py")
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [side.python, str(script), side.child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{side.child}.log").open("w"),
            text=True,
            env={**os.environ, **offline, **threads},
        )
        if not self._answer():
            raise SystemExit(f"{side.name} did not start, see {folder / f'{side.child}.log'}")

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline() or "null")

    def run(self, request: dict[str, Any]) -> list[int]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


@dataclass
class Trial:
    """start: the folder it begins with a copy of. ended: weights of the run that nothing disturbs. broken_off: a run
    that was killed after its fifth step."""

    side: Side
    folder: Path
    start: Path
    server: Server
    ended: Path | None = None
    broken_off: Path | None = None
    codes: list[int] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        self._begin(self.start)

    def _begin(self, start: Path) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(start, self.folder)
        self.log.unlink(missing_ok=True)
        self.settings = json.loads(json.dumps(self.side.config))

    # What rows spoil

    @property
    def data(self) -> Path:
        return self.folder / "train.jsonl"

    def lines(self, change: Callable[[list[str]], object]) -> None:
        """The lines of the data, without their ends, changed in place."""
        lines = self.data.read_text().splitlines()
        change(lines)
        self.data.write_text("".join(f"{line}\n" for line in lines))

    def row(self, number: int, **fields: Any) -> None:
        """Fields of a record, counted from 1; None takes one out."""

        def put(lines: list[str]) -> None:
            own = {**json.loads(lines[number - 1]), **fields}
            lines[number - 1] = json.dumps({key: value for key, value in own.items() if value is not None})

        self.lines(put)

    def base(self, name: str) -> Path:
        return self.folder / "base" / name

    def change(self, key: str, value: Any) -> None:
        """A setting by its common name, or a key of the config's top level."""
        *groups, name = self.side.keys.get(key, key).split(".")
        group = self.settings
        for one in groups:
            group = group[one]
        group[name] = value

    def resumable(self) -> None:
        """From here on the folder is that of the run that was killed after five steps: checkpoints 2 and 4."""
        assert self.broken_off
        settings = self.settings
        self._begin(self.broken_off)
        self.settings = settings

    def newest(self, what: str) -> Path:
        """A file of the newest checkpoint."""
        return self.folder / "out" / "checkpoint-4" / self.side.files[what]

    @property
    def marker(self) -> Path:
        """What a payload leaves."""
        return self.folder / "marker"

    # What is run

    def train(self, resume: bool = False, beside: bool = False, **does: Any) -> None:
        """does: as in fault_child.py. beside: the same command twice at a time."""
        settings, words = dict(self.settings), []
        if resume:
            if isinstance(self.side.resume, str):
                words.append(self.side.resume)
            else:
                settings |= self.side.resume
        (self.folder / "run.yaml").write_text(_yaml(settings))
        request = {
            "arguments": [*self.side.command, "run.yaml", *words],
            "folder": str(self.folder),
            "log": str(self.log),
            "does": does or None,
            "beside": str(self.folder / "out") if beside else None,
            "seconds": _SECONDS,
        }
        self.codes += self.server.run(request)

    @property
    def log(self) -> Path:
        """Not in the folder, whose disk a row may fill."""
        return self.folder.with_suffix(".txt")

    def output(self) -> str:
        logs = (self.log, Path(f"{self.log}-beside"))
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    # What came of it

    def outcome(self, fault: str, says: Sequence[str]) -> Outcome:
        """says: what has to stand in the output, each in any of the wordings that count. What is told of every run,
        whatever happens, is marked as information and names nothing."""
        text = self.output()
        told = "\n".join(line for line in text.splitlines() if not line.startswith("[INFO"))
        return Outcome(
            fault=fault,
            side=self.side.name,
            codes=tuple(self.codes),
            traceback="Traceback (most recent call last)" in text,
            named=bool(says) and all(re.search(one, told, re.IGNORECASE) for one in says),
            end=_compared(self.folder / WEIGHTS, self.ended),
            ran=self.marker.exists(),
            note=self.note,
            says=text[-3000:],
        )


def _yaml(settings: dict[str, Any]) -> str:
    """Plain YAML, with `Raw` values as they are."""
    marks: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            marks[f"raw{len(marks)}"] = str(value)
            return f"raw{len(marks) - 1}"
        return {key: marked(one) for key, one in value.items()} if isinstance(value, dict) else value

    text = yaml.safe_dump(marked(settings), sort_keys=False)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _compared(path: Path, undisturbed: Path | None) -> str:
    if not path.exists():
        return "none"
    try:
        weights = load_file(path)
    except SafetensorError:
        return "unreadable"
    if not all(torch.isfinite(one).all() for one in weights.values()):
        return "not finite"
    expected = load_file(undisturbed) if undisturbed else weights
    same = weights.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in weights.items())
    return "same" if same else "other"


def in_words(found: Outcome) -> str:
    """A cell of the table."""
    if not found.codes:
        return found.note
    if HANGS in found.codes:
        return "**hangs**"
    codes = ", ".join(map(str, found.codes))
    words = [f"exit {codes}"]
    if found.traceback:
        words.append("traceback")
    if found.ran:
        words.append("**the payload ran**")
    if found.codes[-1] == 0:
        words.append({"same": "undisturbed end", "none": "no weights"}.get(found.end, f"{found.end} weights"))
    if found.named or found.codes[-1] or found.end != "same":
        words.append("named" if found.named else "not named")
    return ", ".join(words + ([found.note] if found.note else []))
