"""Power failures: what may be on a disk after one, from the log of what was asked of it.

The model follows ALICE (Pillai et al., OSDI 2014) and is harsher than common file systems. Until a file is flushed, of
what was written to it anything may be lost: all, the end, a middle part that is zeros then, or nothing. Until a folder
is flushed, any of the names made, changed or removed in it may be as before, in any combination; one rename within a
folder happens or not. Flushing a file does not keep its name. Each state is written out and recovery is run on it.

`Recording` stands in for `surefoot.system.disk` and sees what libraries write by looking at the folder before each
operation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import pytest

from surefoot.system import disk

WAYS = ("kept", "lost", "names", "torn", "zeroed", "any")
EXACT = (
    "kept",
    "lost",
    "names",
)  # not left to chance: all, as after a kill; what is sure; all names, what is sure in them


@dataclass(frozen=True)
class Operation:
    """name: as in `disk`; "content" for what a file holds now, "mark" for what the caller wants to find again."""

    name: str
    path: str = ""
    other: Any = None


class Recording:
    """root: the folder that is watched; nothing outside of it is."""

    def __init__(self, root: Path):
        self.root = root
        self.log: list[Operation] = []
        self._seen: dict[str, tuple[int, int]] = {}
        self._look()

    @contextmanager
    def installed(self) -> Iterator[Recording]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("sync", "sync_file", "rename", "replace", "unlink", "remove_tree", "remove_folder"):
                patch.setattr(disk, name, getattr(self, f"_{name}")(getattr(disk, name)))
            yield self
        self._look()

    def mark(self, what: Any) -> None:
        self._look()
        self.log.append(Operation("mark", other=what))

    def _note(self, name: str, path: Path, other: Path | None = None) -> None:
        self._look()
        if self._inside(path):
            self.log.append(Operation(name, self._name(path), None if other is None else self._name(other)))

    def _look(self) -> None:
        """Whatever was written since the last look: by surefoot, or by a library in its own way."""
        for path in sorted(self.root.rglob("*")):
            name, there = self._name(path), path.lstat()
            now = (0, 0) if path.is_dir() else (there.st_mtime_ns, there.st_size)
            if self._seen.get(name) == now:
                continue
            self._seen[name] = now
            if path.is_dir():
                self.log.append(Operation("folder", name))
            else:
                self.log.append(Operation("content", name, path.read_bytes()))

    def _inside(self, path: Path) -> bool:
        return path == self.root or self.root in path.parents

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _forget(self, path: Path, to: Path | None = None) -> None:
        """Names below it are another's now."""
        name = self._name(path)
        for old in [one for one in self._seen if one == name or one.startswith(f"{name}/")]:
            seen = self._seen.pop(old)
            if to is not None:
                self._seen[self._name(to) + old[len(name) :]] = seen

    def _sync(self, real: Any) -> Any:
        def call(path: Path) -> None:
            real(path)
            self._note("sync", Path(path))

        return call

    def _sync_file(self, real: Any) -> Any:
        def call(file: Any) -> None:
            real(file)
            self._note("sync", Path(file.name))

        return call

    def _rename(self, real: Any) -> Any:
        def call(source: Path, target: Path) -> None:
            self._look()
            real(source, target)
            if self._inside(Path(source)):
                self._forget(Path(target))
                self._forget(Path(source), Path(target))
                self.log.append(Operation("rename", self._name(Path(source)), self._name(Path(target))))

        return call

    _replace = _rename

    def _unlink(self, real: Any) -> Any:
        def call(path: Path, **keywords: Any) -> None:
            self._look()
            below = sorted(path.rglob("*"), reverse=True) if path.is_dir() and self._inside(path) else []
            there = path.exists()
            real(path, **keywords)
            if there and self._inside(path):
                for one in [*below, path]:
                    self.log.append(Operation("unlink", self._name(one)))
                self._forget(path)

        return call

    _remove_folder = _remove_tree = _unlink


Names = dict[str, "Node"]


@dataclass(eq=False)
class Node:
    """A file (`content`) or a folder (`names`), as it is and as the disk surely has it. changes: to the names since the
    folder was flushed, each {name: node or None}."""

    is_folder: bool
    content: bytes = b""
    kept: bytes = b""
    names: Names = field(default_factory=dict)
    surely: Names = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, names: dict[str, Node | None]) -> None:
        self.changes.append(names)
        _apply(self.names, names)

    def flush(self) -> None:
        self.kept, self.surely, self.changes = self.content, dict(self.names), []


def _apply(names: Names, change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def disk_after(log: list[Operation]) -> Node:
    """The tree with what is sure and what is not."""
    root = Node(True)
    for operation in log:
        if operation.name == "mark":
            continue
        if operation.path == ".":
            root.flush()
            continue
        folder, name = _parent(root, operation.path)
        if operation.name == "folder":
            folder.change({name: Node(True)})
        elif operation.name == "content":
            if name not in folder.names:
                folder.change({name: Node(False)})
            folder.names[name].content = operation.other
        elif operation.name == "sync":
            folder.names[name].flush()
        elif operation.name == "unlink":
            folder.change({name: None})
        else:
            _rename(root, folder, name, operation.other)
    return root


def _rename(root: Node, folder: Node, name: str, target: str) -> None:
    to, new = _parent(root, target)
    node = folder.names[name]
    if to is folder:
        folder.change({name: None, new: node})
    else:
        to.change({new: node})
        folder.change({name: None})


def _parent(root: Node, path: str) -> tuple[Node, str]:
    *folders, name = PurePath(path).parts
    for one in folders:
        root = root.names[one]
    return root, name


def lose_power(root: Node, draw: random.Random, to: Path, way: str | None = None) -> str:
    """Write one state that the disk may have into the empty folder `to`; returns in which way things were lost."""
    way = way or draw.choice(WAYS)
    _write(root, draw, way, to)
    return way


def _write(node: Node, draw: random.Random, way: str, to: Path) -> None:
    names = dict(node.surely)
    for change in node.changes:
        if way in ("kept", "names") or (way != "lost" and draw.random() < 0.5):
            _apply(names, change)
    for name, one in names.items():
        if one.is_folder:
            (to / name).mkdir()
            _write(one, draw, way, to / name)
        else:
            (to / name).write_bytes(_content(one, draw, draw.choice(WAYS[:-1]) if way == "any" else way))


def _content(file: Node, draw: random.Random, way: str) -> bytes:
    now, sure = file.content, file.kept
    if way == "kept" or now == sure:
        return now
    if way in EXACT:
        return sure
    same = len(sure) if now.startswith(sure) else 0
    if way == "torn":
        return now[: draw.randint(same, len(now))]
    first, second = sorted(draw.randint(same, len(now)) for _ in range(2))
    return now[:first] + bytes(second - first) + now[second:]
