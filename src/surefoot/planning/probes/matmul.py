"""Measure how fast this machine multiplies matrices of the model's shapes, by dtype and number of threads.

On a CPU without instructions for 16-bit products bf16 can be hundreds of times slower than fp32; with them it is
several times faster. So there every dtype first multiplies something small, and one that would take too long skips the
full shape. Dtypes are compared on one thread: waiting for a preempted thread would hide the difference. The number of
threads is measured separately: more threads than cores wait for each other, and so do threads of a container that may
use fewer cores than it sees.

`rates_without` measures in a child process without some environment variables: libraries read them when they are
loaded, so unsetting them in this process has no effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F

from surefoot.planning.plan import DType
from surefoot.planning.probes.timing import LIMITS, best_seconds, draws, one_thread
from surefoot.system import process

TORCH_DTYPE: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL_NUMBERS, _SMALL_ROWS = 2**18, 16  # 42 ms even where bf16 is 500 times slower than fp32


def product_rates(
    shapes: Iterable[tuple[int, int]],
    device: torch.device,
    *,
    dtypes: Sequence[DType],
    budget: float = 0.25,
) -> dict[DType, float]:
    """Return FLOP/s by dtype for x [rows, inputs] times weight [outputs, inputs], the largest of `shapes` (inputs,
    outputs).

    On a CPU with one thread. Unsupported dtypes are absent.
    budget: seconds; exceeded if single runs are slower.
    """
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    with one_thread(), fp32_products("ieee"):
        return _small_then_full(largest, device, dtypes, budget)


def tf32_rate(shapes: Iterable[tuple[int, int]], device: torch.device, *, budget: float = 0.25) -> float | None:
    """Return FLOP/s of fp32 products with operands rounded to TF32, at the largest of `shapes`; None except on CUDA."""
    if device.type != "cuda":
        return None
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    with one_thread(), fp32_products("tf32"):
        return _small_then_full(largest, device, ("fp32",), budget)["fp32"]


@contextmanager
def fp32_products(how: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Set the precision of fp32 products on an NVIDIA GPU while the block runs (full, or 10-bit mantissas), regardless
    of TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and of what an earlier run has set."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = how
    try:
        yield
    finally:
        settings.fp32_precision = before


def _small_then_full(
    largest: tuple[int, int], device: torch.device, dtypes: Sequence[DType], budget: float
) -> dict[DType, float]:
    limits = LIMITS[device.type]
    rows, shape = limits.product_rows, slice_of(largest, limits.product_numbers)
    if device.type == "cuda":  # no GPU is that slow, and small products would tell the time of a launch
        return _rates(rows, shape, device, dtypes, budget, rounds=20)
    small = _rates(_SMALL_ROWS, slice_of(largest, _SMALL_NUMBERS), device, dtypes, budget / 5, rounds=3)
    quick: list[DType] = [dtype for dtype in small if 2 * rows * shape[0] * shape[1] / small[dtype] <= budget]
    return small | _rates(rows, shape, device, quick, budget, rounds=20)


def slice_of(shape: tuple[int, int], most: int) -> tuple[int, int]:
    """Halve the shape along its longer side until it has at most `most` elements."""
    inputs, outputs = shape
    while inputs * outputs > most:
        inputs, outputs = (inputs, outputs // 2) if outputs >= inputs else (inputs // 2, outputs)
    return inputs, outputs


@torch.no_grad()
def _rates(
    rows: int, shape: tuple[int, int], device: torch.device, dtypes: Iterable[DType], budget: float, rounds: int
) -> dict[DType, float]:
    inputs, outputs = shape
    draw = draws(device)
    x, weight = draw(rows, inputs), draw(outputs, inputs)
    runs = {}
    for dtype in dtypes:
        left, right = x.to(TORCH_DTYPE[dtype]), weight.to(TORCH_DTYPE[dtype])
        try:
            F.linear(left[:1], right)
        except RuntimeError:  # not supported on this device
            continue
        runs[dtype] = lambda left=left, right=right: F.linear(left, right)
    seconds = best_seconds(runs, device, budget=budget, rounds=rounds)
    return {dtype: 2 * rows * inputs * outputs / seconds[dtype] for dtype in runs}


_ROWS = 512  # tokens
_NUMBERS = 2**21  # maximum elements of the weight


def thread_counts(cores: int) -> tuple[int, ...]:
    """Thread counts to try: powers of two below `cores`, and `cores`."""
    return (*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores)


def thread_rates(shape: tuple[int, int], counts: Sequence[int], *, budget: float = 0.4) -> dict[int, float]:
    """Return FLOP/s in fp32 by number of threads for x [rows, inputs] times weight [outputs, inputs], with `shape`
    (inputs, outputs). budget: seconds; exceeded if single runs are slower."""
    inputs, outputs = slice_of(shape, _NUMBERS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    before = torch.get_num_threads()
    try:
        runs = {str(count): partial(_product, count, x, weight) for count in counts}
        seconds = best_seconds(runs, torch.device("cpu"), budget=budget, rounds=20)
    finally:
        torch.set_num_threads(before)
    return {count: 2 * _ROWS * inputs * outputs / seconds[str(count)] for count in counts}


@torch.no_grad()
def _product(count: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.set_num_threads(count)
    F.linear(x, weight)


_PATIENCE = 120.0  # seconds, mostly for importing torch
_PROGRAM = (sys.executable, "-m", "surefoot.planning.probes.matmul")


def rates_without(
    names: Collection[str],
    shape: tuple[int, int],
    dtypes: Sequence[DType],
    kind: str,
    *,
    program: Sequence[str] = _PROGRAM,
) -> dict[DType, float]:
    """Return `product_rates` of a child without the variables `names`; empty if it fails. kind: cpu | cuda."""
    requested = json.dumps({"shape": shape, "dtypes": list(dtypes), "kind": kind})
    try:
        done = subprocess.run(
            program,
            input=requested,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            env=process.environment_without(names),
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return {}


def main() -> None:
    """Entry point of the child."""
    requested = json.loads(sys.stdin.read())
    print(
        json.dumps(
            product_rates([tuple(requested["shape"])], torch.device(requested["kind"]), dtypes=requested["dtypes"])
        )
    )


if __name__ == "__main__":
    main()
