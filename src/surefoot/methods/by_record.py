"""What a config leaves to the first record of its data: `by-record`, as trainers decide that take texts as they stand
and lay out conversations. It is settled before anything is planned, since BOS and stop tokens depend on the template.
"""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.data.first_record import first_record, laid_out
from surefoot.families.templates import BY_RECORD
from surefoot.methods.asked_sources import KINDS_OF_RECORDS, trained_specs
from surefoot.system.errors import Fault, InputError


def settled(config: RunConfig) -> RunConfig:
    """The config with what the first record of every training source says; as it is where it leaves nothing open.
    Raises InputError for sources that ask for different things, and as reading data does."""
    data = config.data
    if BY_RECORD not in (data.template, data.train_on):
        return config
    found: dict[tuple[str, str], str] = {}
    for spec in trained_specs(config):
        found.setdefault(laid_out(first_record(spec), KINDS_OF_RECORDS[config.stage]), spec.path)
    if len(found) > 1:
        kinds = " and ".join(f"{path} asks for template {template}" for (template, _), path in found.items())
        raise InputError(Fault("data.train", f"{kinds}: one run has one", "train on records of one kind"))
    template, learned = next(iter(found))
    chosen = {"template": template} if data.template == BY_RECORD else {}
    chosen |= {"train_on": learned} if data.train_on == BY_RECORD else {}
    return config.model_copy(update={"data": data.model_copy(update=chosen)})
