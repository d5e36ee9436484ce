"""Causal attention over a row of concatenated documents that do not attend to each other, without padding or mask.

    o_t = sum over s <= t in t's document of softmax_s(scale q_t . k_s) v_s

Implementations; a probe selects the fastest that passes the accuracy check on the machine:

    matmul   forward by torch's flash kernel, backward by batched matrix products. For CPUs, where the flash kernel's
             backward is slower for documents of up to `SHORT` tokens; longer documents use sdpa
    sdpa     torch's scaled_dot_product_attention, document by document
    varlen   one kernel for the whole row (torch.nn.attention.varlen); NVIDIA GPUs, 16-bit types
    flash_attn_2, flash_attn_3, flash_attn_4
             the same by a package, where it is installed

`plain` is the textbook formula that tests compare with.

Shapes: H query heads, K key/value heads (H is a multiple of K), N tokens of the row, D head size, L tokens of one
document.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from surefoot.data.batching.batch import numbers_on
from surefoot.kernels.operands import round_up_tokens, wide_type
from surefoot.system import deterministic
from surefoot.system.hardware import ATTENTION_PACKAGES

# The matrix products waste half of their work on masked positions. Measured on a CPU in bf16, docs/evidence/packing.md.
SHORT = 384


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a packed row.

    lengths: tokens of each document, in order.
    ends: [documents + 1] int32, cumulative lengths starting with 0, on the device of the row.
    """

    lengths: tuple[int, ...]
    ends: torch.Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)


# q [1, H, N, D], k and v [1, K, N, D], documents, scale of the logits -> [1, H, N, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents, float], torch.Tensor]


def documents_of(lengths: Sequence[int], device: torch.device) -> Documents:
    ends = [0, *itertools.accumulate(lengths)]
    return Documents(tuple(lengths), numbers_on(device, ends, torch.int32))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """Reference implementation, with softmax in fp32 or wider."""
    k, v = (_repeated(tensor[0], q.shape[1])[None] for tensor in (k, v))
    wide = wide_type(q.dtype)
    found = []
    for begin, end in _spans(documents.lengths):
        logits = (q[:, :, begin:end].to(wide) @ k[:, :, begin:end].to(wide).transpose(2, 3)) * scale
        future = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        probabilities = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
        found.append(probabilities.to(q.dtype) @ v[:, :, begin:end])
    return torch.cat(found, dim=2)


def matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """CPU implementation: matrix products for documents of at most SHORT tokens, SDPA for longer ones."""
    groups = [tuple(group) for _, group in itertools.groupby(documents.lengths, lambda length: length <= SHORT)]
    sizes = [sum(group) for group in groups]
    rows = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), groups, strict=True)
    found = [(_products if row[3][0] <= SHORT else _sdpa)(*row, scale) for row in rows]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """SDPA, called once per document, with whatever kernels it may use."""
    return _sdpa(q, k, v, documents.lengths, scale)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
    """One kernel launch for the row. Raises RuntimeError if the device or dtype is not supported."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = map(_token_major, (q, k, v))
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
        **_grouped(varlen_attn, q, k),
    )
    assert isinstance(found, torch.Tensor)
    return deterministic.from_kernel(found).transpose(0, 1)[None]


def _grouped(kernel: Callable[..., Any], q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """Arguments for several query heads per key head: a word that torch 2.10 and 2.11 do not know, nor need."""
    if "enable_gqa" not in inspect.signature(kernel).parameters:
        return {}
    return {"enable_gqa": q.shape[1] != k.shape[1]}


def _token_major(tensor: torch.Tensor) -> torch.Tensor:
    """[1, H, N, D] -> [N, H, D], contiguous."""
    return tensor[0].transpose(0, 1).contiguous()


def packaged(module: str) -> Attend:
    """One kernel launch for the row, by the `flash_attn_varlen_func` of an installed package. The function raises
    RuntimeError if the package cannot be imported."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float) -> torch.Tensor:
        try:
            kernel = importlib.import_module(module).flash_attn_varlen_func
        except (ImportError, OSError, AttributeError) as error:
            raise RuntimeError(f"{module} cannot be used: {error}") from error
        found = kernel(
            *map(_token_major, (q, k, v)),
            cu_seqlens_q=documents.ends,
            cu_seqlens_k=documents.ends,
            max_seqlen_q=documents.longest,
            max_seqlen_k=documents.longest,
            softmax_scale=scale,
            causal=True,
            **({"deterministic": True} if deterministic.is_active() else {}),
        )
        output = found[0] if isinstance(found, tuple) else found  # some versions return the log-sum-exp too
        return output.transpose(0, 1)[None]

    return attend


FORMS: Mapping[str, Attend] = {
    "matmul": matmul,
    "sdpa": sdpa,
    "varlen": varlen,
    **{form: packaged(module) for form, module in ATTENTION_PACKAGES.items()},
}
ONLY_16_BITS = ("varlen", *ATTENTION_PACKAGES)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float) -> torch.Tensor:
    if q.is_cuda and q.dtype == torch.float32:  # the only fused kernel for fp32 does not support GQA
        k, v = (_repeated(tensor[0], q.shape[1])[None] for tensor in (k, v))
    grouped = q.shape[1] != k.shape[1]
    # split instead of slices: the gradient of a slice is as large as the whole row.
    parts = zip(*(tensor.split(list(lengths), 2) for tensor in (q, k, v)), strict=True)
    found = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=grouped) for part in parts]
    return torch.cat(found, dim=2)


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    row = _Products.apply(q[0], k[0], v[0], lengths, scale)
    assert isinstance(row, torch.Tensor)
    return row[None]


