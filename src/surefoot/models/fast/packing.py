"""Packed rows as a fast path: attention within the documents of a row, for every family that supports it.

    undo = packed_attention("matmul").install(model)      # an implementation in `surefoot.kernels.packed_attention`

Without it a packed row raises an error (`forward.model_inputs`). transformers can detect documents by their position
ids, with an N x N mask, but not in every family: in OPT each document attends to those before it.
"""

from __future__ import annotations

import torch
from torch import nn

from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import causal_model, hidden_states, register
from surefoot.models.modes import eval_mode
from surefoot.system.errors import EnvironmentFault

NAME = "documents"
EVERYWHERE = "sdpa"  # the implementation that runs on any device, in any dtype
_TRIED = (3, 4)  # lengths of the documents in the test row
# Allowed change of the other document relative to that of the changed document. Its rows go through the same products
# at the same positions, so it should not change at all, except for units in the last place if a kernel sums in no fixed
# order or experts' products are grouped depending on all tokens.
_NO_LEAK, _LAST_PLACES = 1e-2, 64


def packed_attention(form: str) -> FastPath:
    """Make the fast path. form: a key of `surefoot.kernels.packed_attention.FORMS`."""

    def install(model: nn.Module) -> Undo:
        inner = causal_model(model)
        before = inner.config._attn_implementation or "sdpa"
        inner.set_attn_implementation(register(form))
        return lambda: inner.set_attn_implementation(before)

    return FastPath(NAME, install, obstacle, form)


def obstacle(model: nn.Module) -> str:
    """Return why this model does not support packed rows, according to its class and config; "" if it does."""
    inner = causal_model(model)
    if not inner._supports_attention_backend:
        return f"{type(inner).__name__} does not use transformers' registry of attention functions"
    text = inner.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "its attention caps logits"
    if getattr(text, "attention_chunk_size", None) is not None:
        return "its attention divides rows into chunks regardless of documents"
    implementation = inner.config._attn_implementation
    return "" if implementation == "sdpa" else f"its attention is {implementation}, but packed rows need sdpa"


@torch.no_grad()
def documents_fault(model: nn.Module) -> str:
    """Return why this model does not support packed rows, tested with a row of two short documents; "" if it does and
    the documents do not affect each other. The model is restored afterwards.

    Only for unsharded models: with sharded weights the pass contains collectives. A run also compares packed and padded
    rows of its own data (`surefoot.runs.parity.fast_paths`).
    """
    if why := obstacle(model):
        return why
    inner = causal_model(model)
    device = inner.get_input_embeddings().get_parameter("weight").device
    tokens = sum(_TRIED)
    ids = torch.arange(tokens, device=device)[None] % inner.get_input_embeddings().get_parameter("weight").shape[0]
    targets = torch.full_like(ids, IGNORE)
    rows = [Batch(one, targets, None, 0, _TRIED, (0, 1), documents=_TRIED) for one in (ids, _changed(ids, _TRIED[0]))]
    undo = packed_attention(EVERYWHERE).install(model)
    try:
        with eval_mode(model):
            before, after = (hidden_states(model, row)[0] for row in rows)
    except (EnvironmentFault, RuntimeError) as caught:
        if isinstance(caught, torch.OutOfMemoryError):
            raise
        return reason_of(caught)
    finally:
        undo()
    share = leak(after - before, _TRIED[0])
    leaks = not share <= most_leak(inner.dtype)  # also true for NaN
    return f"a change of one document changes another by {share:.2g} of its own change" if leaks else ""


def leak(change: torch.Tensor, first: int) -> float:
    """Return how much the other documents change, relative to the first document.

    change: [T, H], change of a row's hidden states when its first document is replaced.
    first: tokens of the first document.
    """
    own, others = float(change[:first].float().norm()), float(change[first:].float().norm())
    return others / own if own else others


def most_leak(compute: torch.dtype) -> float:
    """Return the largest leak at which documents count as separate. compute: dtype of matrix products."""
    return min(_NO_LEAK, _LAST_PLACES * torch.finfo(compute).eps)


def reason_of(caught: EnvironmentFault | RuntimeError) -> str:
    """Return the message of an error in one line."""
    if isinstance(caught, EnvironmentFault):
        return caught.faults[0].what
    return next(iter(str(caught).splitlines()), type(caught).__name__)


def _changed(ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return the ids with the first document reversed."""
    found = ids.clone()
    found[0, :first] = ids[0, :first].flip(0)
    return found
