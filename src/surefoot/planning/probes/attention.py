"""Check a form of attention for correctness on this machine, and time it.

Forward and backward, with the run's head_dim and queries per key. On a GPU at the run's length, heads and rows, as far
as memory and the limit of operations allow; on a CPU with the first 1,024 tokens of a long row and at most 4 heads. The
trial records what was timed.

Every form is first compared with float64: output and gradients, at an odd length and at one that is 64 modulo 128, the
latter with logits far below zero, because there a fused kernel has returned NaN gradients (PyTorch issue 196678). Only
forms that pass are timed.

Shapes: B rows, H query heads, K key and value heads, T tokens, D head_dim.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.planning.deterministic import kernel_of
from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.plan import DType
from surefoot.planning.probes.matmul import TORCH_DTYPE, fp32_products
from surefoot.planning.probes.sizes import (
    STORING,
    AttentionRequest,
    Room,
    Size,
    no_room,
    room_on,
    timed_at,
    timed_size,
    with_scores,
)
from surefoot.planning.probes.timing import Limits, attempt, draws, one_thread, seconds_or_failures
from surefoot.system.deterministic import deterministic_attention, switches_kept

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Largest relative error (Frobenius norm of the difference over the norm of float64's result). Kernels that keep logits
# in fp32 were measured at up to 5 units in the last place of a 16-bit result, and at 1.4e-4 in fp32 with far logits.
# Eager attention stores logits of -120 in bf16, which rounds them to halves and gives 30 to 60 units: it fails.
GATE: Mapping[DType, float] = {"fp32": 1e-3, "bf16": 16 * 2.0**-8, "fp16": 16 * 2.0**-11}
_FAR = 120.0
_ODD_LENGTH, _LENGTH_64_MOD_128 = 333, 704
ROUNDS = 30
_BACKEND = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Case:
    """Inputs with float64's result. name: completes "the gradient of q is not finite at …"."""

    name: str
    inputs: tuple[torch.Tensor, ...]  # q [B, H, T, D], k and v [B, K, T, D], gradient of the output [B, H, T, D]
    expected: Mapping[str, torch.Tensor]


def attention_trials(
    request: AttentionRequest,
    *,
    limits: Limits | None = None,
    free: int | None = None,
    budget: float = 0.6,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[AttentionTrial, ...]:
    """Return one trial per form.

    limits, free: limits and free bytes of memory, replacing the device's, for tests.
    budget: seconds for timing alone; on a CPU the checks take about as long. There everything runs on one thread: the
        comparison is the same, and other programs disturb it less.
    begin: called with each form before it runs, so that one that crashes the process is known.
    """
    device, window = torch.device(request.device), request.window
    room = room_on(device, limits, free)
    sizes, alone = _sizes(request, room), _sizes(request, room.alone)
    form = partial(form_named, masked=window is not None, window=window)
    make = partial(random_inputs, head_dim=request.head_dim, dtype=TORCH_DTYPE[request.dtype], device=device)
    with one_thread(), fp32_products("ieee"):
        groups = request.heads // request.kv_heads
        cases, why = attempt(partial(check_cases, groups, request.head_dim, request.dtype, device, window))
        if cases is None:  # no form is known to be wrong
            return tuple(AttentionTrial(name, 0.0, "", untimed=f"cannot be checked: {why}") for name in request.forms)
        checked = {}
        for name in request.forms:
            begin(name)
            checked[name] = _checked(name, cases, request)

        @cache
        def inputs(size: Size) -> tuple[torch.Tensor, ...]:
            return make(size.rows, size.groups, size.kv_heads, size.tokens)

        def run(name: str, size: Size) -> Callable[[], Mapping[str, torch.Tensor]]:
            return partial(forward_backward, form(name), inputs(size))

        makers = {name: partial(run, name, part) for name, (_, part) in sizes.items() if part and not checked[name][0]}
        seconds, untimed = seconds_or_failures(makers, device, budget=budget, rounds=ROUNDS, begin=begin)
        repeat(makers, checked, untimed)
    found = []
    for name, (whole, part) in sizes.items():
        held = (whole, part) != alone[name]
        share = part.share_of(whole) if part else 1.0
        scaled = f"scaled from {share:.0%} of it" if share < 1 else ""
        why = untimed if part else {name: timed_at(no_room(whole, room), held=held)}
        spent = {one: taken / share for one, taken in seconds.items()}
        found.append(trial_of(name, spent, why, checked[name], timed_at(whole.less_than(request), scaled, held=held)))
    return tuple(found)


def _sizes(request: AttentionRequest, room: Room) -> dict[str, tuple[Size, Size | None]]:
    """By form, the size of a full pass, and the part of it that is timed."""
    whole = timed_size(request, room)
    return {name: (whole, with_scores(whole, room) if name in STORING else whole) for name in request.forms}


def trial_of(
    name: str,
    seconds: Mapping[str, float],
    untimed: Mapping[str, str],
    checked: tuple[str, dict[str, float]],
    timed: str,
) -> AttentionTrial:
    """Make the trial of one form.

    seconds, untimed: results of the timing, by name.
    checked: result of `check`.
    """
    failure, errors = checked
    return AttentionTrial(
        name, seconds.get(name, 0.0), failure, errors, timed, "" if failure else untimed.get(name, "")
    )


def _checked(name: str, cases: Sequence[Case], request: AttentionRequest) -> tuple[str, dict[str, float]]:
    """Run `check`, for cuDNN also with a mask tensor if it may get one, which triggers its known bug."""
    masked = request.window is not None
    failure, errors = check(form_named(name, masked=masked, window=request.window), cases, request.dtype)
    if failure or masked or not request.masks or name != "cudnn":
        return failure, errors
    return check(form_named(name, masked=True, window=None), cases, request.dtype)


def form_named(name: str, *, masked: bool, window: int | None = None) -> Form:
    """Return a form by name. masked: give SDPA a mask tensor instead of is_causal, as a sliding window requires."""
    if name == "eager":
        return partial(eager, window=window)
    if (kernel := kernel_of(name)) != name:
        return deterministic(form_named(kernel, masked=masked, window=window))

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = _causal_mask(q, window).expand(q.shape[0], 1, -1, -1) if masked else None
        if masked or name == "mem_efficient":  # as in transformers with a mask, and in the run for this kernel
            k, v = for_every_head(q, k, v)
        with sdpa_kernel(_BACKEND[name]):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=q.shape[1] != k.shape[1]
            )

    return sdpa


