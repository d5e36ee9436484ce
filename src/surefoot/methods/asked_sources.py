"""The data sources of a config as `surefoot.data` understands them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.config.mixture import SourceConfig
from surefoot.config.schema import RunConfig
from surefoot.data.hub.files import TO_EVALUATE, Splits
from surefoot.data.kind import Kind
from surefoot.data.sources import SourceSpec

KINDS_OF_RECORDS: dict[str, Kind] = {
    "pretrain": "answers",
    "sft": "answers",
    "reward": "pairs",
    "dpo": "pairs",
    "kto": "judged",
    "ppo": "prompts",
}


def trained_specs(config: RunConfig) -> list[SourceSpec]:
    """Of data.train."""
    return _specs(config.data.train, config.data.format, "train")


def evaluated_specs(config: RunConfig) -> list[SourceSpec]:
    """Of data.eval; none where that names no sources."""
    named = config.data.eval
    return _specs(named, config.data.format, TO_EVALUATE) if isinstance(named, tuple) else []


def _specs(sources: Sequence[SourceConfig], default: str, split: str | Splits) -> list[SourceSpec]:
    """default, split: the format and the split of a source that names none."""
    return [
        SourceSpec(
            source.path,
            format=default if source.format == "auto" else source.format,
            columns=source.columns,
            name=source.name,
            subset=source.subset,
            split=source.split or split,
            revision=source.revision,
            streaming=source.streaming,
            max_samples=source.max_samples,
            weight=source.weight,
            epochs=source.epochs,
            share=None if source.share is None else (tuple(source.share.of), source.share.take),
        )
        for source in sources
    ]
