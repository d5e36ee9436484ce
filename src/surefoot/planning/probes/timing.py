"""What all probes share: timing under a budget, how large the timed shapes may be, random inputs, and failed trials.

The best of many short runs counts, the one that other programs disturbed least; candidates take turns, so that a slow
second does not hit one of them alone. The first run of each warms up and is not counted.

On a CPU attention is timed small: time is the same for each token and each head. A GPU that is asked for little shows
how fast a kernel is started, not how fast it computes; so there the run's own shapes are timed, as far as memory and
the operations of one pass allow (`LIMITS`). `attempt` tells what torch raises where a form cannot run here from what
leaves a GPU unusable for this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

Draw = Callable[..., torch.Tensor]  # sizes -> fp32 numbers, standard normal


def draws(device: torch.device, seed: int = 0) -> Draw:
    """A stream of its own; torch's is left alone. On a GPU they are drawn there: a processor thread would take seconds
    for the hundreds of millions that the probes of a GPU take."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *sizes: torch.randn(sizes, generator=generator, device=device)


def copy_rate(device: torch.device, *, budget: float = 0.1) -> float:
    """Bytes read and written per second in copying one large block to another; on a CPU by one thread."""
    size = LIMITS[device.type].copy_bytes
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with one_thread():
        seconds = best_seconds({"copy": lambda: target.copy_(source)}, budget=budget, rounds=20, wait=wait)
    return 2 * size / seconds["copy"]


NO_ROOM = "its scores have no room"  # why a form is not timed


@dataclass(frozen=True)
class Limits:
    """How much the probes of a kind of device may take.

    seconds: of all probes, besides imports and the start of a GPU.
    product_rows, product_numbers: of x and of the weight in a product, at most; a slice of a large matrix multiplies at
        the same rate as the whole.
    copy_bytes: of what is copied.
    attention_tokens, attention_heads: at most, None for the run's own.
    attention_operations: of a forward and backward pass in 16 bits at most, and a quarter of it in fp32, None where
        tokens and heads bound it.
    pointwise_numbers: of what is timed.
    pointwise_rows: fewest and most of it.
    """

    seconds: float
    product_rows: int
    product_numbers: int
    copy_bytes: int
    attention_tokens: int | None
    attention_heads: int | None
    attention_operations: int | None
    pointwise_numbers: int
    pointwise_rows: tuple[int, int]


LIMITS = {
    "cpu": Limits(
        seconds=3.0,  # measured in docs/evidence/probes.md
        product_rows=512,
        product_numbers=2**21,
        copy_bytes=2**26,  # beyond the caches
        attention_tokens=1024,
        attention_heads=4,  # they are independent
        attention_operations=None,
        pointwise_numbers=2**21,  # 8 MiB in fp32
        pointwise_rows=(64, 2048),
    ),
    "cuda": Limits(
        seconds=10.0,
        product_rows=4096,
        product_numbers=2**26,
        copy_bytes=2**29,
        attention_tokens=None,
        attention_heads=None,
        # Four rows of 4,096 tokens with 32 heads of 128 numbers are half of it. At 20 TFLOP/s, which every GPU with
        # 16-bit products reaches, a pass takes a fifth of a second; at the 4 of a small one in fp32 a quarter.
        attention_operations=2**42,
        # Its cache has up to 50 MiB, and a micro-batch there some thousand tokens; of few rows, starting a kernel would
        # be all that is timed.
        pointwise_numbers=2**25,
        pointwise_rows=(1024, 8192),
    ),
}


T = TypeVar("T")


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """(what it returns, empty) or (None, the first line of why it could not run).

    Raises AcceleratorError: after an illegal memory access every later call fails as well, whoever makes it, and forms
    that are right would be blamed. The process has to end (`surefoot.planning.probes.child`).
    """
    try:
        return run(), ""
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if torch.cuda.is_initialized() and not isinstance(error, torch.OutOfMemoryError):
            torch.cuda.synchronize()  # raises where the same fault came by way of Triton or a library
        return None, (str(error) or type(error).__name__).splitlines()[0]


Clock = Callable[[], float]


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU operators run on one thread inside. On a busy machine threads that wait for each other cost more than they
    save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_seconds(
    runs: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    rounds: int,
    wait: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Seconds of the best run per name.

    budget: seconds in all; each gets one counted run even when they are used up.
    wait: makes the device finish its work (synchronise), so that a run is timed to its end.
    """
    end = clock() + budget
    best: dict[str, float] = {}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            if name in best and clock() > end:
                return best | {name: _timed(run, wait, clock) for name, run in runs.items() if name not in best}
            best[name] = min(best.get(name, float("inf")), _timed(run, wait, clock))
    return best


def seconds_or_failures(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    *,
    budget: float,
    rounds: int,
    wait: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """As `best_seconds`, of those that run; and of the others why not: another program may take the memory before the
    inputs are made, or later.

    makers: by name, what makes the run with its inputs.
    begin: is told of each before it is made and before it runs.
    """
    failures: dict[str, str] = {}

    def tried(name: str, run: Callable[[], object]) -> object:
        """What `run` returns; None where it, or the run before, could not."""
        if name in failures:
            return None
        begin(name)
        found, why = attempt(run)
        if why:
            failures[name] = f"cannot be timed: {why}"
        return found

    made = {name: tried(name, make) for name, make in makers.items()}
    runs = {name: partial(tried, name, run) for name, run in made.items() if callable(run)}
    found = best_seconds(runs, budget=budget, rounds=rounds, wait=wait, clock=clock)
    return {name: seconds for name, seconds in found.items() if name not in failures}, failures


def _timed(run: Callable[[], object], wait: Callable[[], object], clock: Clock) -> float:
    wait()
    start = clock()
    run()
    wait()
    return clock() - start
