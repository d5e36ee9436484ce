"""Convert the data sources of a config for `surefoot.data`, without torch.

`settled` also resolves settings that depend on the first record (`by-record`) before planning, because BOS and stop
tokens depend on the template.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.config.schema import RunConfig
from surefoot.config.sections import SourceConfig
from surefoot.data.sources.hub_files import TO_EVALUATE, Splits
from surefoot.data.sources.resolve import SourceSpec, first_record, template_and_labels
from surefoot.families.templates import BY_RECORD, is_users_own
from surefoot.system.errors import Fault, InputError


def trained_specs(config: RunConfig) -> list[SourceSpec]:
    """Specs of data.train."""
    return _specs(config.data.train, config.data.format, "train")


def evaluated_specs(config: RunConfig) -> list[SourceSpec]:
    """Specs of data.eval; empty if it names no sources."""
    named = config.data.eval
    return _specs(named, config.data.format, TO_EVALUATE) if isinstance(named, tuple) else []


def _specs(sources: Sequence[SourceConfig], default: str, split: str | Splits) -> list[SourceSpec]:
    """Convert sources of the config.

    default, split: format and split of a source that names none.
    """
    return [
        SourceSpec(
            source.path,
            format=default if source.format == "auto" else source.format,
            columns=source.columns,
            constant=source.constant,
            compose=source.compose,
            system=source.system,
            drop_system=source.drop_system,
            fill=source.fill,
            name=source.name,
            subset=source.subset,
            split=source.split or split,
            revision=source.revision,
            streaming=source.streaming,
            max_samples=source.max_samples,
            weight=source.weight,
            epochs=source.epochs,
            share=None if (part := source.share) is None else (tuple(part.of), part.take, part.in_order),
        )
        for source in sources
    ]


def settled(config: RunConfig) -> RunConfig:
    """Return the config with `by-record` settings resolved from the first record of every training source. Raises
    InputError if the sources disagree, and for errors in reading them."""
    data = config.data
    if BY_RECORD not in (data.template, data.train_on):
        return config
    found: dict[tuple[str, str], str] = {}
    for spec in trained_specs(config):
        found.setdefault(template_and_labels(first_record(spec), config.method.records), spec.path)
    if len(found) > 1:
        kinds = " and ".join(f"{path} needs template {template}" for (template, _), path in found.items())
        raise InputError(
            Fault("data.train", f"{kinds}: one run has one", "train on records of one kind", code="SF-DATA-FORMAT")
        )
    template, learned = next(iter(found))
    chosen = {"template": template} if data.template == BY_RECORD else {}
    chosen |= {"train_on": learned} if data.train_on == BY_RECORD else {}
    return config.model_copy(update={"data": data.model_copy(update=chosen)})


def template_in_use(config: RunConfig, planned: str) -> str:
    """Return the planned template; of a file its present place, since it may have been moved, unless the plan has its
    text with `data.template_arguments`."""
    data = config.data
    return data.template if is_users_own(data.template) and not data.template_arguments else planned
