"""Report device errors and lack of memory as EnvironmentFault: one line with remedies, exit code 3.

CUDA reports device errors asynchronously, long after their cause, and afterwards no value from the device can be
trusted. So the current step is abandoned and nothing of it is saved; the run resumes from the last checkpoint in a new
process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from surefoot.config.schema import RunConfig
from surefoot.planning.plan import RunPlan
from surefoot.system.errors import NO_MEMORY, EnvironmentFault, Fault
from surefoot.training.failure import is_device_error, is_out_of_memory

_FIX = (
    "check the system log (dmesg, nvidia-smi -q), then continue with --resume; "
    "if it fails again, continue on another device"
)


@contextmanager
def device_faults(phase: str, config: RunConfig, plan: RunPlan) -> Iterator[None]:
    """Turn a device error inside the block into one line with a remedy.

    phase: what the run is doing; the place of the fault.

    Raises EnvironmentFault, also for out-of-memory errors (see `memory_faults`).
    """
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


_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


@contextmanager
def memory_faults(phase: str, config: RunConfig, plan: RunPlan) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into one line with remedies.

    phase: what the run is doing; the place of the fault.

    Raises EnvironmentFault.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        requested = _REQUESTED.search(str(error))
        what = f"out of memory on {plan.device.value}" + (f" while allocating {requested[1]}" if requested else "")
        raise EnvironmentFault(Fault(phase, what, advice(config, plan), NO_MEMORY)) from error


def advice(config: RunConfig, plan: RunPlan) -> str:
    """Return what would help, beginning with what a resumed run may change, because that keeps all progress."""
    micro = plan.batch.micro.value
    now = [f"batch.micro={max(1, micro // 2)} (was {micro})"] if micro > 1 else []
    if not plan.memory.gradient_checkpointing.value:
        now.append("gradient_checkpointing=on")
    anew = [f"data.max_length below {plan.tokenizer.max_length.value}"]
    if plan.adapter is None:
        anew += ["an adapter", "optim.name: adafactor or adamw_8bit"]
        if plan.device.value != "cpu" and plan.parallel.offload == "none":
            anew.append("parallel.offload: optimizer")
    elif plan.precision.base.value != "nf4":
        anew.append("precision.base: nf4")
    elsewhere = f"a new run can also use {', '.join(anew)}"
    return f"continue with --resume {' or '.join(now)}; {elsewhere}" if now else elsewhere
