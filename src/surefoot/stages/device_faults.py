"""A device that fails, or has no memory left, is the environment's fault: one line, exit 3, and nothing of it is saved.

An error of the device is told long after its cause, and from then on no number that comes from it can be trusted. So
the step under way is given up, and the run goes on from the last checkpoint, in another process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from surefoot.config.schema import RunConfig
from surefoot.errors import EnvironmentFault, Fault
from surefoot.planning.plan import RunPlan
from surefoot.stages.memory_faults import is_out_of_memory, memory_faults

# torch has a class for what the driver reports; what the libraries on top of it report is a plain RuntimeError.
_LIBRARY = re.compile(r"\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_\w+|\b(CUDA|HIP|MPS|NCCL) error\b")
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
            raise EnvironmentFault(Fault(phase, f"{plan.device.value} failed: {first}", _FIX)) from error


def is_device_error(error: BaseException) -> bool:
    """Of the device, or of a library that drives it; memory that it lacks is none."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and bool(_LIBRARY.search(str(error)))
    )


def is_of_the_environment(error: BaseException) -> bool:
    """A device that failed, or memory that was lacking: no word on what was computed, and no other way to compute it
    would help."""
    return is_out_of_memory(error) or is_device_error(error)
