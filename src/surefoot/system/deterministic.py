"""Attention whose gradients are the same each time on a GPU.

torch's fused kernels add up the gradient of the queries from blocks of keys in the order in which these are done. A
switch of torch's gives each block its own place, but it is for the whole process: other operators raise errors under
it, or become slow. So it is turned on for the backward passes of attention alone.

    with deterministic_attention():
        output = F.scaled_dot_product_attention(...)
        output.backward(...)    # or later; after an error within it only a context puts the switch back

A layer that gradient checkpointing computes again is whole before attention's backward pass asks for a tensor of it, as
its last operators do so first; if attention were the last, all of the layer would be computed under the switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import functional as F

# Autograd's nodes of torch's fused kernels. Padding of narrow heads comes after them: they are searched for from the
# output on.
_KERNELS = ("ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention")
_AFTER = 3  # most nodes between a kernel's and the output's
_sdpa = F.scaled_dot_product_attention  # as the outermost context found it
_contexts = 0  # of the process: the threads of autograd compute checkpointed layers again


@contextmanager
def deterministic_attention() -> Iterator[None]:
    """Context for forward passes on a GPU; attention gives the same gradients each time afterwards."""
    global _contexts, _sdpa
    if not _contexts:
        _sdpa = F.scaled_dot_product_attention
    with nullcontext() if _contexts else switches_kept():
        _contexts += 1
        F.scaled_dot_product_attention = _attention
        try:
            yield
        finally:
            _contexts -= 1
            if not _contexts:
                F.scaled_dot_product_attention = _sdpa


@contextmanager
def switches_kept() -> Iterator[None]:
    """Context after which torch's switches are as before, also if a backward pass broke off with them on."""
    before = _switches()
    try:
        yield
    finally:
        _set(*before)


def _attention(*given: Any, **named: Any) -> torch.Tensor:
    output = _sdpa(*given, **named)
    if output.is_cuda and (node := _kernel_of(output)):
        _in_fixed_order(node)
    return output


def is_active() -> bool:
    """Whether the running code is in such a context."""
    return _contexts > 0


def from_kernel(output: torch.Tensor) -> torch.Tensor:
    """Return the output of a kernel that SDPA does not call, whose backward pass follows torch's switch."""
    if is_active() and output.is_cuda and output.grad_fn is not None:
        _in_fixed_order(output.grad_fn)
    return output


def _kernel_of(output: torch.Tensor) -> Node | None:
    """Return the node of a fused kernel; None if another one, or none that autograd knows, made the output."""
    node, steps = output.grad_fn, 0
    while node is not None and not node.name().startswith(_KERNELS):
        node = node.next_functions[0][0] if node.next_functions and steps < _AFTER else None
        steps += 1
    return node


def _in_fixed_order(node: Node) -> None:
    before: list[tuple[bool, bool, bool]] = []

    def begin(gradients: Any) -> None:
        before.append(_switches())
        _set(True, False, False)

    def end(inner: Any, outer: Any) -> None:
        _set(*before.pop())

    node.register_prehook(begin)
    node.register_hook(end)


def _switches() -> tuple[bool, bool, bool]:
    """Whether torch's switch is on, whether it only warns, and whether new memory is filled beside it."""
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), filled


def _set(on: bool, warns: bool, fills: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=warns)
    torch._C._set_deterministic_fill_uninitialized_memory(fills)
