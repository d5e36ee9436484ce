"""Packed rows as a fast path: attention that keeps the documents of a row apart, in any family that can have it.

    undo = packed_attention("matmul").install(model)      # a form of `surefoot.kernels.packed_attention`

Without it a packed row is refused (`forward.model_inputs`). transformers would recognise documents by their
positions, with a mask of N x N, but not in every family: in its OPT each document sees those before it.
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
EVERYWHERE = "sdpa"  # the form that runs on any device, in any type
_TRIED = (3, 4)  # tokens of the documents of a row that is only tried
# What the other document may move by, as a share of what a document moves itself. Its rows go through the same products
# at the same places, so that it does not move at all; but for a last place where a kernel adds in no fixed order, or
# where experts' products are grouped by what all tokens say.
_NO_LEAK, _LAST_PLACES = 1e-2, 64


def packed_attention(form: str) -> FastPath:
    """form: a key of `surefoot.kernels.packed_attention.FORMS`."""

    def install(model: nn.Module) -> Undo:
        inner = causal_model(model)
        before = inner.config._attn_implementation or "sdpa"
        inner.set_attn_implementation(register(form))
        return lambda: inner.set_attn_implementation(before)

    return FastPath(NAME, install, obstacle, form)


def obstacle(model: nn.Module) -> str:
    """Why this model cannot keep documents apart, as far as its class and config show; empty where it can."""
    inner = causal_model(model)
    if not inner._supports_attention_backend:
        return f"{type(inner).__name__} does not ask transformers' registry of attention functions"
    text = inner.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "its attention caps logits"
    if getattr(text, "attention_chunk_size", None) is not None:
        return "its attention goes by chunks of a row, whichever documents are in it"
    implementation = inner.config._attn_implementation
    return "" if implementation == "sdpa" else f"its attention is {implementation}, and packed rows need sdpa"


@torch.no_grad()
def documents_fault(model: nn.Module) -> str:
    """Why packed rows cannot go through this model, tried with a row of two short documents; empty where they can, and
    neither document changes the other. The model is as it was afterwards.

    Only for a model whose weights are whole: where an engine has sharded them, all ranks wait for one another in the
    middle of the pass. A run also compares packed with padded rows of its own (`surefoot.runs.parity.fast_paths`).
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
    leaks = not share <= most_leak(inner.dtype)  # NaN does, too
    return f"one document moves another by {share:.2g} of what it moves itself" if leaks else ""


def leak(change: torch.Tensor, first: int) -> float:
    """change: [T, H] of a row's hidden states when its first document, of `first` tokens, says something else. How far
    all others move, as a share of how far its own do."""
    own, others = float(change[:first].float().norm()), float(change[first:].float().norm())
    return others / own if own else others


def most_leak(compute: torch.dtype) -> float:
    """Up to where documents count as kept apart.

    compute: dtype of the products.
    """
    return min(_NO_LEAK, _LAST_PLACES * torch.finfo(compute).eps)


def reason_of(caught: EnvironmentFault | RuntimeError) -> str:
    """In one line."""
    if isinstance(caught, EnvironmentFault):
        return caught.faults[0].what
    return next(iter(str(caught).splitlines()), type(caught).__name__)


def _changed(ids: torch.Tensor, first: int) -> torch.Tensor:
    """The first document turned round."""
    found = ids.clone()
    found[0, :first] = ids[0, :first].flip(0)
    return found
