"""Records whose answers grow one by one: "sky", "sky sky", ..., so that rows differ in length."""

from __future__ import annotations

import json
from pathlib import Path


def sky_rows(count: int, *, more: int = 0) -> list[dict[str, str]]:
    """In alpaca's layout. more: words that every answer has besides."""
    return [{"instruction": f"Say {n}.", "input": "", "output": "sky " * (n + more)} for n in range(1, count + 1)]


def write_sky(folder: Path, count: int, *, more: int = 0) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(sky_rows(count, more=more)))
    return path
