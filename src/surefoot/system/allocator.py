"""Settings of glibc's allocator, from which torch gets the CPU's tensors.

    keep_freed_memory()               # once, before a model is loaded
    kept = KeptMemory(planned)        # then, after every step:
    kept.after_step()

By default glibc returns freed memory at the end of its heap to the system, and gets blocks above a dynamic threshold
from the system one by one. The kernel clears each of their pages at the first write. A training step frees and requests
the same memory again and again, and spent up to a seventh of its processor time on this. So nothing is returned between
steps, and only blocks of at least `LARGE` bytes come from the system.

Fragmentation: torch requests blocks aligned to 64 bytes. glibc searches a hole larger by more than the alignment before
it cuts off the rest (sourceware bug 14581), so the hole of a freed block is too small for another block of its size
until a neighbor is free as well. The rest cut off is small, and each thread caches freed small blocks, so that it
never becomes free. A decoder layer requests the same few sizes over and over, so a step takes more memory than is alive
in it. Without the thread cache (`NO_THREAD_CACHE`, which glibc reads at program start, see `surefoot.system.process`)
this is a third as much and nearly the same in every process. `surefoot.planning.memory` counts it. If each step has its
own sizes, as with packed rows, holes of one step do not fit the next, and the heap grows. Once it exceeds the plan, all
free memory is returned, which costs one slow step.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

# Fragmentation after a step: "many" with glibc's thread cache, "few" without it.
Holes = Literal["none", "few", "many"]
NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"  # value for GLIBC_TUNABLES
LARGE = 32 << 20  # bytes; glibc's upper limit of the dynamic threshold
# From malloc.h.
_MXFAST = 1
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
# If a single step needs more than planned, the limit rises to this share of the plan above it.
_ROOM = 0.05


def is_glibc() -> bool:
    return sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"


def keep_freed_memory() -> str:
    """Configure the allocator. Returns a description of the change for messages, empty if nothing was changed."""
    if not is_glibc():
        return ""
    library = ctypes.CDLL(None)
    # _MXFAST: bins that do not merge freed small blocks with free neighbors, like the thread cache.
    settings = {_MMAP_THRESHOLD: LARGE, _TRIM_THRESHOLD: _NEVER, _MXFAST: 0}
    done = [library.mallopt(*setting) for setting in settings.items()]
    return f"freed memory is kept; blocks of {LARGE >> 20} MiB and more come from the system" if all(done) else ""


class KeptMemory:
    """Returns freed memory to the system after a step in which this process grew by more than `limit` bytes.

    planned: the initial limit. Pages of files are not counted; weights that are mapped files are part of the plan and
        must be subtracted with `without`.

    If a step exceeds the limit although everything was returned before it, it needs that much: the limit rises to a
    little above it, or every step would pay for its pages again. glibc only.
    """

    def __init__(self, planned: int) -> None:
        self.limit = planned
        self._before = private_bytes()
        self._room = int(_ROOM * planned)
        self._empty = False  # whether free memory was returned before the step

    def without(self, mapped: int) -> None:
        """mapped: bytes of the plan that are mapped files, see `mapped_bytes`."""
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
    """Resident memory of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def private_bytes() -> int:
    """Resident memory of this process in bytes without pages of files (libraries' code, mapped data)."""
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def mapped_bytes(blocks: Iterable[tuple[int, int]]) -> int:
    """How many bytes of these blocks (address, size) are mapped files, such as weights that were not cast when loaded.
    Linux only."""
    starts, ends = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():  # sorted by address
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