def deterministic(form: Form) -> Form:
    """Return the form with gradients that are the same each time."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with deterministic_attention():
            return form(q, k, v)

    return attention


def repeat(
    makers: Mapping[str, Callable[[], Callable[[], Mapping[str, torch.Tensor]]]],
    checked: dict[str, tuple[str, dict[str, float]]],
    untimed: dict[str, str],
) -> None:
    """Run each deterministic form twice. Those that gave another bit fail in `checked`; those that could not be run
    again are named in `untimed`.

    makers: makes a form's pass at the timed shapes, by name.
    """
    for name, make in makers.items():
        if kernel_of(name) == name or name in untimed:
            continue
        run = make()
        results, why = attempt(lambda run=run: (run(), run()))
        if results is None:
            untimed[name] = f"cannot be repeated: {why}"
            continue
        first, second = results
        if wrong := [part for part, tensor in first.items() if not torch.equal(tensor, second[part])]:
            checked[name] = f"gives another {' and '.join(wrong)} each time", checked[name][1]


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    """Eager attention as in transformers: two products and an fp32 softmax, every step stored."""
    k, v = for_every_head(q, k, v)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores + torch.zeros_like(scores).masked_fill(~_causal_mask(q, window), torch.finfo(q.dtype).min)
    return scores.softmax(dim=-1, dtype=max(torch.float32, q.dtype, key=lambda kind: kind.itemsize)).to(q.dtype) @ v


def for_every_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat keys and values to as many heads as q has."""
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def check_cases(
    groups: int, head_dim: int, dtype: DType, device: torch.device, window: int | None = None
) -> tuple[Case, ...]:
    """Make the inputs of the checks, rounded to `dtype`, so that only the kernel's own error is measured."""
    odd = random_inputs(1, groups, 1, _ODD_LENGTH, head_dim, TORCH_DTYPE[dtype], device)
    far = random_inputs(1, groups, 1, _LENGTH_64_MOD_128, head_dim, TORCH_DTYPE[dtype], device)
    far_inputs(far)
    right = partial(eager, window=window)
    return (
        Case(f"{_ODD_LENGTH} tokens", odd, in_float64(right, odd)),
        Case(f"{_LENGTH_64_MOD_128} tokens with logits of -{_FAR:g}", far, in_float64(right, far)),
    )


@torch.no_grad()
def far_inputs(inputs: Sequence[torch.Tensor]) -> None:
    """Change q and k in place so that q0 * k0 / sqrt(D) = -_FAR for every pair of tokens."""
    shift = math.sqrt(_FAR * math.sqrt(inputs[0].shape[-1]))
    inputs[0][..., 0], inputs[1][..., 0] = shift, -shift


def check(form: Form, cases: Sequence[Case], dtype: DType) -> tuple[str, dict[str, float]]:
    """Return (failure, largest relative error by tensor). The failure is empty if all errors are within the gate."""
    errors: dict[str, float] = {}
    for case in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, why = attempt(partial(forward_backward, form, case.inputs))
        if found is None:
            return f"cannot run: {_why(caught, why)}", errors
        for name, tensor in found.items():
            if not torch.isfinite(tensor).all():
                return f"the {name} is not finite at {case.name}", errors
            wanted = case.expected[name]
            error = float((tensor.double() - wanted).norm() / wanted.norm())
            errors[name] = max(error, errors.get(name, 0.0))
            if error > GATE[dtype]:
                return f"the {name} is off by {error:.2g} at {case.name}, more than {GATE[dtype]:.2g}", errors
    return "", errors


def random_inputs(
    rows: int, groups: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v that require gradients, and a gradient of the output."""
    draw, tensors = draws(device), []
    for heads in (groups * kv_heads, kv_heads, kv_heads, groups * kv_heads):
        tensors.append(draw(rows, heads, tokens, head_dim).to(dtype).requires_grad_(len(tensors) < 3))
    return tuple(tensors)


def forward_backward(form: Form, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of q, k and v. inputs: q, k, v and the gradient of the output."""
    *qkv, gradient = inputs
    with switches_kept():
        output = form(*qkv)
        q, k, v = torch.autograd.grad(output, qkv, gradient)
    return {"output": output.detach(), "gradient of q": q, "gradient of k": k, "gradient of v": v}


def in_float64(form: Form, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return forward_backward(form, [tensor.detach().double().requires_grad_() for tensor in inputs])


def _causal_mask(q: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """[1, 1, T, T], True where a query may attend: at itself and earlier tokens, in total `window` tokens."""
    tokens = q.shape[2]
    before = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    return (before if window is None else before.triu(1 - window))[None, None]


def _why(caught: Sequence[warnings.WarningMessage], error: str) -> str:
    """torch explains a refused kernel in warnings; its error only says that there is none."""
    texts = [str(warning.message).partition("(Triggered")[0].strip() for warning in caught]
    return next((text for text in texts if text and not text.endswith("because:")), error)
