"""The C library's allocator, where torch takes the CPU's tensors from.

    keep_freed_memory()     # once, before a model is loaded

glibc gives what is freed at the end of its heap back to the system, and takes blocks above a size that it moves about
from the system one by one. Every page of them is cleared by the kernel when it is first written: in a training step,
which frees and asks for the same memory again and again, that was up to a seventh of the processor's time. So nothing
is given back, and only blocks of at least `LARGE` bytes come from the system. The peak stays as it is; between two
peaks the process holds on to the memory.

torch asks for blocks at addresses divisible by 64. glibc looks for a hole that is larger by that much and more, before
it cuts the rest off (sourceware bug 14581): a hole that such a block left is too small for another of its size, until
what lies beside it is free as well. A decoder layer asks for the same few sizes over and over, so a step takes more
than what is alive in it. `surefoot.planning.memory` counts that.
"""

from __future__ import annotations

import ctypes
import platform
import sys

LARGE = 32 << 20  # bytes; glibc's own upper limit for the size that it moves about
# From malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def is_glibc() -> bool:
    return sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> str:
    """Returns in words what the allocator does from here on; empty where it is as the system has it."""
    if not is_glibc():
        return ""
    library = ctypes.CDLL(None)
    done = [library.mallopt(_MMAP_THRESHOLD, LARGE), library.mallopt(_TRIM_THRESHOLD, _NEVER)]
    return f"freed memory is kept; blocks of {LARGE >> 20} MiB and more come from the system" if all(done) else ""
