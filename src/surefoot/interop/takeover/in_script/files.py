"""Write files so that nobody sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        yield file
    os.replace(partial, path)
