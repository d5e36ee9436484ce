"""The texts that a certificate is made on: a user's own, else examples of the training data, else a few of ours.

All go through the template that trained, so that the comparison is made where the model will be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.segments import Template, prompt_ids, text_ids
from surefoot.data.text_encoder import TextEncoder
from surefoot.families.files import read_json_if_there, read_text
from surefoot.system.errors import Fault, InputError
from surefoot.system.made_folders import run_of

LONGEST = 256  # tokens of one text
TOGETHER = 1024  # tokens of all: at 128,000 logits per token, half a GB for each model that is compared
BUILT_IN = (
    "Give three tips for staying healthy.",
    "What is the capital of France, and which river runs through it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.",
    "Summarise: the meeting moved from 9:30 on Tuesday to 14:00 on Thursday, room 12B, bring the 2024 figures.",
    "小猫为什么喜欢睡觉?",
)


@dataclass(frozen=True)
class PromptSet:
    """ids: of each text, BOS included where the model uses one. source: a sentence's end, where they come from."""

    ids: tuple[tuple[int, ...], ...]
    source: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def choose_prompts(
    file: Path | None, trained: Path, template: Template | None, encoder: TextEncoder, bos_id: int | None, longest: int
) -> PromptSet:
    """file: one prompt per line. trained: the folder whose data.json may hold examples. template: None for a model
    that continues texts. longest: positions of the model. Raises InputError for a file without a prompt."""

    def lay_out(text: str) -> list[int]:
        return _laid_out(text, template, encoder, bos_id)

    if file is not None:
        return _within(map(lay_out, _lines(file)), f"the prompts of {file.name}", longest)
    if examples := _examples(trained):
        ids = (text_ids(text, encoder, bos_id) for text in examples)
        return _within(ids, "examples that the run was trained on", longest)
    return _within(map(lay_out, BUILT_IN), "built-in prompts", longest)


def _lines(file: Path) -> list[str]:
    lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise InputError(Fault(str(file), "holds no prompt", "write one per line", code="SF-DATA-EMPTY"))
    return lines


def _examples(trained: Path) -> list[str]:
    """Texts of the audit's samples, as the template wrote them."""
    run = run_of(trained)
    audit: dict[str, Any] = {} if run is None else read_json_if_there(run / "data.json").get("train") or {}
    return ["".join(part["text"] for part in sample["parts"]) for sample in audit.get("samples", ())]


def _laid_out(text: str, template: Template | None, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    if template is None:
        return text_ids(text, encoder, bos_id)
    try:
        return prompt_ids(Conversation((Turn("user", text),)), template, encoder, bos_id)
    except RowFault as fault:
        raise InputError(Fault("prompt", fault.what, fault.fix, code="SF-DATA-TEMPLATE")) from None


def _within(texts: Iterable[list[int]], source: str, longest: int) -> PromptSet:
    kept: list[tuple[int, ...]] = []
    room = TOGETHER
    for ids in texts:
        cut = ids[: min(LONGEST, longest, room)]
        if cut:
            kept.append(tuple(cut))
            room -= len(cut)
    return PromptSet(tuple(kept), source)
