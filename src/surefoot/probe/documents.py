"""Is this form of attention over packed documents right on this machine, and how fast is it?

As for any other form (`surefoot.probe.attention`): first against float64, output and gradients, with documents of 1 to
704 tokens side by side and with logits far below zero; only what passes is timed, at lengths of the run up to 1,024
tokens, and with at most 4 heads. Beside it,
under the name `PADDED`, SDPA over the same documents in padded rows: what the form takes the place of.

Shapes: H query heads, K key and value heads, N tokens of the row, D numbers per head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.plan import DType
from surefoot.probe.attention import (
    ROUNDS,
    Case,
    Form,
    announced,
    check,
    eager,
    far_inputs,
    forward_backward,
    in_float64,
    random_inputs,
    timed_at,
    timed_heads,
    trial_of,
)
from surefoot.probe.matmul import TORCH_DTYPE
from surefoot.probe.timing import one_thread, seconds_or_failures

PADDED = "padded"
OfDocuments = Callable[[Sequence[int]], Form]  # lengths of the documents of a row -> what attends to such a row
_CHECKED = (64, 333, 1, 20)
_CHECKED_FAR = (704, 90)
_TIMED_TOKENS = 1024


def document_trials(
    forms: Mapping[str, OfDocuments],
    *,
    mix: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: DType,
    device: torch.device,
    budget: float = 0.4,
    padded: bool = True,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[AttentionTrial, ...]:
    """One trial per form, and, with `padded`, one of PADDED, which is timed alone. mix: lengths of documents as they
    stand side by side in the run. budget: seconds for the timing; on a CPU one thread does it all. begin: see
    `attention_trials`."""
    groups = heads // kv_heads
    lengths = timed_lengths(mix)
    with one_thread():
        checked = {}
        for name, form in forms.items():
            begin(name)
            checked[name] = _checked(form, groups, head_dim, dtype, device)
        count = timed_heads(groups, kv_heads)
        make = partial(random_inputs, head_dim=head_dim, dtype=TORCH_DTYPE[dtype], device=device)
        row = make(1, groups, count, sum(lengths))
        runs: dict[str, Callable[[], object]] = {
            name: partial(announced, name, begin, partial(forward_backward, form(lengths), row))
            for name, form in forms.items()
            if not checked[name][0]
        }
        if padded:
            begin(PADDED)
            rows = [make(len(group), groups, count, group[0]) for group in _neighbours(lengths)]
            usual = _runnable(rows[0])
            runs[PADDED] = partial(
                announced, PADDED, begin, lambda: [forward_backward(usual, inputs) for inputs in rows]
            )
            checked[PADDED] = "", {}
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        seconds, failures = seconds_or_failures(runs, budget=budget, rounds=ROUNDS, wait=wait)
    at = timed_at((min(max(mix), _TIMED_TOKENS), max(mix), "tokens"), (groups * count, heads, "heads"))
    return tuple(trial_of(name, seconds, failures, found, at) for name, found in checked.items())


def timed_lengths(mix: Sequence[int]) -> tuple[int, ...]:
    """Documents of the mix, taken at even distances, of about as many tokens as are timed; the longest first."""
    ordered = sorted((min(length, _TIMED_TOKENS) for length in mix), reverse=True)
    count = max(1, round(_TIMED_TOKENS * len(ordered) / sum(ordered)))
    if count >= len(ordered):
        return tuple(ordered * max(1, count // len(ordered)))
    return tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))


def _neighbours(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """The longer and the shorter half, as two padded micro-batches of a step would have them."""
    middle = (len(lengths) + 1) // 2
    return [tuple(half) for half in (lengths[:middle], lengths[middle:]) if half]


def _runnable(inputs: Sequence[torch.Tensor]) -> Form:
    """SDPA as torch dispatches it, or held to the math kernel where that raises: the plan leaves out a kernel that
    does, as one of a CPU does whose instructions a variable of the environment takes away."""
    try:
        forward_backward(_sdpa, inputs)
    except RuntimeError:
        return _math
    return _sdpa


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(q, k, v)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _checked(
    form: OfDocuments, groups: int, head_dim: int, dtype: DType, device: torch.device
) -> tuple[str, dict[str, float]]:
    """(failure, largest relative error by tensor)."""
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
    """The textbook formula, document by document."""
    spans = itertools.pairwise([0, *itertools.accumulate(lengths)])
    return torch.cat([eager(*(tensor[:, :, begin:end] for tensor in (q, k, v))) for begin, end in spans], dim=2)
