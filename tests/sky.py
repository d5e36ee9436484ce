"""Records whose answers grow one by one: "sky", "sky sky", ..., so that rows differ in length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_llama


def sky_rows(count: int, *, more: int = 0) -> list[dict[str, str]]:
    """In alpaca's layout. more: words that every answer has besides."""
    return [{"instruction": f"Say {n}.", "input": "", "output": "sky " * (n + more)} for n in range(1, count + 1)]


def write_sky(folder: Path, count: int, *, more: int = 0) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(sky_rows(count, more=more)))
    return path


def sky_workplace(factory: pytest.TempPathFactory, count: int, **model: Any) -> Path:
    """A new folder with `rows.json` and a tiny Llama, `base`. model: see `tiny_llama`."""
    folder = factory.mktemp("work")
    write_sky(folder, count)
    tiny_llama(folder / "base", **model)
    return folder
