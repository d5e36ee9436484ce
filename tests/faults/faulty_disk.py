"""A disk that fails, or ends the process, at one chosen operation. Stands in for `surefoot.system.disk`.

A kill leaves the folder as the operations before it did: from then on nothing changes the disk any more, not even the
clean-up that an exception would run and a killed process does not. Writes of libraries into a staged folder are
operations too: whoever knows one wraps it with `by_library`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors import SafetensorError

from helpers.killed import Killed
from surefoot.system import disk

NAMES = (
    *("create", "open_end", "write", "truncate", "sync_file", "sync", "chmod", "rename", "replace", "unlink"),
    *("make_folder", "remove_folder", "remove_tree"),
)
# the process ends before the operation; in the middle of it, where it has one; ENOSPC; EIO; half of it is written, and
# then the disk is full
Kind = Literal["kill", "torn", "full", "broken", "short"]
_ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "short": errno.ENOSPC}


class FaultyDisk:
    """kind: what happens at operation number `at`, counted from 1. at: 0 only counts."""

    def __init__(self, kind: Kind = "kill", at: int = 0):
        self.kind, self.at = kind, at
        self.log: list[str] = []
        self._dead = False

    @property
    def happened(self) -> bool:
        return 0 < self.at <= len(self.log)

    def operation(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._dead:
                raise Killed
            self.log.append(name)
            if len(self.log) != self.at:
                return real(*arguments, **keywords)
            return self._fail(name, real, arguments, keywords)

        return call

    def _fail(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        halves = self.kind in ("torn", "short")
        if halves and name == "write":
            file, data = arguments
            taken = real(file, data[: len(data) // 2])
            if self.kind == "short" and taken:  # the next write finds the disk full
                self.at += 1
                return taken
        elif halves and name == "remove_tree" and arguments[0].is_dir():
            files = sorted(path for path in arguments[0].rglob("*") if path.is_file())
            for path in files[: (len(files) + 1) // 2]:
                path.unlink()
        elif name == "library":
            path = real(*arguments, **keywords)
            os.truncate(path, path.stat().st_size // 2 if halves else 0)
        if self.kind in ("kill", "torn"):
            self._dead = True
            raise Killed
        number = _ERRORS[self.kind]
        if name == "library":  # in the words of safetensors
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number))

    def by_library(self, write: Callable[..., object]) -> Callable[..., None]:
        """`write(tensors, path)`, which a library does in its own way."""

        def wrapped(tensors: Any, path: Path, **keywords: Any) -> Path:
            write(tensors, path, **keywords)
            return Path(path)

        return self.operation("library", wrapped)

    @contextmanager
    def installed(self) -> Iterator[FaultyDisk]:
        from surefoot.training import checkpoint

        with pytest.MonkeyPatch.context() as patch:
            for name in NAMES:
                patch.setattr(disk, name, self.operation(name, getattr(disk, name)))
            patch.setattr(checkpoint, "save_file", self.by_library(checkpoint.save_file))
            yield self


def operations_of(action: Callable[[], object]) -> list[str]:
    """What it does to the disk when nothing fails."""
    with FaultyDisk().installed() as counting:
        action()
    return counting.log


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, symlinks=True))
