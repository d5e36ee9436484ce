"""Data prepared like in a run, but without a config and a plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.sources.resolve import SourceSpec


def prepared(
    sources: Path | Sequence[SourceSpec],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    evaluation: Sequence[SourceSpec] | float | None = None,
    **changes: Any,
) -> PreparedData:
    """Call `prepare_data` on a file or on sources, with the tokenizer's own template.

    changes: arguments of `prepare_data` that differ from the usual ones.
    """
    eos = tokenizer.eos_token_id
    usual: dict[str, Any] = {
        "template": "tokenizer",
        "template_asked": True,
        "bos_id": tokenizer.bos_token_id,
        "pad_id": tokenizer.get_vocab().get("<|endoftext|>", eos),
        "stop_ids": (eos,),
        "max_length": 512,
        "max_samples": None,
        "train_on": "responses",
        "seed": 0,
        "cache": cache,
    }
    specs = [SourceSpec(str(sources))] if isinstance(sources, Path) else sources
    return prepare_data(specs, evaluation, tokenizer=tokenizer, **usual | changes)
