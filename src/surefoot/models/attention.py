"""Carry out an attention plan, and see with the profiler which kernel really ran.

What was planned and what ran can differ: SDPA falls back silently when a mask, a dtype or dropout does not suit a
kernel. `attention_context` lets torch dispatch to the planned kernels only, `observe_kernels` reports what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers.integrations import sdpa_attention

from surefoot.models.quiet import muted_stderr
from surefoot.planning.attention import NONE
from surefoot.planning.plan import AttentionPlan, SdpaKernel
from surefoot.system.errors import EnvironmentFault, Fault

_BACKEND: dict[SdpaKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# How the profiler names an attention kernel. Backward operators begin with the same words.
_OPERATOR = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "mem_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "flash_attn": "flash_attention_2",
}


def attention_context(plan: AttentionPlan) -> AbstractContextManager[object]:
    """A fresh context in which SDPA may use exactly the planned kernels. Nothing for other implementations.

    Enter it around forward *and* backward: gradient checkpointing runs attention again in the backward pass.
    """
    if plan.implementation.value != "sdpa":
        return nullcontext()
    dispatch = sdpa_kernel([_BACKEND[kernel] for kernel in plan.kernels.value])
    needs_all_heads = "mem_efficient" in plan.kernels.value and "flash" not in plan.kernels.value
    return _written_out(dispatch) if needs_all_heads else dispatch


@contextmanager
def _written_out(dispatch: AbstractContextManager[object]) -> Iterator[None]:
    """Inside, transformers hands SDPA a key and a value for every query head. torch's memory-efficient kernel takes no
    others: of grouped ones torch would run the math kernel, without a word (PyTorch issue 154363)."""
    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *given: False
    try:
        with dispatch:
            yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


def decoding_context() -> AbstractContextManager[object]:
    """Kernels for generation, whatever training uses: left padding needs a mask, and one query row has no causality."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def observe_kernels(run: Callable[[], object]) -> set[str]:
    """Run under the profiler; which attention ran: flash | mem_efficient | cudnn | math | flash_attention_2 | eager."""
    profiler = profile(activities=[ProfilerActivity.CPU])  # operators are dispatched, and seen, on the host
    with muted_stderr():
        profiler.start()
    try:
        run()
    finally:
        with muted_stderr():
            profiler.stop()
    # The names as they were recorded: `key_averages` builds a tree of all calls first, a hundred times as slow.
    recorded = profiler.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    return kernels_among(event.name() for event in recorded.kineto_results.events())


def kernels_among(operators: Iterable[str]) -> set[str]:
    """Attention kernels by the operators that a profile shows. eager: a softmax of its own and no kernel."""
    seen, softmax = set[str](), False
    for operator in operators:
        seen.update(kernel for prefix, kernel in _OPERATOR.items() if operator.startswith(prefix))
        softmax = softmax or operator == "aten::softmax"
    return seen or ({"eager"} if softmax else set())


def verify_attention(run: Callable[[], object], plan: AttentionPlan) -> list[str]:
    """Run one forward pass and raise EnvironmentFault unless the planned kernel, and no other, was seen.

    run: a forward pass at the run's own shapes, dtype and contexts. Returns what was seen, for the plan's record.
    """
    seen = observe_kernels(run)
    if plan.expected.value == NONE:
        seen -= {"eager"}  # a softmax, as routers of experts have it
    if seen != {plan.expected.value} - {NONE}:
        what = f"planned {plan.expected.value}, but the profiler saw {', '.join(sorted(seen)) or 'no attention'}"
        fix = "name the kernel you want, such as attention.math: on"
        raise EnvironmentFault(Fault("attention", what, fix, code="SF-PLAN-BROKEN"))
    return sorted(seen)
