"""The plan of a run that is not started: as `train` makes it, from the same examples.

Whether documents are packed, how, and how many tokens a micro-batch holds depend on how long the examples are. So the
data are read and tokenised, into the cache that the run takes them from. Where they cannot be read, the plan is made
without them, and says so.
"""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.methods.sources import settled
from surefoot.methods.table import KINDS
from surefoot.models.folder import resolve_folder
from surefoot.planning.plan import RunPlan
from surefoot.runs.lengths import lengths_of
from surefoot.runs.planned import make_plan
from surefoot.runs.setup import planned_tokenizer
from surefoot.runs.trained_template import with_template
from surefoot.system.errors import SurefootError


def foresee(config: RunConfig) -> tuple[RunPlan, str]:
    """The plan on this machine, and what keeps the data from being read; empty where they were.

    Raises as `make_plan` does. Records that the caller's own function would read are not."""
    config = settled(config)
    draft = make_plan(config, measure=False)  # all conflicts, before anything takes time
    try:
        base = resolve_folder(config.model.path, config.model.revision, weights=False)
        data = KINDS[config.stage].prepare(config, draft.tokenizer, planned_tokenizer(base, draft.tokenizer))
    except SurefootError as error:
        return make_plan(config), str(error)
    return with_template(make_plan(config, lengths=lengths_of(config, data)), data), ""
