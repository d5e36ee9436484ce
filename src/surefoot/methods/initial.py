"""The saved adapter that training starts from (`adapter.initial`), checked before weights are loaded."""

from __future__ import annotations

from pathlib import Path

from surefoot.config.paths import nearest_path
from surefoot.config.schema import RunConfig
from surefoot.models.facts import facts_of
from surefoot.models.folder import require_adapter, resolve_folder
from surefoot.models.saved_adapter import SavedAdapter, check_shape, fitted, read_adapter
from surefoot.planning.plan import RunPlan
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import looks_local

KEY = "adapter.initial"


def find_initial(config: RunConfig, plan: RunPlan, base: Path) -> SavedAdapter | None:
    """Return the adapter, converted to the modules of the base; None if the run starts with a new one.

    base: folder of the base model. Of both only settings and the headers of weights are read.

    Raises InputError if there is no such adapter, or if its kind, scale, rank or modules are not the plan's.
    """
    if config.adapter is None or config.adapter.initial is None or plan.adapter is None:
        return None
    named = config.adapter.initial
    if looks_local(named) and not Path(named).is_dir():
        what = f"folder {named} does not exist"
        raise InputError(Fault(KEY, what, nearest_path(Path(named), ()), code="SF-FILE-MISSING"))
    folder = resolve_folder(named, config.adapter.initial_revision, weights=True)
    require_adapter(folder, named)
    facts = facts_of(base)
    saved = fitted(read_adapter(folder), facts)
    check_shape(saved, plan.adapter, facts)
    return saved
