"""A device that fails, or has no memory left, is the environment's fault: one line, exit 3, and nothing of it is saved.

An error of the device is told long after its cause, and from then on no number that comes from it can be trusted. So
the step under way is given up, and the run goes on from the last checkpoint, in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.config.schema import RunConfig
from surefoot.planning.plan import RunPlan
from surefoot.runs.memory_faults import memory_faults
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.device_errors import is_device_error

_FIX = (
    "look for the device in the log of the system (dmesg, nvidia-smi -q), then go on with --resume; "
    "should it come again, on another device"
)


@contextmanager
def device_faults(phase: str, config: RunConfig, plan: RunPlan) -> Iterator[None]:
    """Raises EnvironmentFault for a device that failed inside, and what `memory_faults` raises. phase: what the run was
    doing, as a place."""
    with memory_faults(phase, config, plan):
        try:
            yield
        except RuntimeError as error:
            if not is_device_error(error):
                raise
            first = str(error).strip().partition("\n")[0]
            raise EnvironmentFault(
                Fault(phase, f"{plan.device.value} failed: {first}", _FIX, code="SF-DEVICE")
            ) from error
