"""How many CPU threads multiply fastest. More threads than cores wait for each other, and so do threads of a container
that may use fewer cores than it sees: only a measurement tells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional as F

from surefoot.planning.probes.matmul import slice_of
from surefoot.planning.probes.timing import best_seconds

_ROWS = 512  # tokens in flight
_NUMBERS = 2**21  # in the weight at most


def thread_counts(cores: int) -> tuple[int, ...]:
    """What is worth trying: powers of two below `cores`, and `cores`."""
    return (*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores)


def thread_rates(shape: tuple[int, int], counts: Sequence[int], *, budget: float = 0.4) -> dict[int, float]:
    """FLOP/s in fp32 by number of threads for x [rows, inputs] times weight [outputs, inputs], `shape` (inputs,
    outputs). budget: seconds, exceeded where single runs are slower."""
    inputs, outputs = slice_of(shape, _NUMBERS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    before = torch.get_num_threads()
    try:
        runs = {str(count): partial(_product, count, x, weight) for count in counts}
        seconds = best_seconds(runs, budget=budget, rounds=20)
    finally:
        torch.set_num_threads(before)
    return {count: 2 * _ROWS * inputs * outputs / seconds[str(count)] for count in counts}


@torch.no_grad()
def _product(count: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.set_num_threads(count)
    F.linear(x, weight)
