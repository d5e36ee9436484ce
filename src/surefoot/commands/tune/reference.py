"""The path that every setting is held against: attention by the textbook, nothing fused, nothing packed.

In fp32 where that fits the memory, else in the type that the run computes in. The base is held as the run holds it
where that is in 4 bits: another one would be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.config.overrides import with_settings
from surefoot.planning.fast_paths import PLAINEST
from surefoot.planning.plan import RunPlan
from surefoot.system.errors import EnvironmentFault, Fault


@dataclass(frozen=True)
class Reference:
    """config: plain values. compute: type of its matrix products."""

    config: Mapping[str, Any]
    compute: str


def choose_reference(given: Mapping[str, Any], plan: RunPlan, refused: Callable[[Mapping[str, Any]], str]) -> Reference:
    """given: the run's config as plain values. refused: why a config cannot run here, empty where it can. Raises
    EnvironmentFault where the plain path fits in no type."""
    reasons = []
    for compute in dict.fromkeys(("fp32", plan.precision.compute.value)):
        precision = {"compute": compute, **({"base": "nf4"} if plan.precision.base.value == "nf4" else {})}
        config = with_settings(given, {**PLAINEST, "data.workers": 0, "precision": precision})
        if not (reason := refused(config)):
            return Reference(config, compute)
        reasons.append(f"{compute}: {reason}")
    fix = "lower data.max_length for the search, or set batch.micro and data.packing yourself"
    what = f"the plain path, against which settings are held, cannot be tried ({'; '.join(reasons)})"
    raise EnvironmentFault(Fault("tune", what, fix, code="SF-TUNE"))
