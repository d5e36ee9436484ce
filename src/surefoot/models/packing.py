"""Packed rows as a fast path: attention that keeps the documents of a row apart, in any family that can have it.

    undo = packed_attention("matmul").install(model)      # a form of `surefoot.kernels.documents`

Without it a packed row is refused (`forward.model_inputs`). transformers would tell documents by their positions, with
a mask of N x N, but not in every family: in its OPT each document sees those before it.
"""

from __future__ import annotations

from torch import nn

from surefoot.models.documents import register
from surefoot.models.fast import FastPath, Undo
from surefoot.models.forward import causal_model

NAME = "documents"


def packed_attention(form: str) -> FastPath:
    """form: a key of `kernels.documents.FORMS`."""

    def install(model: nn.Module) -> Undo:
        inner = causal_model(model)
        before = inner.config._attn_implementation or "sdpa"
        inner.set_attn_implementation(register(form))
        return lambda: inner.set_attn_implementation(before)

    return FastPath(NAME, install, obstacle)


def obstacle(model: nn.Module) -> str:
    """Why this model cannot keep documents apart, as far as its class and config tell; empty where it can."""
    inner = causal_model(model)
    if not inner._supports_attention_backend:
        return f"{type(inner).__name__} does not ask transformers' registry of attention functions"
    if getattr(inner.config, "attn_logit_softcapping", None) is not None:
        return "its attention caps logits"
    implementation = inner.config._attn_implementation
    return "" if implementation == "sdpa" else f"its attention is {implementation}, and packed rows go beside SDPA"
