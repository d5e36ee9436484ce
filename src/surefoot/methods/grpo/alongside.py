"""Rollouts that a server draws while the trainer trains (`grpo.ahead` with `grpo.engine: vllm`).

    n: follow   ask for n + 1 ..............  update n      the server has the weights before update n
    n + 1:      .............. score, log-probabilities     of these weights, which are put in for it

A thread asks; everything else stays on the main thread. The weights that draw are those before the update, so old
log-probabilities are theirs too: a copy of the trained weights is kept, on the host, put in when the answers are there,
and taken out again. So the order of draws, scores and records, and every number, are the same as if the answers had
been waited for.

A checkpoint waits for nothing: it has the copy, and what was asked for (`asked`, `weights`). A resumed run puts the
copy in once more for the server, and asks again. What it gets is a function of weights, seed, rollout and place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn

Drawn = TypeVar("Drawn")
_LOOK = 0.5  # seconds between looks at whether to give up


class Alongside(Generic[Drawn]):
    """The rollouts that are being drawn, if there are any.

    asked: step and number of each.
    weights: the trained weights that draw them.
    """

    def __init__(self, model: nn.Module, follow: Callable[[], None], give_up: Callable[[], None]):
        """model: whose trained weights draw. follow, give_up: as of `RolloutEngine`."""
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._follow, self._give_up = follow, give_up
        self._thread = ThreadPoolExecutor(1, "rollouts ahead")
        self._draws: list[Future[Drawn]] = []
        self.asked: Sequence[tuple[int, int]] = ()
        self.weights: list[torch.Tensor] = []

    def begin(self, asked: Sequence[tuple[int, int]], draw: Callable[[int, int], Drawn]) -> None:
        """Begin to draw, one after the other, with the weights as they are and as the server has them. The results of
        the draws before must have been taken."""
        assert not self.asked
        self.asked, self.weights = asked, [_on_host(one) for one in self._trained]
        self._submit(draw)

    def resume(self, draw: Callable[[int, int], Drawn]) -> None:
        """Begin again where `asked` and `weights` are a checkpoint's; else do nothing."""
        if self.asked and not self._draws:
            with self._put_in():
                self._follow()
            self._submit(draw)

    def arrived(self, give_up: Callable[[], bool]) -> bool:
        """Wait for what is being drawn; return False as soon as `give_up` is true before it is there."""
        left = set(self._draws)
        while left:
            if give_up():
                return False
            left = wait(left, timeout=_LOOK).not_done
        return True

    @contextmanager
    def taken(self) -> Iterator[list[Drawn]]:
        """Wait for what is being drawn, and put in the weights that drew it for the block; [] if there is nothing. The
        block calls `made` for each. If it ends with an error, a checkpoint has what is left."""
        drawn = [one.result() for one in self._draws]
        if not drawn:
            yield []
            return
        with self._put_in():
            yield drawn
        self._draws, self.weights = [], []

    def made(self, step: int, number: int) -> None:
        """Note that a rollout's episodes are made, so that it is not asked for again."""
        self.asked = [one for one in self.asked if one != (step, number)]

    def close(self) -> None:
        """Give up what is being drawn, and wait for its thread: until then the server is in use, and the models are in
        memory."""
        if not all(one.done() for one in self._draws):
            self._give_up()
        self._thread.shutdown(cancel_futures=True)

    def _submit(self, draw: Callable[[int, int], Drawn]) -> None:
        self._draws = [self._thread.submit(draw, *one) for one in self.asked]

    @contextmanager
    def _put_in(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the weights with those that are kept. One by one: the host needs no room for another copy of all."""
        for place, one in enumerate(self._trained):
            now = _on_host(one)
            one.copy_(self.weights[place])
            self.weights[place] = now


def _on_host(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to("cpu", copy=True)
