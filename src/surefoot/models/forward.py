"""The forward pass in two halves: hidden states of all positions, logits of those that somebody asked for.

Instruction data supervises a tenth of its tokens. A head applied to those alone saves most of its arithmetic and
nearly all of its memory, and each logit is the same dot product as before. `verify.verify_head` checks, for the model
at hand, that nothing but the head stands between hidden state and logits.

Shapes: B examples, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from surefoot.data.batch import Batch


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; modules that PEFT injected stay in place."""
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    assert isinstance(model, PreTrainedModel)
    return model


def hidden_states(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the output head sees: [B, T, H], after the final norm.

    Without a mask (right padding) none is passed on, so SDPA runs its causal kernels and no [T, T] mask exists. With
    one (left padding) positions count real tokens from 0, as they would without padding.
    """
    mask = batch.attention_mask
    positions = None if mask is None else positions_from_mask(mask)
    decoder = causal_model(model).get_decoder()
    output = decoder(input_ids=batch.input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return output.last_hidden_state


def positions_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] mask of real tokens -> their positions from 0; padding in front gets 0."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def output_head(model: nn.Module) -> nn.Module:
    """The module that maps [..., H] to logits [..., V]."""
    head = causal_model(model).get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return head
