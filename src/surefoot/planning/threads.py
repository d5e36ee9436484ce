"""Choose the number of CPU threads. It is part of the plan because it affects the order of summation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.plan import Choice
from surefoot.planning.precision import NARROW
from surefoot.system.hardware import Hardware

_SAME = "resumed runs use the same count, because others change the last bits"
THREAD_VARIABLES = frozenset({"OMP_NUM_THREADS", "MKL_NUM_THREADS"})
# A number, or OpenMP's list of numbers, the first for the outermost level. More digits overflow its counter.
_COUNTS = re.compile(r"\s*\+?([0-9]{1,19})\s*(,\s*\+?[0-9]{1,19}\s*)*")
CLEAR_GAIN = 1.2  # minimum speed-up of a measured count over all cores


def requested_threads(value: str) -> int | None:
    """Parse a thread count; None for an invalid value, which OpenMP ignores."""
    found = _COUNTS.fullmatch(value)
    return int(found[1]) or None if found else None


def _requested(environment: Mapping[str, str]) -> set[int]:
    values = (requested_threads(environment[name]) for name in THREAD_VARIABLES & environment.keys())
    return {count for count in values if count is not None}


def is_open(model: ModelFacts, hardware: Hardware, environment: Mapping[str, str]) -> bool:
    """Whether a measurement may decide: on a CPU, if the environment sets nothing and the model is wide enough."""
    return hardware.kind == "cpu" and not _requested(environment) and model.hidden >= NARROW


def plan_threads(
    model: ModelFacts, hardware: Hardware, environment: Mapping[str, str], rates: Mapping[int, float] | None = None
) -> Choice[int]:
    """Choose the number of threads: what the environment requests (or torch makes of it, never more than the cores). If
    it requests nothing, one for narrow models on a CPU; else all that torch would use, unless fewer were measured to be
    clearly faster (rates: FLOP/s by count), as in a container that sees more cores than it may use.

    A narrow model's operators take microseconds. A second thread saves little there, and on a busy machine each thread
    waits
    for the scheduler: the quickstart took 139 s on two threads and 9.5 s on one while other programs ran.
    """
    requested = _requested(environment)
    if hardware.cores in requested:
        return Choice(hardware.cores, f"set by the environment; {_SAME}", "user")
    if requested:
        why = f"torch's choice when the environment requests {max(requested)}; {_SAME}"
        return Choice(hardware.cores, why, "hardware")
    if hardware.kind == "cpu" and model.hidden < NARROW:
        why = f"layers of width {model.hidden} gain little from more threads, which slow down on a busy machine"
        return Choice(1, why, "default")
    if rates and is_open(model, hardware, environment):
        best = max(rates, key=lambda count: rates[count])
        if best < hardware.cores and hardware.cores in rates and rates[best] >= CLEAR_GAIN * rates[hardware.cores]:
            gain = rates[best] / rates[hardware.cores]
            return Choice(best, f"multiplied {gain:.1f} x as fast as {hardware.cores}; {_SAME}", "measured")
    return Choice(hardware.cores, _SAME, "hardware")
