"""Find why a run became slower: the likeliest causes in words, from system counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from surefoot.report.wording import times
from surefoot.system.counters import Counters
from surefoot.system.messages import size_text

_FAULTS = 20.0  # major page faults per second: each takes at least a tenth of a millisecond
_SWAP = 10e6  # bytes per second
_STEAL = 0.1  # of the cores
_THROTTLED = 0.1  # of the time
_OTHERS = 0.5  # cores
_WAIT = 0.25  # of a step
_NEAR = 0.92  # of the memory
_CLOCK = 0.8  # of the GPU's clock


@dataclass(frozen=True)
class Moment:
    """Measurements of a slow period and of a normal one before it.

    before: counters of the normal period.
    slow: counters of the slow one.
    others: other processes and the cores that each uses.
    cores: cores that the process may use.
    threads, planned: torch's thread count, now and in the plan.
    wait: share of the slow steps spent waiting for data.
    waited: the same for normal steps.
    used, memory: bytes of this machine's memory, used and total.
    clock: the GPU's clock as a share of its value at the start; None if unknown.
    """

    before: Counters
    slow: Counters
    others: Sequence[tuple[str, int, float]] = ()
    cores: int = 1
    threads: int = 1
    planned: int = 1
    wait: float = 0.0
    waited: float = 0.0
    used: int = 0
    memory: int = 1
    clock: float | None = None


def causes(moment: Moment) -> Iterator[str]:
    """Yield the causes found, likeliest first."""
    slow, before = moment.slow, moment.before
    seconds = max(slow.seconds, 1e-3)
    if slow.major_faults / seconds > _FAULTS:
        yield f"memory is read back from the disk: {slow.major_faults / seconds:,.0f} major page faults per second"
    if slow.swapped / seconds > _SWAP:
        yield f"the machine swaps {size_text(int(slow.swapped / seconds))} per second: it has too little memory"
    if slow.throttled / seconds > _THROTTLED > before.throttled / max(before.seconds, 1e-3):
        yield f"the container is throttled by its CPU limit {slow.throttled / seconds:.0%} of the time"
    if slow.steal / seconds / moment.cores > _STEAL:
        yield f"the host gives {slow.steal / seconds / moment.cores:.0%} of the processor to other machines (steal)"
    taken = sum(cores for _, _, cores in moment.others)
    if taken >= _OTHERS:
        names = ", ".join(f"{name} (pid {pid}) {cores:.1f}" for name, pid, cores in moment.others[:3])
        yield f"other processes take {taken:.1f} of {moment.cores} cores: {names}"
    if moment.threads != moment.planned:
        yield f"torch computes on {moment.threads} threads, the plan says {moment.planned}: something has changed it"
    if moment.wait > _WAIT and moment.wait > 2 * moment.waited:
        yield f"{moment.wait:.0%} of a step is spent waiting for data: raise data.workers, or look at the disk"
    if slow.recompiles > 0:
        yield f"torch.compile has compiled {slow.recompiles} more graphs: lengths or settings change from step to step"
    if slow.alloc_retries > 0:
        yield f"the GPU's memory was full {times(slow.alloc_retries)} and the cache had to be freed: lower batch.micro"
    if moment.clock is not None and moment.clock < _CLOCK:
        yield f"the GPU's clock is at {moment.clock:.0%} of what it was: heat or a power limit"
    if moment.used > _NEAR * moment.memory:
        yield f"memory is nearly full: {size_text(moment.used)} of {size_text(moment.memory)}"


def slow_sentence(step: int, pace: float, tokens_per_second: float, found: Sequence[str]) -> str:
    """One line for the log. pace: speed as a share of the normal one, for the same work."""
    why = "; ".join(found[:2]) or "no cause was found: check the machine's load, temperature and disk"
    return (
        f"step {step}: the run has slowed down to {pace:.0%} of its own median pace for the same work "
        f"({tokens_per_second:,.0f} tok/s): {why}"
    )
