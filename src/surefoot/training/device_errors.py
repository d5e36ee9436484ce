"""Which exceptions are the device's, or its memory's: no word on what was computed, and no fault of the code.

torch has a class for what the driver reports and one for its own allocator on accelerators; what the libraries on top
report, and its allocator on the host, are plain RuntimeErrors, known by their words.
"""

from __future__ import annotations

import re

import torch

_LIBRARY = re.compile(r"\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_\w+|\b(CUDA|HIP|MPS|NCCL) error\b")
# What torch raises is of the class for an error of the device where the driver or a library allocates by itself.
_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried to allocate|can't allocate memory"
    r"|\b(CUDA|HIP) error: out of memory|\b(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def is_device_error(error: BaseException) -> bool:
    """Of the device, or of a library that drives it; memory that it lacks is none."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and bool(_LIBRARY.search(str(error)))
    )


def is_of_the_environment(error: BaseException) -> bool:
    """A device that failed, or memory that was lacking: no other way to compute it would help."""
    return is_out_of_memory(error) or is_device_error(error)
