"""The C library's allocator, where torch takes the CPU's tensors from.

    keep_freed_memory()               # once, before a model is loaded
    kept = KeptMemory(planned)        # then, after every step:
    kept.after_step()

glibc gives what is freed at the end of its heap back to the system, and takes blocks above a size that it moves about
from the system one by one. Every page of them is cleared by the kernel when it is first written: in a training step,
which frees and asks for the same memory again and again, that was up to a seventh of the processor's time. So nothing
is given back between one step and the next, and only blocks of at least `LARGE` bytes come from the system.

torch asks for blocks at addresses divisible by 64. glibc looks for a hole that is larger by that much and more, before
it cuts the rest off (sourceware bug 14581): a hole that such a block left is too small for another of its size, until
what lies beside it is free as well. What was cut off is small, and each thread keeps small blocks for itself when they
are freed: then it never is. A decoder layer asks for the same few sizes over and over, so a step takes more than what
is alive in it. Where threads keep none (`NO_THREAD_CACHE`, which glibc reads when a program starts, see
`surefoot.system.process`), that is a third of what it would be and nearly the same in every start.
`surefoot.planning.memory` counts it. Where each step has sizes of its own, as with packed
rows, holes of one step are no use to the next, and the heap grows from step to step. Once it holds more than was
planned, all that is free goes back, for one step at the price above.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

# Holes that a step leaves: many where each thread keeps small blocks, few where none does.
Holes = Literal["none", "few", "many"]
NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"  # of GLIBC_TUNABLES
LARGE = 32 << 20  # bytes; glibc's own upper limit for the size that it moves about
# From malloc.h.
_MXFAST = 1
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
# Where one step alone takes more than was planned, so much may stay above it, as a share of what was planned.
_ROOM = 0.05


def is_glibc() -> bool:
    return sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> str:
    """Returns in words what the allocator does from here on; empty where it is as the system has it."""
    if not is_glibc():
        return ""
    library = ctypes.CDLL(None)
    # _MXFAST: bins that keep small blocks apart from what is free beside them, as each thread's own do.
    settings = {_MMAP_THRESHOLD: LARGE, _TRIM_THRESHOLD: _NEVER, _MXFAST: 0}
    done = [library.mallopt(*setting) for setting in settings.items()]
    return f"freed memory is kept; blocks of {LARGE >> 20} MiB and more come from the system" if all(done) else ""


class KeptMemory:
    """Gives freed memory back after a step that left more than `limit` bytes here that were not here when this began.
    planned: the limit at first. Pages of files are not counted; weights that are such pages are part of what was
    planned, and have to be told: see `without`.

    A step that passes the limit although all was given back before it takes as much by itself: the limit rises to a
    little above that, or every step would pay for its pages anew. glibc alone.
    """

    def __init__(self, planned: int) -> None:
        self.limit = planned
        self._before = private_bytes()
        self._room = int(_ROOM * planned)
        self._empty = False  # whether all was given back before the step

    def without(self, mapped: int) -> None:
        """mapped: bytes of the plan that lie in files, see `mapped_bytes`."""
        self.limit -= mapped

    def after_step(self) -> None:
        taken = private_bytes() - self._before
        if taken <= self.limit:
            self._empty = False
        elif self._empty:
            self.limit, self._empty = taken + self._room, False
        else:
            _give_back()
            self._empty = True


def _give_back() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Of this process, now."""
    import psutil

    return psutil.Process().memory_info().rss


def private_bytes() -> int:
    """Of this process, now, without pages of files: code of libraries that is read in the first steps, mapped data."""
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def mapped_bytes(blocks: Iterable[tuple[int, int]]) -> int:
    """How many bytes of these blocks (address, size) are pages of a mapped file, as weights are that were not cast when
    they were read. Linux alone."""
    starts, ends = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():  # in the order of addresses
        place, *rest = line.split(maxsplit=5)
        if len(rest) == 5 and rest[4].startswith("/"):
            start, end = place.split("-")
            starts.append(int(start, 16))
            ends.append(int(end, 16))
    total = 0
    for address, size in blocks:
        mapping = bisect_right(starts, address) - 1
        total += size if mapping >= 0 and address < ends[mapping] else 0
    return total
