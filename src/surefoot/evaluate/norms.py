"""How long the vectors inside a model are, and how much attention goes to the first token, layer by layer.

Language models treat the first token apart: its stream is far longer than the others and much attention goes there.
So everything is told for the first position and for the rest. "First" is the first attended token of a text: padding in
front of it does not count. Nothing is kept but sums in float64, so memory does not grow with the number of texts.

    norm       |x| of a position's vector, meaned over positions (first: one per text; rest: all others of all texts)
    rms        norm / sqrt(width), what an RMSNorm divides by, meaned in the same way
    attention  the share that a query gives to the first position, meaned over heads and all queries after the first
               position, which has nothing else to look at

Shapes: B texts, T tokens, h heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from surefoot.evaluate.statistics import Summary, summarise
from surefoot.models.forward import causal_model, narrowed_logits, positions_from_mask
from surefoot.models.instrument import LayerParts, Place, by_token, watched
from surefoot.models.merge import effective_weights
from surefoot.models.modes import eval_mode


@dataclass(frozen=True)
class FirstRest:
    """Mean length and rms of the vectors at the first position and at the others; None: no text has others."""

    first_norm: float
    rest_norm: float | None
    first_rms: float
    rest_rms: float | None


@dataclass(frozen=True)
class NormFacts:
    """One norm. weight: None where it has none. In Gemma 1 is added to the weight that is stored."""

    name: str
    layer: int | None
    weight: Summary | None
    input: FirstRest
    output: FirstRest


@dataclass(frozen=True)
class LayerFacts:
    """A decoder layer: the stream into and out of it, and the attention on the first position (None: one token)."""

    layer: int
    residual_in: FirstRest
    residual_out: FirstRest
    attention: float | None


@dataclass(frozen=True)
class NormReport:
    """texts, tokens: how much was measured. norms: of all layers, the final one last. by_position: [layers + 1,
    longest], mean length of the stream into each layer and out of the last, over the texts that reach the position."""

    texts: int
    tokens: int
    layers: tuple[LayerFacts, ...]
    norms: tuple[NormFacts, ...]
    by_position: np.ndarray


@torch.no_grad()
def measure_norms(
    model: nn.Module,
    parts: LayerParts,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    layers: int,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> NormReport:
    """batches: ids[B, T] and mask[B, T] of real tokens, padded on either side, every row with one at least. layers: how
    many the model has. The model runs with eager attention, in evaluation mode, and is then as it was."""
    meter = _Meter()
    texts, tokens = 0, 0
    with eval_mode(model), watched(model, parts, range(layers), meter.see, attention=True):
        for ids, mask in batches:
            meter.mask = mask.bool()
            last = torch.tensor([ids.numel() - 1], device=ids.device)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_from_mask(mask)}
            with context():
                narrowed_logits(model, last, **inputs, use_cache=False)
            texts, tokens = texts + len(ids), tokens + int(mask.sum())
    return NormReport(texts, tokens, *_results(model, parts, meter, layers))


class _Meter:
    """Sums by what was seen where. mask: of the batch that runs."""

    def __init__(self) -> None:
        self.mask = torch.empty(0)
        self.lengths: dict[tuple[str, str], _Lengths] = {}
        self.attention: dict[int | None, tuple[float, int]] = {}

    def see(self, place: Place, tensor: torch.Tensor) -> None:
        if place.kind == "attention":
            self._see_attention(place.layer, tensor)
            return
        if place.part is not None and place.part.kind != "norm":
            return
        rows = by_token(tensor, *self.mask.shape)
        found = self.lengths.setdefault((place.module, place.kind), _Lengths(rows.shape[2]))
        for row, real in zip(rows, self.mask, strict=True):
            found.add(row[real].double().norm(dim=-1).cpu().numpy())

    def _see_attention(self, layer: int | None, maps: torch.Tensor) -> None:
        """Queries and keys that are padding count for nothing."""
        total, count = self.attention.get(layer, (0.0, 0))
        for heads, real in zip(maps, self.mask, strict=True):
            attended = real.nonzero().flatten()
            shares = heads[:, attended[1:], attended[0]].double()
            total, count = total + float(shares.sum()), count + shares.numel()
        self.attention[layer] = (total, count)


class _Lengths:
    """Sum and number of vectors by position, from the first attended token on."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.sums, self.counts = np.zeros(0), np.zeros(0)

    def add(self, norms: np.ndarray) -> None:
        if len(norms) > len(self.sums):
            more = (0, len(norms) - len(self.sums))
            self.sums, self.counts = np.pad(self.sums, more), np.pad(self.counts, more)
        self.sums[: len(norms)] += norms
        self.counts[: len(norms)] += 1

    def first_rest(self) -> FirstRest:
        first = float(self.sums[0] / self.counts[0])
        others = self.counts[1:].sum()
        rest = float(self.sums[1:].sum() / others) if others else None
        scale = math.sqrt(self.width)
        return FirstRest(first, rest, first / scale, None if rest is None else rest / scale)


def _results(
    model: nn.Module, parts: LayerParts, meter: _Meter, layers: int
) -> tuple[tuple[LayerFacts, ...], tuple[NormFacts, ...], np.ndarray]:
    base = causal_model(model)

    def told(module: str, kind: str) -> FirstRest:
        return meter.lengths[module, kind].first_rest()

    def norm(name: str, layer: int | None) -> NormFacts:
        weight = effective_weights(base.get_submodule(name)).weight
        summary = None if weight is None else summarise(weight)
        return NormFacts(name, layer, summary, told(name, "input"), told(name, "output"))

    facts, norms, streams = [], [], []
    for number in range(layers):
        name = f"{parts.layers}.{number}"
        total, count = meter.attention[number]
        share = total / count if count else None
        facts.append(LayerFacts(number, told(name, "residual_in"), told(name, "residual_out"), share))
        norms += [norm(f"{name}.{part.path}", number) for part in parts.parts if part.kind == "norm"]
        streams.append(meter.lengths[name, "residual_in"])
    if parts.final_norm is not None:
        norms.append(norm(parts.final_norm.path, None))
    streams.append(meter.lengths[f"{parts.layers}.{layers - 1}", "residual_out"])
    return tuple(facts), tuple(norms), np.stack([stream.sums / stream.counts for stream in streams])
