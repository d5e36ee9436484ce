"""Records whose answers grow one by one: "sky", "sky sky", ..., so that rows differ in length."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.tiny_models import tiny_llama


def sky_rows(count: int, *, more: int = 0) -> list[dict[str, str]]:
    """Return records in the alpaca layout. more: words added to every answer."""
    return [{"instruction": f"Say {n}.", "input": "", "output": "sky " * (n + more)} for n in range(1, count + 1)]


def write_sky(folder: Path, count: int, *, more: int = 0) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(sky_rows(count, more=more)))
    return path


def sky_workplace(factory: pytest.TempPathFactory, count: int, **model: Any) -> Path:
    """Make a folder with `rows.json` and a tiny Llama, `base`. model: see `tiny_llama`."""
    folder = factory.mktemp("work")
    write_sky(folder, count)
    tiny_llama(folder / "base", **model)
    return folder


def page_of_pairs(folder: Path, page: str, stage: str) -> Path:
    """Write what the config on a docs page about pairs names, its text, and the config as STAGE.yaml."""
    (folder / "data").mkdir()
    tiny_llama(folder / "runs" / "sft", pad=True)
    rows = [{"prompt": f"Say sky {n} times.", "chosen": "sky " * n, "rejected": "heron"} for n in range(1, 41)]
    (folder / "data" / "preference.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (config,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (folder / f"{stage}.yaml").write_text(config)
    assert yaml.safe_load(config)["stage"] == stage
    return folder
