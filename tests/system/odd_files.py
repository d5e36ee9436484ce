"""What may lie under a name that the program writes to, and is no file of its own. other: a file of somebody else's."""

import os
from pathlib import Path


def second_name(path: Path, other: Path) -> None:
    os.link(other, path)


def link(path: Path, other: Path) -> None:
    path.symlink_to(other)


def dangling(path: Path, other: Path) -> None:
    path.symlink_to(other.parent / "nothing")


def fifo(path: Path, other: Path) -> None:
    os.mkfifo(path)
