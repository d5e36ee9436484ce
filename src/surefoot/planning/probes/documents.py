"""Check a form of attention over packed documents for correctness on this machine, and time it.

As in `surefoot.planning.probes.attention`: output and gradients are first compared with float64, with documents of 1 to
704 tokens in one row and with logits far below zero; only forms that pass are timed, at lengths of the run: on a GPU in
a row as long as the run's, with all heads; on a CPU in one of about 1,024 tokens, with at most 4. The baseline, named
`PADDED`, is SDPA over the same documents in padded rows.

Shapes: H query heads, K key and value heads, N tokens of the row, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.planning.deterministic import kernel_of
from surefoot.planning.measurements import PADDED, AttentionTrial
from surefoot.planning.plan import DType
from surefoot.planning.probes.attention import (
    ROUNDS,
    Case,
    Form,
    check,
    deterministic,
    eager,
    far_inputs,
    for_every_head,
    forward_backward,
    in_float64,
    random_inputs,
    repeat,
    trial_of,
)
from surefoot.planning.probes.matmul import TORCH_DTYPE, fp32_products
from surefoot.planning.probes.sizes import padded_halves, room_on, smaller_than_requested, timed_at, timed_documents
from surefoot.planning.probes.timing import Limits, attempt, one_thread, seconds_or_failures

OfDocuments = Callable[[Sequence[int]], Form]  # lengths of the documents of a row -> attention over that row
# A kernel's block, a length that fits no block, one token and a few: an off-by-one border shows in one of them.
_CHECKED = (64, 333, 1, 20)
_CHECKED_FAR = (704, 90)
# Of padded rows; torch itself would take cuDNN's on Hopper, which no run with rows of several lengths does.
_OF_PADDED_ROWS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class DocumentsRequest:
    """Request of the probe.

    forms: forms to try; the last may be PADDED, which is only timed.
    mix: lengths of documents in the order in which the run may combine them.
    device: cpu | cuda.
    tokens: tokens of a packed row in the run.
    """

    forms: tuple[str, ...]
    mix: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    device: str
    tokens: int = 1024


def document_trials(
    request: DocumentsRequest,
    forms: Mapping[str, OfDocuments],
    *,
    limits: Limits | None = None,
    free: int | None = None,
    budget: float = 0.4,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[AttentionTrial, ...]:
    """Return one trial for each of the request's forms.

    forms: implementations by name.
    budget: seconds for timing; on a CPU everything runs on one thread.
    limits, free, begin: see `attention_trials`.
    """
    device, dtype, head_dim = torch.device(request.device), request.dtype, request.head_dim
    groups = request.heads // request.kv_heads
    room = room_on(device, limits, free)
    requested = (request.mix, groups, request.kv_heads, head_dim, dtype, request.tokens)
    taken = timed_documents(*requested, room)
    lengths, count = taken.lengths, taken.kv_heads
    make = partial(random_inputs, head_dim=head_dim, dtype=TORCH_DTYPE[dtype], device=device)

    def of(name: str) -> OfDocuments:
        kernel = forms[kernel_of(name)]
        return kernel if kernel_of(name) == name else lambda documents: deterministic(kernel(documents))

    with one_thread(), fp32_products("ieee"):
        checked: dict[str, tuple[str, dict[str, float]]] = {}
        for name in request.forms:
            begin(name)
            if name == PADDED:
                checked[name] = ("", {})
            else:
                found, why = attempt(partial(_checked, of(name), groups, head_dim, dtype, device))
                checked[name] = found or (f"cannot be checked: {why}", {})

        @cache
        def row() -> tuple[torch.Tensor, ...]:
            return make(1, groups, count, sum(lengths))

        def packed(name: str) -> Callable[[], Mapping[str, torch.Tensor]]:
            return partial(forward_backward, of(name)(lengths), row())

        def padded() -> Callable[[], object]:
            rows = [make(number, groups, count, longest) for number, longest in padded_halves(lengths)]
            return partial(_each, _runnable(rows[0]), rows)

        passes = {name: partial(packed, name) for name in request.forms if name != PADDED and not checked[name][0]}
        makers = {**passes, **({PADDED: padded} if PADDED in request.forms else {})}
        seconds, untimed = seconds_or_failures(makers, device, budget=budget, rounds=ROUNDS, begin=begin)
        repeat(passes, checked, untimed)
    less = smaller_than_requested((taken.longest, max(request.mix), "tokens"), (groups * count, request.heads, "heads"))
    at = timed_at(less, held=taken != timed_documents(*requested, room.alone))
    return tuple(trial_of(name, seconds, untimed, checked[name], at) for name in request.forms)


def _each(form: Form, rows: Sequence[Sequence[torch.Tensor]]) -> None:
    for inputs in rows:
        forward_backward(form, inputs)


def _runnable(inputs: Sequence[torch.Tensor]) -> Form:
    """SDPA as a run dispatches it, or restricted to the math kernel if that raises: the plan excludes a kernel that
    raises, for example on a CPU whose instructions are limited by an environment variable."""
    usual, math = partial(_sdpa, _OF_PADDED_ROWS), partial(_sdpa, [SDPBackend.MATH])
    found, _ = attempt(partial(forward_backward, usual, inputs))
    return usual if found else math


def _sdpa(kernels: list[SDPBackend], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.is_cuda and q.dtype == torch.float32:  # its fused kernel has no grouped heads, so the run repeats them
        k, v = for_every_head(q, k, v)
    with sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _checked(
    form: OfDocuments, groups: int, head_dim: int, dtype: DType, device: torch.device
) -> tuple[str, dict[str, float]]:
    """Return (failure, largest relative error by tensor)."""
    worst: dict[str, float] = {}
    for lengths, far in ((_CHECKED, False), (_CHECKED_FAR, True)):
        inputs = random_inputs(1, groups, 1, sum(lengths), head_dim, TORCH_DTYPE[dtype], device)
        if far:
            far_inputs(inputs)
        name = f"documents of {', '.join(map(str, lengths))} tokens" + (" with far logits" if far else "")
        case = Case(name, inputs, in_float64(partial(_one_by_one, lengths), inputs))
        failure, errors = check(form(lengths), [case], dtype)
        worst = {key: max(error, worst.get(key, 0.0)) for key, error in errors.items()}
        if failure:
            return failure, worst
    return "", worst


def _one_by_one(lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Eager attention, document by document."""
    spans = itertools.pairwise([0, *itertools.accumulate(lengths)])
    return torch.cat([eager(*(tensor[:, :, begin:end] for tensor in (q, k, v))) for begin, end in spans], dim=2)
