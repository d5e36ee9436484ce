"""The smallest training of each tool that is translated, and the same with more words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.interop.translation import Outcome, Translation

BASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "axolotl": ("a.json", {
        "base_model": "m", "learning_rate": 1e-5, "output_dir": "o",
        "datasets": [{"path": "d.jsonl", "type": "alpaca"}],
    }),
    "trl": ("sft.json", {"model_name_or_path": "m", "dataset_name": "org/d", "output_dir": "o"}),
    "factory": ("l.json", {
        "model_name_or_path": "m", "stage": "sft", "do_train": True, "dataset": "a", "template": "llama3",
        "output_dir": "o",
    }),
    "tune": ("t.json", {
        "output_dir": "o", "checkpointer": {"checkpoint_dir": "m"}, "seed": 1,
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
    }),
}  # fmt: skip


def text_of(tool: str, **words: Any) -> str:
    return json.dumps(BASES[tool][1] | words)


def translated(tool: str, options: Options | None = None, **words: Any) -> Translation:
    return translate_file(BASES[tool][0], text_of(tool, **words), [], options or Options())


def outcome(found: Translation, word: str) -> Outcome:
    """Of the first note on it."""
    return next(note.outcome for note in found.notes if note.word.startswith(word))
