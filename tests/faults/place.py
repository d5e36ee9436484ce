"""A folder with everything that a run needs, for tests that spoil one thing in it and give the command.

    place = Place(folder, base, monkeypatch)
    place.change(seed=-1)                       # a key of run.yaml
    result, lines = place.call("train", place.config())

`folder` holds base/ (a tiny Llama), train.json and, where asked for, more; `snapshot` is its whole content.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from surefoot.commands.main import main

WORDS = ("one", "two", "heron", "sky")
ROWS = [
    {"instruction": f"Say {word} {count} times.", "input": "", "output": " ".join([word] * count)}
    for word in WORDS
    for count in (1, 2, 4)
]
PAIRS = [{"prompt": f"Say {word}.", "chosen": word, "rejected": f"no {word}"} for word in WORDS * 3]
JUDGED = [{"prompt": f"Say {word}.", "completion": word, "label": number % 2 == 0} for number, word in enumerate(WORDS)]
PROMPTS = [{"prompt": f"Say {word}."} for word in WORDS]


Words = list[str]
Prepare = Callable[["Place"], Words | None]


@dataclass(frozen=True)
class Case:
    """One bad input, and what the command must say of it.

    name: of the test.
    prepare: spoils one thing in a Place and returns the words of the command; None is `train run.yaml`.
    code, where: of the first fault that is printed; both "" where the command succeeds.
    exit: code of the exit.
    faults: how many are printed.
    writes: whether the command may leave something behind.
    shows: what the output of a command that succeeds must hold.
    """

    name: str
    prepare: Prepare
    code: str = ""
    where: str = ""
    exit: int = 2
    faults: int = 1
    writes: bool = False
    shows: tuple[str, ...] = ()


def refused(table: Mapping[str, Mapping[str, Mapping[str, Prepare]]], **more: Any) -> list[Case]:
    """table: code -> place of the fault -> name -> prepare. more: other fields of these cases."""
    return [
        Case(name, prepare, code, where, **more)
        for code, places in table.items()
        for where, inputs in places.items()
        for name, prepare in inputs.items()
    ]


@dataclass
class Place:
    """base: a model folder, which `own_base` copies before a test may change it. run: a finished run of 6 steps with
    checkpoints 2, 4 and 6, which `own_run` copies. patch: undone after the test. held: file handles to be closed
    then."""

    folder: Path
    base: Path
    run: Path
    patch: pytest.MonkeyPatch
    settings: dict[str, Any] = field(init=False)
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines("train.json", ROWS)
        self.settings = settings_of(self.folder, self.base)

    def text(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def lines(self, name: str, rows: Any) -> Path:
        """Rows as JSON, or as JSON lines where the name asks for it."""
        if name.endswith(".jsonl"):
            return self.text(name, "".join(json.dumps(row) + "\n" for row in rows))
        return self.text(name, json.dumps(rows))

    def change(self, **keys: Any) -> None:
        """Top-level keys of the config; None takes one out, a mapping goes into the group that is there."""
        for key, value in keys.items():
            before = self.settings.get(key)
            merged = isinstance(before, dict) and isinstance(value, Mapping)
            self.settings[key] = {**before, **value} if merged else value
        self.settings = {key: value for key, value in self.settings.items() if value is not None}

    def config(self) -> str:
        return str(self.text("run.yaml", yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)))

    def own_base(self) -> Path:
        if not (self.folder / "base").exists():
            shutil.copytree(self.base, self.folder / "base")
            self.change(model=str(self.folder / "base"))
        return self.folder / "base"

    def own_run(self) -> Path:
        """The finished run, moved here with its data and base under their old names."""
        shutil.copytree(self.run, self.folder / "out")
        return self.folder / "out"

    def json(self, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a JSON file; what `change` returns counts for nothing."""
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    def weights(self, change: Callable[[dict[str, Any]], object], file: str = "model.safetensors") -> None:
        """Change the tensors of the own base by name."""
        path = self.own_base() / file
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def call(self, *words: str) -> Result:
        return CliRunner().invoke(main, list(words))

    def snapshot(self) -> dict[str, str]:
        return dict(_contents(self.folder))


def settings_of(folder: Path, base: Path) -> dict[str, Any]:
    return {
        "stage": "sft",
        "model": str(base),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(folder / "train.json"), "max_length": 128},
        "batch": {"size": 4},
        "duration": "6 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(folder / "out"),
    }


def _contents(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield name, f"-> {path.readlink()}"
        elif path.is_file():
            status = path.stat()
            holes = status.st_blocks * 512 < status.st_size // 2  # of which the first MiB will do
            with path.open("rb") as file:
                yield name, f"{status.st_size} {hashlib.sha256(file.read(1 << 20 if holes else -1)).hexdigest()}"
        else:
            yield name, "folder"
