"""Causal attention over a row of documents laid end to end, none of which sees another. No padding, no dense mask.

    o_t = sum over s <= t in t's document of softmax_s(scale q_t . k_s) v_s

Forms, of which a probe takes the fastest that passes the accuracy check on the machine at hand:

    matmul   two batched products and a causal softmax for each document, logits in fp32; keeps the probabilities, so
             documents beyond `SHORT` tokens go to sdpa. On a CPU several times as fast as sdpa on short documents.
    sdpa     torch's scaled_dot_product_attention, document by document
    varlen   one kernel for the whole row (torch.nn.attention.varlen); NVIDIA GPUs, 16-bit types

`plain` beside them is the textbook formula, which they are tested against.

Shapes: H query heads, K heads of keys and values, of which H is a multiple; N tokens of the row; D numbers per head; L
tokens of one document.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Probabilities cost 2 or 4 bytes * H * L per token, and their masked half is computed in vain. Measured on a CPU in
# bf16: 23 against flash's 35 ms at 512 tokens, 121 against 52 at 1 024.
SHORT = 512


@dataclass(frozen=True)
class Documents:
    """lengths: tokens of each document, in the order of the row. ends: [documents + 1] int32, where each begins and the
    last one ends, on the device of the row."""

    lengths: tuple[int, ...]
    ends: torch.Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)


# q [1, H, N, D], k and v [1, K, N, D], documents, scale of the logits -> [1, H, N, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents, float], torch.Tensor]


def documents_of(lengths: Sequence[int], device: torch.device) -> Documents:
    ends = [0, *itertools.accumulate(lengths)]
    return Documents(tuple(lengths), torch.tensor(ends, dtype=torch.int32, device=device))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """The reference: every step stored, softmax in fp32 or wider."""
    k, v = _for_every_head(k, q.shape[1]), _for_every_head(v, q.shape[1])
    wide = max(torch.float32, q.dtype, key=lambda kind: kind.itemsize)
    found = []
    for begin, end in _spans(documents.lengths):
        logits = (q[:, :, begin:end].to(wide) @ k[:, :, begin:end].to(wide).transpose(2, 3)) * scale
        future = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        probabilities = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
        found.append(probabilities.to(q.dtype) @ v[:, :, begin:end])
    return torch.cat(found, dim=2)


def matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """By matrix products where a document has at most SHORT tokens, by SDPA where it has more."""
    found, begin = [], 0
    for short, group in itertools.groupby(documents.lengths, lambda length: length <= SHORT):
        lengths = tuple(group)
        end = begin + sum(lengths)
        attend = _matmul if short else _sdpa
        found.append(attend(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], lengths, scale))
        begin = end
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """Whatever kernels SDPA may use, once for each document."""
    return _sdpa(q, k, v, documents.lengths, scale)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """One kernel launch. Raises RuntimeError where the device or the type has none."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))  # [N, H | K, D]
    found = varlen_attn(
        query,
        key,
        value,
        documents.ends,
        documents.ends,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(found, torch.Tensor)
    return found.transpose(0, 1)[None]


FORMS: Mapping[str, Attend] = {"matmul": matmul, "sdpa": sdpa, "varlen": varlen}


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    found = [
        F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], is_causal=True, scale=scale, enable_gqa=grouped
        )
        for begin, end in _spans(lengths)
    ]
    return torch.cat(found, dim=2)


def _matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float) -> torch.Tensor:
    heads = q.shape[1]
    row = _Matmul.apply(q[0], _for_every_head(k, heads)[0], _for_every_head(v, heads)[0], lengths, scale)
    return row[None]


class _Matmul(torch.autograd.Function):
    """[H, N, D] each. All products of a document see its slice of the row as it lies in memory; nothing is gathered.

    P = softmax(scale Q K^T)         O  = P V
    dP = dO V^T                      dV = P^T dO
    dS = P (dP - rowsum(dP P))       dQ = scale dS K      dK = scale dS^T Q
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
    ) -> torch.Tensor:
        output = _like_rows(q)
        kept = []
        with torch.autocast(q.device.type, enabled=False):  # the logits stay in fp32
            for begin, end in _spans(lengths):
                mask = _above_diagonal(end - begin, torch.promote_types(q.dtype, torch.float32), q.device)
                queries, keys = q[:, begin:end].to(mask.dtype), k[:, begin:end].to(mask.dtype)
                logits = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
                probabilities = logits.softmax(dim=-1).to(q.dtype)
                output[:, begin:end] = torch.bmm(probabilities, v[:, begin:end])
                kept.append(probabilities)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.lengths, ctx.scale = lengths, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = _like_rows(q), _like_rows(k), _like_rows(v)
        with torch.autocast(q.device.type, enabled=False):
            for (begin, end), probabilities in zip(_spans(ctx.lengths), kept, strict=True):
                own = gradient[:, begin:end]
                dv[:, begin:end] = torch.bmm(probabilities.transpose(1, 2), own)
                change = torch.bmm(own, v[:, begin:end].transpose(1, 2))
                change = torch.ops.aten._softmax_backward_data(change, probabilities, -1, q.dtype).mul_(ctx.scale)
                dq[:, begin:end] = torch.bmm(change, k[:, begin:end])
                dk[:, begin:end] = torch.bmm(change.transpose(1, 2), q[:, begin:end])
        return dq, dk, dv, None, None


def _like_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Empty [H, N, D], laid out token by token: what comes before and after attention wants its heads together."""
    heads, tokens, width = tensor.shape
    return tensor.new_empty(tokens, heads, width).transpose(0, 1)


def _for_every_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, K, N, D] -> [1, heads, N, D]."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each document."""
    return itertools.pairwise([0, *itertools.accumulate(lengths)])


@functools.lru_cache(maxsize=8)
def _all_above_diagonal(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((SHORT, SHORT), -torch.inf, dtype=dtype, device=device).triu(1)


def _above_diagonal(tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[tokens, tokens], -inf above the diagonal and 0 elsewhere, for at most SHORT: a corner of one made once."""
    return _all_above_diagonal(dtype, device)[:tokens, :tokens]
