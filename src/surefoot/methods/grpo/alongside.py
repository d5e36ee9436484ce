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
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
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
        self._answers: Future[list[Drawn]] | None = None
        self._weights: list[torch.Tensor] = []

    def begin(self, draws: Sequence[Callable[[], Drawn]]) -> None:
        """Begin to draw, one after the other. The results of the draws before must have been taken."""
        assert self._answers is None
        answers: Future[list[Drawn]] = Future()

        def draw() -> None:
            try:
                answers.set_result([one() for one in draws])
            except BaseException as error:  # raised where the answers are taken
                answers.set_exception(error)

        self._weights, self._answers = self._copies(), answers
        Thread(target=draw, name="rollouts ahead", daemon=True).start()

    @contextmanager
    def taken(self) -> Iterator[list[Drawn]]:
        """Wait for what is being drawn, and put in the weights that drew it for the block; [] if there is nothing."""
        answers, self._answers = self._answers, None
        if answers is None:
            yield []
            return
        drawn, now = answers.result(), self._copies()
        self._put(self._weights)
        try:
            yield drawn
        finally:
            self._put(now)
            self._weights = []

    def _copies(self) -> list[torch.Tensor]:
        return [one.detach().to("cpu", copy=True) for one in self._trained]

    @torch.no_grad()
    def _put(self, weights: Sequence[torch.Tensor]) -> None:
        for one, value in zip(self._trained, weights, strict=True):
            one.copy_(value)
