"""Counters of the system: processor time, page faults, throttling. The difference of two readings covers a period.

    before = read_counters()
    ...
    between = read_counters().since(before)

Reading takes some tenths of a millisecond. Counters that a system does not have stay 0.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

_TASKS = Path("/proc/self/task")
_NEARLY = 0.25  # of a core: background work of the system
_CGROUP = Path("/sys/fs/cgroup/cpu.stat")


@dataclass(frozen=True)
class Counters:
    """Totals, or the difference of two readings.

    seconds: wall-clock time.
    own: processor seconds of this process, all threads; busy: of all processes of the machine; steal: that the host of
        a virtual machine gave to others.
    waited: seconds in which threads of this process (those still alive) were ready but had no processor (Linux).
    throttled: seconds in which this container was stopped by its CPU limit.
    major_faults: pages of this process read from a disk; swapped: bytes that the machine moved to and from swap.
    recompiles: graphs compiled by torch.compile.
    alloc_retries: how often the GPU's cache had to be freed for an allocation.
    """

    seconds: float = 0.0
    own: float = 0.0
    busy: float = 0.0
    steal: float = 0.0
    waited: float = 0.0
    throttled: float = 0.0
    major_faults: int = 0
    swapped: int = 0
    recompiles: int = 0
    alloc_retries: int = 0

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier reading."""
        return Counters(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def left(self, cores: float) -> bool:
        """Whether other programs and the host left this process nearly that many cores in the period. Undefined below a
        tenth of a second, because systems count in hundredths."""
        others = self.busy + self.steal - self.own
        return self.seconds < 0.1 or others / self.seconds + cores <= (os.cpu_count() or 1) + _NEARLY


def is_quiet(cores: float) -> bool:
    """Whether nearly that many cores of this machine were idle in the last minute."""
    return psutil.getloadavg()[0] + cores <= (os.cpu_count() or 1) + _NEARLY


def read_counters(device: str = "cpu") -> Counters:
    """Read the counters. device: kind of the training device."""
    times = psutil.cpu_times()
    own = os.times()
    swap = psutil.swap_memory()
    return Counters(
        seconds=time.monotonic(),
        own=own.user + own.system,
        busy=times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0),
        steal=getattr(times, "steal", 0.0),
        waited=_waited(),
        throttled=_throttled(),
        major_faults=_major_faults(),
        swapped=swap.sin + swap.sout,
        recompiles=_recompiles(),
        alloc_retries=_alloc_retries() if device == "cuda" else 0,
    )


def busiest_others(seconds: float, *, siblings: bool = True) -> list[tuple[str, int, float]]:
    """Sleep, and return other processes by the cores that they used meanwhile: (name, process id, cores) for a tenth of
    a core or more, busiest first. Children of this process are its own work. siblings: False also leaves out processes
    with the same parent, such as ranks."""
    own = {os.getpid()} if siblings else {os.getpid(), os.getppid()}
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.pid not in own and process.ppid() not in own:
                found.append((process, process.info["name"], _cpu_seconds(process)))
        except psutil.Error:
            continue
    started = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - started
    others = []
    for process, name, before in found:
        try:
            others.append((name or "?", process.pid, (_cpu_seconds(process) - before) / passed))
        except psutil.Error:
            continue
    return sorted((one for one in others if one[2] >= 0.1), key=lambda one: -one[2])


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _waited() -> float:
    total = 0
    for task in _TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread may have just ended
            total += int(task.read_text().split()[1])
    return total / 1e9


def _throttled() -> float:
    try:
        lines = dict(line.split() for line in _CGROUP.read_text().splitlines())
        return int(lines.get("throttled_usec", 0)) / 1e6
    except (OSError, ValueError):
        return 0.0


def _major_faults() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _recompiles() -> int:
    """Count only if torch.compile is already imported, since importing it takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _alloc_retries() -> int:
    torch = sys.modules["torch"]
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
