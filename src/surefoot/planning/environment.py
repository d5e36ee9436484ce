"""Report which environment variables affect this run, are overridden by the config, or are ignored."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.planning.plan import EnvironmentFinding, RunPlan
from surefoot.planning.threads import THREAD_VARIABLES, requested_threads
from surefoot.system.variables import VARIABLES, Verdict


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
