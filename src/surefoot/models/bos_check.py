"""Whether the BOS scaling really acts: what the first decoder layer gets, measured on one batch of the run.

The same batch goes in three times: as training puts it in, without scaling, and with the first token's embedding set to
zero by hand. Whatever a family adds or multiplies on the way (learned positions, sqrt(width), a projection) is the same
each time, so how far the first lies between the other two is the factor. An embedding of zeros, such as an export with
a factor of 0 has for BOS, shows no factor: it must come in unchanged.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from surefoot.data.batch import Batch
from surefoot.models.bos import installed_scaling, other_scale, unwrapped
from surefoot.models.compiled import as_written
from surefoot.models.decoder import decoder_layers
from surefoot.models.documents import packed_forward
from surefoot.models.forward import hidden_states, model_inputs
from surefoot.models.modes import evaluating
from surefoot.system.errors import EnvironmentFault, Fault

# The measured factor is a mean over the width, of values that were rounded to the type of the weights.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@torch.no_grad()
def verify_bos_scaling(model: nn.Module, batch: Batch, scale: float) -> dict[str, Any]:
    """Raises EnvironmentFault where the first token of an example reaches the first layer at another factor than
    `scale`, or another token is changed. Returns what was found, JSON-able; factor: smallest and largest, None where
    every first embedding is zero."""
    with evaluating(model), as_written(model):  # dropout would differ from pass to pass
        found = _measure(model, batch)
    factors, others = found["factor"], found["others_changed"]
    tolerance = _TOLERANCE[unwrapped(model).get_input_embeddings().get_parameter("weight").dtype]
    wrong = [factor for factor in factors if not abs(factor - scale) <= tolerance * max(scale, 1)]
    faults = []
    if wrong:
        what = f"planned {scale:g}, but the first layer gets the first token times {wrong[0]:.4g}"
        faults.append(Fault("plan: bos.scale", what, "this model cannot be trained with a scaled BOS"))
    if others:
        what = f"other tokens than the first of an example are changed, by up to {others:.2g}"
        faults.append(Fault("plan: bos.scale", what, "this model cannot be trained with a scaled BOS"))
    if faults:
        raise EnvironmentFault(faults)
    return {
        "planned": scale,
        "factor": [min(factors), max(factors)] if factors else None,
        "sequences": len(factors),
        "left_out_as_zero": found["zero"],
        "others_changed": 0.0,
    }


def _measure(model: nn.Module, batch: Batch) -> dict[str, Any]:
    scaling = installed_scaling(model)
    own = _first_layer_sees(model, batch)
    with nullcontext() if scaling is None else other_scale(scaling, 1.0):
        plain = _first_layer_sees(model, batch)
        none = _first_layer_sees(model, batch, silenced=True)
    rows, columns = _first_places(batch)
    embedded = unwrapped(model).get_input_embeddings()(batch.input_ids[rows, columns])
    heard = (embedded != 0).any(dim=-1)
    rows, columns = rows[heard], columns[heard]
    whole, part = ((one - none)[rows, columns] for one in (plain, own))  # [those that are not zero, H]
    factors = (part * whole).sum(dim=-1) / (whole * whole).sum(dim=-1)
    rest = own - plain
    rest[rows, columns] = 0
    return {
        "factor": [round(float(factor), 6) for factor in factors],
        "zero": int((~heard).sum()),
        "others_changed": float(rest.abs().max()),
    }


def _first_layer_sees(model: nn.Module, batch: Batch, *, silenced: bool = False) -> torch.Tensor:
    """[B, T, H] in float64, of the batch's own tokens: what fills a packed row up behind them is scaled, too, and does
    not count. silenced: the first embedding of every example is set to zero here."""
    seen: list[torch.Tensor] = []

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).double())

    inner = unwrapped(model)
    handle = decoder_layers(inner)[0].register_forward_pre_hook(look, with_kwargs=True)
    try:
        if silenced:
            inputs = model_inputs(inner, batch)
            embedded = inner.get_input_embeddings()(inputs["input_ids"]).clone()
            embedded[_first_places(batch)] = 0
            with packed_forward() if batch.documents else nullcontext():
                inner.get_decoder()(**inputs | {"input_ids": None, "inputs_embeds": embedded})
        else:
            hidden_states(inner, batch)
        return seen[0][:, : batch.input_ids.shape[1]]
    finally:
        handle.remove()


def _first_places(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the first real token of each example; written without a look at how the scaling finds it."""
    mask, device = batch.attention_mask, batch.input_ids.device
    if batch.documents:
        columns = torch.tensor([0, *itertools.accumulate(batch.documents[:-1])], device=device)
        return torch.zeros_like(columns), columns
    rows = torch.arange(len(batch.input_ids), device=device)
    return rows, torch.zeros_like(rows) if mask is None else mask.long().argmax(dim=-1)