class _Products(torch.autograd.Function):
    """Attention for q [H, N, D], k and v [K, N, D]. Saves no probabilities but the log-sum-exp l [H, N].

    O  = flash(Q, K, V)              P  = exp(scale Q K^T - l)         dV = P^T dO
    dP = dO V^T                      dS = P (dP - rowsum(dP P))        dQ = scale dS K      dK = scale dS^T Q

    A document is padded at its end to a length whose kernels are cached. Padding queries have gradient 0, so they add
    nothing to dK and dV, and padding keys are in the future of all real queries.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
    ) -> torch.Tensor:
        q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))  # the kernel assumes 1
        output = _like_rows(q)
        sums = q.new_empty(q.shape[:2], dtype=wide_type(q.dtype))
        with torch.autocast(q.device.type, enabled=False):
            for begin, end in _spans(lengths):
                keys, values = (_repeated(tensor[:, begin:end], len(q)) for tensor in (k, v))
                # The kernel behind SDPA, called directly because SDPA does not return the log-sum-exp that backward
                # needs.
                found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[None, :, begin:end], keys[None], values[None], 0.0, True, scale=scale
                )
                output[:, begin:end], sums[:, begin:end] = found[0][0], found[1][0]
        ctx.save_for_backward(q, k, v, sums)
        ctx.lengths, ctx.scale = lengths, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sums = ctx.saved_tensors
        dq, dk, dv = _like_rows(q), _like_rows(k), _like_rows(v)
        # Otherwise the logits, which are in the wider dtype on purpose, would be computed in 16 bits again.
        with torch.autocast(q.device.type, enabled=False):
            for begin, end in _spans(ctx.lengths):
                place = slice(begin, end)
                queries, own = _filled(q[:, place]), _filled(gradient[:, place])
                keys, values = (_filled(_repeated(tensor[:, place], len(q))) for tensor in (k, v))
                probabilities = _probabilities(queries, keys, sums[:, place], ctx.scale)
                _write(dv[:, place], torch.bmm(probabilities.transpose(1, 2), own), 1.0)
                change = torch.bmm(own, values.transpose(1, 2))
                change = torch.ops.aten._softmax_backward_data(change, probabilities, -1, q.dtype)
                _write(dq[:, place], torch.bmm(change, keys), ctx.scale)
                _write(dk[:, place], torch.bmm(change.transpose(1, 2), queries), ctx.scale)
        return dq, dk, dv, None, None


def _probabilities(queries: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor, scale: float) -> torch.Tensor:
    """Return probabilities [H, L, L] in the dtype of the queries, from logits in the wider type.

    sums: log-sum-exp, [H, up to L].
    """
    wide = wide_type(queries.dtype)
    shift = F.pad(sums, (0, queries.shape[1] - sums.shape[1])).neg_().unsqueeze(2)
    with _products_of(queries.dtype), _wider_than(queries.dtype):
        logits = torch.bmm(queries.to(wide), keys.to(wide).transpose(1, 2))
    torch.add(shift, logits, alpha=scale, out=logits)
    # No maximum is subtracted before exp: less the log-sum-exp, logits of keys that are not masked are at most 0.
    return logits.exp_().to(queries.dtype).tril_()  # tril drops the masked half, which may be inf


def _products_of(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context for products of fp32 operands whose values are representable in `dtype`: for bf16 they may be computed as
    bf16 products, which loses nothing and is several times as fast."""
    return _narrow_operands() if dtype == torch.bfloat16 else nullcontext()


@contextmanager
def _narrow_operands() -> Iterator[None]:
    settings = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    # A setting of the whole process, so it is put back at once: other fp32 products must stay exact.
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


_are_wider = False


def logits_are_wider() -> bool:
    """Whether attention logits are currently being computed in a wider dtype on purpose."""
    return _are_wider


@contextmanager
def _wider_than(dtype: torch.dtype) -> Iterator[None]:
    global _are_wider
    _are_wider = wide_type(dtype) != dtype
    try:
        yield
    finally:
        _are_wider = False


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Copy [H, L, D] to a contiguous tensor, padded with zeros to a length whose kernels are cached."""
    heads, tokens, width = tensor.shape
    found = tensor.new_empty(heads, round_up_tokens(tokens, tensor.dtype, tensor.device), width)
    found[:, :tokens] = tensor
    found[:, tokens:] = 0
    return found


def _write(place: torch.Tensor, product: torch.Tensor, scale: float) -> None:
    """Write `scale` * `product` [H, L or more, D] to `place` [K, L, D], summed over query heads that share a key
    head."""
    product = product[:, : place.shape[1]]
    if len(product) != len(place):
        product = product.unflatten(0, (len(place), -1)).sum(dim=1)
    torch.mul(product, scale, out=place)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key/value heads, [K, N, D] -> [heads, N, D]."""
    return tensor if len(tensor) == heads else tensor.repeat_interleave(heads // len(tensor), dim=0)


def _like_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty [H, N, D] with token-major memory layout, which the projections around attention need."""
    heads, tokens, width = tensor.shape
    return tensor.new_empty(tokens, heads, width).transpose(0, 1)


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each document."""
    return itertools.pairwise([0, *itertools.accumulate(lengths)])
