"""Choose the number of CPU threads, and report which environment variables affect this run, are overridden by the
config, or are ignored. Threads are part of the plan because they affect the order of summation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.plan import Choice, EnvironmentFinding, RunPlan
from surefoot.planning.precision import NARROW
from surefoot.system.hardware import Hardware
from surefoot.system.variables import LAUNCHED_THREADS, VARIABLES, Verdict


def acts_below(name: str, *, compiled: bool) -> bool:
    """Whether a variable overrides the config or slows the run down.

    name: name of the variable.
    compiled: whether torch.compile is on.
    """
    return name in VARIABLES and VARIABLES[name].below in (("always", "compiling") if compiled else ("always",))


def environment_without_plan(
    environment: Mapping[str, str], device: str, threads: int
) -> tuple[EnvironmentFinding, ...]:
    """The findings before a plan exists.

    device: cpu | cuda | mps.
    threads: torch's number of threads here.
    """
    undecided = dict.fromkeys(("attention", "accumulation", "compile", "compute", "tf32"), "the run's own")
    return _findings(environment, device, {**undecided, "device": device, "threads": str(threads)})


def environment_findings(environment: Mapping[str, str], plan: RunPlan) -> tuple[EnvironmentFinding, ...]:
    """One finding per known variable that is set, given the plan."""
    return _findings(environment, plan.device.value, _values(plan))


def _findings(environment: Mapping[str, str], device: str, values: Mapping[str, str]) -> tuple[EnvironmentFinding, ...]:
    found = []
    for name in sorted(environment.keys() & VARIABLES.keys()):
        variable = VARIABLES[name]
        if variable.device is not None and variable.device != device:
            effect, verdict = f"matters only on {variable.device}; this run is on {device}", "ignored"
        elif name in THREAD_VARIABLES and (unmet := _unmet_threads(environment[name], values["threads"])):
            effect, verdict = unmet
        else:
            effect, verdict = variable.effect.format_map(values), variable.verdict
        prefix = f"read by {variable.reader}: " if variable.reader and verdict != "ignored" else ""
        found.append(EnvironmentFinding(name, environment[name], prefix + effect, verdict))
    return tuple(found)


def _unmet_threads(value: str, used: str) -> tuple[str, Verdict] | None:
    """Effect and verdict of a thread count that differs from the one used; None if it is the same."""
    requested, are = requested_threads(value), "is" if used == "1" else "are"
    if requested is None:
        return f"not a number of threads: {used} {are} used", "ignored"
    return None if str(requested) == used else (f"{requested} asked, {used} {are} used", "overridden")


def _values(plan: RunPlan) -> dict[str, str]:
    """Values of the plan by the placeholders in the effects."""
    kernels = ", ".join(plan.attention.kernels.value)
    return {
        "attention": plan.attention.implementation.value + (f" ({kernels})" if kernels else ""),
        "accumulation": str(plan.batch.accumulation),
        "compile": plan.compile.value,
        "compute": plan.precision.compute.value,
        "device": plan.device.value,
        "tf32": "on" if plan.precision.tf32.value else "off",
        "threads": str(plan.threads.value),
    }


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
    free = LAUNCHED_THREADS not in environment and not _requested(environment)
    return hardware.kind == "cpu" and free and model.hidden >= NARROW


def plan_threads(
    model: ModelFacts, hardware: Hardware, environment: Mapping[str, str], rates: Mapping[int, float] | None = None
) -> Choice[int]:
    """Choose the number of threads: what the environment requests (or torch makes of it, never more than the cores). If
    it requests nothing, one for narrow models on a CPU; else all that torch would use, unless fewer were measured to be
    clearly faster (rates: FLOP/s by count), as in a container that sees more cores than it may use.

    A narrow model's operators take microseconds. A second thread saves little there, and on a busy machine each thread
    waits for the scheduler: the quickstart took 139 s on two threads and 9.5 s on one while other programs ran.
    """
    if LAUNCHED_THREADS in environment:
        return Choice(hardware.cores, f"the cores, divided among the processes; {_SAME}", "hardware")
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
