"""Rollouts that a server draws while the trainer trains (`grpo.ahead` with `grpo.engine: vllm`).

    n: follow   ask for n + 1 ..............  update n      the server has the weights before update n
    n + 1:      .............. score, log-probabilities     of these weights, which are put in for it

A thread asks; everything else stays on the main thread. The weights that draw are those before the update, so old
log-probabilities are theirs too: a copy of the trained weights is kept, on the host, put in when the answers are there,
and taken out again. So the order of draws, scores and records, and every number, are the same as if the answers had
been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn

Drawn = TypeVar("Drawn")


class Alongside(Generic[Drawn]):
    """The rollouts that are being drawn, if there are any.

    model: whose trained weights draw.
    """

    def __init__(self, model: nn.Module):
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._thread = ThreadPoolExecutor(1, "rollouts ahead")
        self._draws: list[Future[Drawn]] = []
        self._weights: list[torch.Tensor] = []

    def begin(self, draws: Sequence[Callable[[], Drawn]]) -> None:
        """Begin to draw, one after the other. The results of the draws before must have been taken."""
        assert not self._draws
        self._weights = [_on_host(one) for one in self._trained]
        self._draws = [self._thread.submit(one) for one in draws]

    @contextmanager
    def taken(self) -> Iterator[list[Drawn]]:
        """Wait for what is being drawn, and put in the weights that drew it for the block; [] if there is nothing."""
        draws, self._draws = self._draws, []
        drawn = [one.result() for one in draws]
        if not drawn:
            yield []
            return
        self._exchange()
        try:
            yield drawn
        finally:
            self._exchange()
            self._weights = []

    def close(self) -> None:
        """Wait for what is being drawn: until then the server is in use, and the models are in memory."""
        self._thread.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights with those that are kept. One by one: the host needs no room for another copy of all."""
        for place, one in enumerate(self._trained):
            now = _on_host(one)
            one.copy_(self._weights[place])
            self._weights[place] = now


def _on_host(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to("cpu", copy=True)
