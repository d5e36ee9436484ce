"""Apply an attention plan, and check with the profiler which kernel actually ran.

Plan and reality can differ: SDPA silently falls back if a kernel does not support a mask, dtype or dropout.
`attention_context` restricts SDPA to the planned kernels; `observe_kernels` reports which ones ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.integrations import sdpa_attention

from surefoot.models.quiet import muted_stderr
from surefoot.planning.plan import NONE, AttentionPlan, SdpaKernel
from surefoot.system.deterministic import deterministic_attention
from surefoot.system.errors import EnvironmentFault, Fault

_BACKEND: dict[SdpaKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Prefix of an operator's name in the profiler -> attention kernel. Backward operators have the same prefixes.
_OPERATOR = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "mem_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "flash_attn": "flash_attention_2",
}
_BESIDES = "surefoot::besides"


@contextmanager
def attention_context(plan: AttentionPlan) -> Iterator[None]:
    """Context in which SDPA may use only the planned kernels; for other implementations it does nothing.

    Enter it around forward *and* backward, because gradient checkpointing recomputes attention in the backward pass.
    """
    with ExitStack() as stack:
        if plan.implementation.value == "sdpa":
            stack.enter_context(sdpa_kernel([_BACKEND[kernel] for kernel in plan.kernels.value]))
            if "mem_efficient" in plan.kernels.value and "flash" not in plan.kernels.value:
                stack.enter_context(_written_out())
            if plan.deterministic.value and torch.cuda.is_available():  # a CPU's kernels need nothing for it
                stack.enter_context(deterministic_attention())
        yield


def wide_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which SDPA may use any kernel that supports fp32. On a GPU that must not be the math kernel,
    which keeps the scores of all pairs of tokens: of two rows of 4,096 in one layer of an 8B model 4 GiB, several
    times."""
    return _written_out() if device.type == "cuda" else nullcontext()


@contextmanager
def _written_out() -> Iterator[None]:
    """Context in which transformers repeats keys and values for every query head. torch's memory-efficient kernel does
    not support GQA; torch would silently run the math kernel instead (PyTorch issue 154363)."""
    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *given: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


def decoding_context() -> AbstractContextManager[object]:
    """Return the kernel context for generation, which differs from training: left padding needs a mask, and a single
    query row is not causal."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def observe_kernels(run: Callable[[], object], besides: Iterable[nn.Module] = ()) -> set[str]:
    """Call `run` under the profiler; return the attention kernels that ran: flash | mem_efficient | cudnn | math |
    flash_attention_2 | eager.

    besides: modules whose own kernels do not count.
    """
    profiler = profile(activities=[ProfilerActivity.CPU])  # operators are dispatched on the host, also for a GPU
    with muted_stderr():
        profiler.start()
    try:
        with _named(besides):
            run()
    finally:
        with muted_stderr():
            profiler.stop()
    # Read raw event names: `key_averages` first builds a tree of all calls, which is a hundred times as slow.
    recorded = profiler.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    events = recorded.kineto_results.events()
    spans = [(one.start_ns(), one.end_ns()) for one in events if one.name() == _BESIDES]
    counted = (one for one in events if not any(begin <= one.start_ns() <= end for begin, end in spans))
    return kernels_among(one.name() for one in counted)


@contextmanager
def _named(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which a profile shows when each of these modules runs, under the name `_BESIDES`."""
    running: list[record_function] = []

    def begin(*given: object) -> None:
        running.append(record_function(_BESIDES))
        running[-1].__enter__()

    def end(*given: object) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield


def kernels_among(operators: Iterable[str]) -> set[str]:
    """Return the attention kernels among a profile's operators; "eager" if there is a softmax but no kernel."""
    seen, softmax = set[str](), False
    for operator in operators:
        seen.update(kernel for prefix, kernel in _OPERATOR.items() if operator.startswith(prefix))
        softmax = softmax or operator == "aten::softmax"
    return seen or ({"eager"} if softmax else set())


def verify_attention(run: Callable[[], object], plan: AttentionPlan, besides: Iterable[nn.Module] = ()) -> list[str]:
    """Run one forward pass and return the attention kernels that ran in the language model.

    run: a forward pass with the run's shapes, dtype and contexts.
    besides: vision towers and cross-attention, whose heads and masks are their own: each takes the kernel that it can.

    Raises EnvironmentFault unless exactly the planned kernel ran.
    """
    seen = observe_kernels(run, besides)
    if plan.expected.value == NONE:
        seen -= {"eager"}  # a softmax that is not attention, such as a router's
    if seen != {plan.expected.value} - {NONE}:
        what = f"planned {plan.expected.value}, but the profiler saw {', '.join(sorted(seen)) or 'no attention'}"
        fix = "name the kernel you want, such as attention.math: on"
        raise EnvironmentFault(Fault("attention", what, fix, code="SF-PLAN-BROKEN"))
    return sorted(seen)
