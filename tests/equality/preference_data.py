"""Real preference records as messages, and how their ids are compared with TRL's: by digest, so that no text of them is
copied. `python -m equality.preference_data FOLDER` writes the model that both sides use."""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[3] / "shared" / "data" / "instruct"
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def pairs() -> list[dict[str, Any]]:
    """TRL's explicit layout: prompt, chosen and rejected are lists of messages."""
    return [
        {
            "prompt": [_message(turn) for turn in record["conversations"]],
            "chosen": [_message(record["chosen"])],
            "rejected": [_message(record["rejected"])],
        }
        for record in json.loads((DATA / "dpo_en_demo.json").read_text(encoding="utf-8"))
    ]


def judged() -> list[dict[str, Any]]:
    records = json.loads((DATA / "kto_en_demo.json").read_text(encoding="utf-8"))
    return [
        {"prompt": record["messages"][:-1], "completion": record["messages"][-1:], "label": record["label"]}
        for record in records
    ]


def _message(turn: dict[str, str]) -> dict[str, str]:
    return {"role": _ROLES[turn["from"]], "content": turn["value"]}


def digest(*parts: Sequence[int]) -> str:
    """Of token ids in parts."""
    return hashlib.sha256(json.dumps([[int(number) for number in part] for part in parts]).encode()).hexdigest()[:16]


if __name__ == "__main__":
    from helpers.tiny_models import tiny_llama

    tiny_llama(Path(sys.argv[1]), pad=True)
