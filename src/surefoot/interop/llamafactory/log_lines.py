"""Print the log lines of LLaMA-Factory, and of its fork that scales the BOS embedding."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.interop.llamafactory.data import SAME, writes_bos
from surefoot.interop.tool_log import End, Lines, RunFacts, ToolLog, trainer_row
from surefoot.interop.translation import Translation

_IGNORED = -100  # label of tokens without loss
_BOS_FILE = "bos_zero_config.json"


def log_lines(translation: Translation) -> ToolLog:
    bos = bool(translation.given.get("use_bos_zero_training"))
    template = str(translation.given.get("template"))
    adds = template in SAME and not writes_bos(template)  # otherwise the template itself writes BOS

    def ready(facts: RunFacts) -> Lines:
        return [*_example(facts), *_attention(facts), *_bos(facts, adds=adds)]

    return ToolLog(ready=ready, row=trainer_row, finished=_finished_with_bos if bos else _finished)


def _example(facts: RunFacts) -> Iterator[str]:
    labels = [token if learned else _IGNORED for token, learned in zip(facts.ids, facts.learned, strict=True)]
    yield "training example:"
    yield f"input_ids:\n{list(facts.ids)}"
    yield f"inputs:\n{facts.text}"
    yield f"label_ids:\n{labels}"
    yield f"labels:\n{facts.answer}"


def _attention(facts: RunFacts) -> Iterator[str]:
    if facts.attention == "eager":
        yield "Using vanilla attention implementation."


def _bos(facts: RunFacts, *, adds: bool) -> Iterator[str]:
    scale = facts.config.bos.scale
    if scale == 1:
        return
    what = "zeroed out" if scale == 0 else f"scaled by {scale:g}"
    yield "🎯 BOSZeroTrainer initialized"
    if adds and facts.bos is not None:
        yield "   - BOS tokens will be added to sequences"
    yield f"   - Position 0 embeddings will be {what}"
    yield f"✅ Found embedding layer: {facts.embedding}"
    yield "✅ BOS zeroing hook registered on embedding layer"
    if adds and facts.bos is not None and facts.ids[:1] == (facts.bos,):
        length = len(facts.ids)
        yield f"✅ Added BOS token ({facts.bos}) to sequence of length {length - 1} -> {length}"


def _finished(end: End) -> Lines:
    return ["Training completed successfully!"]


def _finished_with_bos(end: End) -> Lines:
    saved = [f"💾 BOS zeroing configuration saved to {end.folder}/{_BOS_FILE}"] if _BOS_FILE in end.files else []
    return [*saved, *_finished(end)]
