"""Norms, rotary positions and gated activations on a CPU: the plain way, surefoot's, torch's own and compiled ones.

    python benchmarks/pointwise.py [--tokens 2048] [--turns 9] [--compiled] [--step]

Forward and backward on one thread, CPU time of this process, medians of interleaved turns. --compiled adds the plain
formulas under torch.compile (a compiler must be there), and says what compiling took, its children included. --step
times a whole LoRA step instead, in the model of benchmarks/adapters.py. Prints what docs/evidence/pointwise.md has.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from adapters import batch, model
from surefoot.kernels.pointwise import NormForm, plain_norm, plain_rotary, rms_norm, rotary_alone
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.fast.pointwise import install

SIZES = ((768, 12, 64, 2048), (2048, 32, 64, 5632), (4096, 32, 128, 11008))  # width, heads, numbers per head, gate
LLAMA = NormForm(1e-5, 0.0, narrow_first=True)


class OwnGate(torch.autograd.Function):
    """silu(gate) up, which keeps gate and up and computes silu again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        inner = dy * up
        torch.ops.aten.silu_backward.grad_input(inner, gate, grad_input=inner)
        return inner, F.silu(gate).mul_(dy)


def passed(way: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], outer: torch.Tensor) -> None:
    torch.autograd.grad(way(*given), [one for one in given if one.requires_grad], outer)


def medians(arms: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Milliseconds of CPU time."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, arm in arms.items():
            start = time.process_time()
            arm()
            if turn:  # the first one warms up
                taken[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(times) for name, times in taken.items()}


def compiled(way: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(way, dynamic=True, fullgraph=True)


def operators(width: int, heads: int, head_dim: int, gate: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Part -> (its ways by name, inputs, gradient of the output)."""

    def make(*shape: int, learns: bool = False) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_(learns)

    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().view(1, tokens, heads, head_dim).transpose(1, 2)

    cos, sin = make(1, tokens, head_dim), make(1, tokens, head_dim)
    q = by_head(make(tokens, width)).requires_grad_()
    norms = {
        "plain": partial(plain_norm, form=LLAMA),
        "own": partial(rms_norm, form=LLAMA),
        "torch": lambda x, weight: F.rms_norm(x, (width,), weight, LLAMA.eps),
    }
    turns = {
        "plain": lambda q: plain_rotary(q, cos.unsqueeze(1), sin.unsqueeze(1)),
        "own": lambda q: rotary_alone(q, cos, sin),
    }
    gates = {"plain": lambda gate, up: F.silu(gate) * up, "own": OwnGate.apply}
    return {
        "norm": (norms, (make(tokens, width, learns=True), make(width)), make(tokens, width)),
        "norm, weight trains": (
            norms,
            (make(tokens, width, learns=True), make(width, learns=True)),
            make(tokens, width),
        ),
        "rotary": (turns, (q,), by_head(make(tokens, width))),
        "silu gate": (gates, (make(tokens, gate, learns=True), make(tokens, gate, learns=True)), make(tokens, gate)),
    }


def seconds_used() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def compare_operators(tokens: int, turns: int, with_compiled: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            for part, (ways, given, outer) in operators(*size, tokens, dtype).items():
                arms = {name: partial(passed, way, given, outer) for name, way in ways.items()}
                cost = ""
                if with_compiled:
                    arms["compiled"] = partial(passed, compiled(ways["plain"]), given, outer)
                    start = seconds_used()
                    arms["compiled"]()
                    cost = f"  compiling: {seconds_used() - start:.1f} s"
                found = medians(arms, turns)
                times = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
                gain = found["plain"] / found["own"]
                print(f"{str(dtype)[6:]:9} {size[0]:5} {part:20} {times}  own {gain:.2f} x{cost}", flush=True)


def step(one: torch.nn.Module, bf16: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = sft_loss(one, batch()).loss
    loss.backward()
    one.zero_grad(set_to_none=True)


def compare_steps(turns: int) -> None:
    for bf16 in (True, False):
        plain, own = (model("lora", True, bf16) for _ in range(2))
        install(own)
        arms = {"plain": partial(step, plain, bf16), "own": partial(step, own, bf16)}
        found = medians(arms, turns)
        print(f"{'bf16' if bf16 else 'fp32'} step: {found}, own {found['plain'] / found['own']:.3f} x", flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tokens", type=int, default=2048)
    asked.add_argument("--turns", type=int, default=9)
    asked.add_argument("--compiled", action="store_true")
    asked.add_argument("--step", action="store_true")
    given = asked.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.step:
        compare_steps(given.turns)
    else:
        compare_operators(given.tokens, given.turns, given.compiled)


if __name__ == "__main__":
    main()
