"""How the documents of a packed row reach every attention layer of a transformers model.

transformers looks up the attention function of a layer in a registry, by a name in the config, and hands it whatever
keywords the model's forward was called with. Under a name of ours it finds a function that takes the documents; the
mask that goes with the name is none. A family that drops keywords on the way raises; it never mixes documents.

Calls without documents go through SDPA and its masks, as under transformers' own name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from surefoot.kernels.documents import FORMS, Attend, Documents
from surefoot.system.errors import EnvironmentFault, Fault

_PREFIX = "surefoot_documents_"  # of the form's name, among transformers' attention functions
_packed: ContextVar[bool] = ContextVar("packed", default=False)


def register(form: str) -> str:
    """form: a key of `kernels.documents.FORMS`. Returns the name under which transformers finds it."""
    name = _PREFIX + form
    AttentionInterface.register(name, _attention(FORMS[form]))
    AttentionMaskInterface.register(name, _mask)
    return name


def takes_documents(model: PreTrainedModel) -> bool:
    """Whether an attention function of ours is in force in the model."""
    return (model.config._attn_implementation or "").startswith(_PREFIX)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Inside, no mask is made: the documents themselves go to every layer."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packed.get() else sdpa_mask(*args, **kwargs)


def _attention(attend: Attend) -> Any:
    """As transformers calls it: q [1, H, N, D], k and v [1, K, N, D] -> [1, N, H, D], and no probabilities."""

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        documents: Documents | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if documents is None:
            if _packed.get():
                raise _lost("lost on the way to the layer")
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
            )
        if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
            raise _lost("given to a layer that drops, caps or adds to its attention")
        window = others.get("sliding_window")
        if window is not None and documents.longest > window:
            raise _lost(f"of up to {documents.longest} tokens, and the layer sees {window}")
        query, key, value = _as_autocast((query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, documents, scale).transpose(1, 2), None

    return forward


def _lost(what: str) -> EnvironmentFault:
    return EnvironmentFault(Fault("data.packing", f"the documents of a packed row are {what}", "set data.packing: off"))


def _as_autocast(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """In the type that autocast gives SDPA its inputs in."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
