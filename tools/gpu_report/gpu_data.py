"""Texts for the report's runs and cells: this repository's own pages, by their headings."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of the cells, as benchmarks/gpu_cells.py names their data, and what stands for each here.
NAMES = {"alpaca_en_demo.json": "instructions.json", "sharegpt_multiturn_200.json": "dialogues.json"}
_TURNS = 4  # questions of a dialogue


def sections() -> list[tuple[str, str, str]]:
    """(page, heading, text) of every section of docs/ with a text."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        name = page.stem.replace("-", " ")
        pairs = zip(parts[1::2], parts[2::2], strict=True)
        found += [(name, head.strip(), text.strip()) for head, text in pairs if text.strip()]
    return found


def write_data(folder: Path) -> None:
    """instructions.json, as alpaca has it, and dialogues.json, as ShareGPT has it."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [(f"What does the page on {page} say under {head}?", text) for page, head, text in sections()]
    instructions = [{"instruction": question, "input": "", "output": text} for question, text in asked]
    dialogues = [
        {
            "conversations": [
                {"from": who, "value": value}
                for question, text in asked[at : at + _TURNS]
                for who, value in (("human", question), ("gpt", text))
            ]
        }
        for at in range(0, len(asked), _TURNS)
    ]
    for name, records in (("instructions", instructions), ("dialogues", dialogues)):
        (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
