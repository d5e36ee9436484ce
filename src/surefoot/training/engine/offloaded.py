"""One process whose optimizer works in host memory: fp32 weights, gradient sums and moments lie there, and the device
holds what its products need.

    device  the trained weights, those of the decoder's linear layers in the dtype of the products if it is narrower;
            gradients for as long as they take to be copied
    host    fp32 weights (the masters), the sums of their gradients, the optimizer's state; pinned buffers for copies
            under way

    backward   a parameter's gradient is copied to the host as soon as the pass has made it, by a stream of its own, and
               a thread adds it to its sum; the device frees it
    step       norm, clipping and optimizer run on the host, after all sums are there
    after it   each weight is rounded to the device's dtype and copied back, in order; the next forward pass is queued
               behind the copies

The host waits for the device where a step needs its result (the guard, and the sums before it), and where more is
under way than the largest gradient. Numbers are those of `SingleEngine` wherever the same kernels compute: autocast
rounds an fp32 weight of a linear layer to the same value, and hands on the same gradient, which is summed in fp32 here
as there. (A weight that is used in two forward passes of one backward pass is an exception: its gradients are added
before they are widened.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from surefoot.models.decoder import decoder_linears
from surefoot.training.engine.base import Groups, Members, PerGroup, groups_of
from surefoot.training.engine.replicated import SingleEngine
from surefoot.training.engine.sharding import whole_parameters
from surefoot.training.optimizer import Optimizer, trainable_parameters


class OffloadedEngine(SingleEngine):
    """A single process with its optimizer in host memory.

    model: on the CPU or on `device`; afterwards on `device`.
    narrow: dtype in which the device holds the trained weights of the decoder's linear layers; None: fp32, like all
        others.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Members,
        make_optimizer: Callable[[Groups], Optimizer],
        device: torch.device,
        *,
        narrow: torch.dtype | None,
    ):
        grouped = groups_of(model, members)
        parameters = trainable_parameters(model)
        self._masters = _move(model, parameters, device, narrow)
        groups = {group: {name: self._masters[name] for name in named} for group, named in grouped.items()}
        super().__init__(model, parameters, make_optimizer(groups), groups)
        self.stepped = self._masters
        self._sums: dict[str, torch.Tensor] = {}  # kept from step to step: fresh pages would have to be cleared
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One thread, so that gradients are added in the order of the passes: the rounding of a sum depends on it.
        self._adder = ThreadPoolExecutor(1, "gradients")
        largest = max(one.numel() * one.element_size() for one in parameters.values())
        self._down, self._up = _OnTheWay(largest), _OnTheWay(largest)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._give_up, name))
            for name, parameter in parameters.items()
        ]

    def reduce(self) -> None:
        self._down.wait()

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return {name: norm.to(self.device) for name, norm in super().grad_norms().items()}

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        super().apply(lr, norms, max_grad_norm)
        for name, parameter in self.parameters.items():
            self._send(self._masters[name].detach(), parameter.detach())
        self._up.wait_for_room()

    def discard(self) -> None:
        self._down.wait()
        super().discard()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        self._down.wait()
        return super().gradients()

    @contextmanager
    def gathered(self, frozen: bool = True) -> Iterator[None]:
        masters = {id(parameter): self._masters[name] for name, parameter in self.parameters.items()}

        def whole(parameter: nn.Parameter) -> torch.Tensor:
            return masters.get(id(parameter), parameter).detach()

        with whole_parameters(self.model, whole, keep=True, frozen=frozen):
            yield

    def release(self) -> None:
        self._adder.shutdown()
        for hook in self._hooks:  # torch would hold them, and they the engine and its model, for the process's life
            hook.remove()

    def _give_up(self, name: str, parameter: torch.Tensor) -> None:
        """Start to copy a gradient to the host, on the thread of the backward pass."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._stream is None:
            self._add(name, gradient)
            return
        # Otherwise the copy could begin before the pass has written the gradient.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # Pinned: from pageable memory the copy would block the host.
        staged = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            staged.copy_(gradient, non_blocking=True)
            arrived = self._stream.record_event().synchronize
        # The thread holds the gradient until it has been read: its memory belongs to the stream of the pass.
        added = self._adder.submit(self._add, name, staged, arrived, gradient)
        self._down.append(staged.nbytes, added.result)

    def _add(
        self,
        name: str,
        gradient: torch.Tensor,
        arrived: Callable[[], object] = lambda: None,
        source: torch.Tensor | None = None,
    ) -> None:
        """Add a gradient to its sum. Gradients of a parameter arrive in the order of the backward passes."""
        arrived()
        master = self._masters[name]
        if master.grad is None:
            if name not in self._sums:
                self._sums[name] = torch.empty_like(master, memory_format=torch.contiguous_format)
            master.grad = self._sums[name].copy_(gradient)
        else:
            master.grad.add_(gradient)

    def _send(self, master: torch.Tensor, parameter: torch.Tensor) -> None:
        """Copy a stepped weight to the device."""
        if self._stream is None:
            parameter.copy_(master)
            return
        # Rounded here: a copy that changes the dtype would not return before the device has it.
        staged = torch.empty(master.shape, dtype=parameter.dtype, pin_memory=True).copy_(master)
        parameter.copy_(staged, non_blocking=True)
        self._up.append(staged.nbytes, torch.cuda.current_stream(self.device).record_event().synchronize)


class _OnTheWay:
    """Copies that have begun. The host waits for the oldest while they are more than `most` bytes."""

    def __init__(self, most: int):
        self._most = most
        self._copies: deque[tuple[int, Callable[[], object]]] = deque()

    def append(self, size: int, wait: Callable[[], object]) -> None:
        """size: bytes. wait: returns when the copy is done, and raises what went wrong."""
        self._copies.append((size, wait))
        self.wait_for_room()

    def wait_for_room(self) -> None:
        while sum(size for size, _ in self._copies) > self._most:
            self._copies.popleft()[1]()

    def wait(self) -> None:
        while self._copies:
            self._copies.popleft()[1]()


def _move(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device, narrow: torch.dtype | None
) -> dict[str, nn.Parameter]:
    """Put the model on the device and return its trained weights, in fp32 on the host, by name."""
    narrowed = decoder_linears(model) if narrow else frozenset()
    masters = {}
    for name, parameter in parameters.items():
        whole = parameter.detach().to("cpu")
        masters[name] = nn.Parameter(whole)
        parameter.data = whole.to(device, narrow if name in narrowed else None, copy=True)
    model.to(device)
    return masters
