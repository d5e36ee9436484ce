"""Choose the reference model of stages dpo and kto, and compute its memory."""

from __future__ import annotations

from surefoot.config.schema import RunConfig
from surefoot.method_facts.losses import NO_REFERENCE
from surefoot.planning.memory import base_bytes
from surefoot.planning.plan import Choice
from surefoot.planning.workload import Workload

ADAPTER_OFF, MODEL, CACHED, NONE = "adapter-off", "model", "cached", NO_REFERENCE
_WHY = {
    ADAPTER_OFF: "the base under the adapter: no second copy in memory",
    MODEL: "a second copy of the base, frozen, held as the base is",
    CACHED: "the base's log-probabilities are computed once before step 1 and stored in the cache folder",
}


def plan_reference(config: RunConfig) -> Choice[str] | None:
    """Return one of the names above, or the folder or hub id of another model; None if the stage has no reference."""
    if not config.method.reference:
        return None
    if not config.needs_reference:
        return Choice(NONE, f"{config.alignment.loss} only compares the two answers with each other", "default")
    requested = config.alignment.reference
    if requested == "auto":
        chosen = ADAPTER_OFF if config.adapter else MODEL
        why = _WHY[chosen] if config.adapter else f"{_WHY[chosen]}: all weights of the policy train"
        return Choice(chosen, why, "default")
    return Choice(requested, f"asked for: {_WHY.get(requested, 'another model, counted as large as this one')}", "user")


def reference_bytes(reference: Choice[str] | None, work: Workload) -> int:
    """Bytes of a second model in memory."""
    if reference is None or reference.value in (ADAPTER_OFF, CACHED, NONE):
        return 0
    return base_bytes(work)
