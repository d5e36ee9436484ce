"""Shared code of the probes: timing with a budget, limits of the timed shapes, random inputs, and failed trials.

The best of many short runs counts, because other programs disturbed it least; candidates take turns, so that a slow
second does not hit only one of them. The first run of each is a warm-up and does not count. On a GPU the kernels' own
time counts, as in a step whose launches run ahead of them.

On a CPU attention is timed with small shapes: every token and head costs the same. On a GPU small shapes would measure
launches, not computation; so the run's own shapes are timed there, as far as memory and the operations of one pass
allow (`LIMITS`). `attempt` separates errors of a form that cannot run here from errors that make a GPU unusable for
this process.
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
    """Return a random stream with its own generator; torch's is left alone. On a GPU numbers are generated there: a CPU
    thread would take seconds for hundreds of millions of numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *sizes: torch.randn(sizes, generator=generator, device=device)


def copy_rate(device: torch.device, *, budget: float = 0.1) -> float:
    """Return bytes read and written per second when copying a large block; on a CPU with one thread."""
    size = LIMITS[device.type].copy_bytes
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    with one_thread():
        seconds = best_seconds({"copy": lambda: target.copy_(source)}, device, budget=budget, rounds=20)
    return 2 * size / seconds["copy"]


NO_ROOM = "its scores have no room"  # why a form is not timed


@dataclass(frozen=True)
class Limits:
    """Limits of the probes for a kind of device.

    seconds: total time of all probes, besides imports and GPU start-up.
    product_rows, product_numbers: maximum rows of x and elements of the weight; a slice of a large matrix multiplies at
        the same rate as the whole.
    copy_bytes: size of the copied block.
    attention_tokens, attention_heads: maximum; None for the run's own.
    attention_operations: maximum FLOPs of a forward and backward pass in 16 bits, a quarter of it in fp32; None if
        tokens and heads are limited.
    pointwise_numbers: maximum elements of the timed tensors.
    pointwise_rows: minimum and maximum rows.
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
        copy_bytes=2**26,  # larger than the caches
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
        # Twice the FLOPs of four rows of 4,096 tokens with 32 heads of size 128. At 20 TFLOP/s, which every GPU with
        # 16-bit products reaches, a pass takes a fifth of a second; at the 4 TFLOP/s of a small one in fp32 a quarter.
        attention_operations=2**42,
        # The GPU cache has up to 50 MiB, and a micro-batch some thousand tokens; with few rows only the launch of a
        # kernel would be timed. 8,192 rows of an 8B model's MLP: a quarter of a gigabyte in 16 bits.
        pointwise_numbers=2**27,
        pointwise_rows=(1024, 8192),
    ),
}


T = TypeVar("T")


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result, "") or (None, first line of the error).

    Raises AcceleratorError: after an illegal memory access every later call fails too, and correct forms would be
    blamed. The process must end (`surefoot.planning.probes.child`).
    """
    try:
        return run(), ""
    except torch.AcceleratorError:
        raise
    except (RuntimeError, AssertionError, TypeError) as error:  # a package asserts what it supports, or lacks a word
        if torch.cuda.is_initialized() and not isinstance(error, torch.OutOfMemoryError):
            torch.cuda.synchronize()  # raises if the same error came through Triton or a library
        return None, (str(error) or type(error).__name__).splitlines()[0]


Clock = Callable[[], float]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU operators on one thread inside the block. On a busy machine, threads waiting for each other cost more
    than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_seconds(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    budget: float,
    rounds: int,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Return the seconds of the best run by name.

    budget: total seconds; each name gets one counted run even if they are used up.
    clock: of the budget, and of the runs on a CPU.
    """
    timed = _on_gpu if device.type == "cuda" else partial(_by_clock, clock)
    end = clock() + budget
    best: dict[str, float] = {}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            if name in best and clock() > end:
                return best | {name: timed(run) for name, run in runs.items() if name not in best}
            best[name] = min(best.get(name, float("inf")), timed(run))
    return best


def seconds_or_failures(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    device: torch.device,
    *,
    budget: float,
    rounds: int,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Like `best_seconds` for those that run, and the reasons of the others: another program may take the memory before
    the inputs are made, or later.

    makers: by name, a function that makes the run with its inputs.
    begin: called with each name before it is made and before it runs.
    """
    failures: dict[str, str] = {}

    def tried(name: str, run: Callable[[], object]) -> object:
        """Return what `run` returns; None if it, or an earlier call for this name, failed."""
        if name in failures:
            return None
        begin(name)
        found, why = attempt(run)
        if why:
            failures[name] = f"cannot be timed: {why}"
        return found

    made = {name: tried(name, make) for name, make in makers.items()}
    runs = {name: partial(tried, name, run) for name, run in made.items() if callable(run)}
    found = best_seconds(runs, device, budget=budget, rounds=rounds)
    return {name: seconds for name, seconds in found.items() if name not in failures}, failures


def _by_clock(clock: Clock, run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start


_AHEAD = 4_000_000  # clock cycles of a GPU, 2 ms: more than the launches of a run take


def _on_gpu(run: Callable[[], object]) -> float:
    """Seconds of the run's kernels. The GPU is kept busy while they are launched: a launch takes longer than a small
    kernel, and would otherwise be what is timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000
