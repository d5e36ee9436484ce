"""`surefoot evaluate norms`: norms of vectors and attention on the first token, layer by layer, for base and adapter.

    measured = measure_model_norms("models/base", adapter="runs/tuned", out=Path("norms"), generate_samples=True)

Both sides get the same token ids: the texts formatted as in the adapter's run. The base is used without the adapter and
without the run's BOS scaling.

Language models treat the first token specially: its residual stream is far longer than the others and gets much of the
attention. So every figure is given for the first position and for the rest. "First" is the first attended token of a
text, not padding before it. Only sums in float64 are kept, so memory does not grow with the number of texts.

    norm       |x| of a position's vector, mean over positions (first: one per text; rest: all others of all texts)
    rms        norm / sqrt(width), by which an RMSNorm divides, averaged in the same way
    attention  a query's share on the first position, mean over heads and over all queries after the first position,
               which can only attend to itself

Shapes: B texts, T tokens, h heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.data.formats import Turn
from surefoot.evaluate.capture_tensors import Summary, summarize
from surefoot.evaluate.loss import read_evaluation_data, without_pictures
from surefoot.evaluate.side_by_side import sides
from surefoot.evaluate.texts import TEXT, about_bos, with_bos
from surefoot.methods.open_model import OpenModel, conversation_ids, open_for_use, raw_ids, room_for
from surefoot.methods.requests import DataRequest, norms_request
from surefoot.models.facts import facts_of
from surefoot.models.forward import causal_model, narrowed_logits, positions_from_mask
from surefoot.models.generate import generate_answers, left_padded
from surefoot.models.instrument import LayerParts, Place, by_token, layer_parts, watched
from surefoot.models.merge import effective_weights
from surefoot.models.modes import eval_mode
from surefoot.report.pictures.norms import attention_picture, layer_picture, position_picture
from surefoot.report.pictures.plots import png
from surefoot.system import durable
from surefoot.system.folders import require_same_request

RESULT = "norms.json"
_PICTURES = {
    "norm_by_position.png": position_picture,
    "norm_by_layer.png": layer_picture,
    "attention_on_first.png": attention_picture,
}
_TEXTS = 32  # texts measured by default
_LONGEST = 512  # maximum tokens per text
_ROWS = 4  # texts per forward pass
_ANSWER = 64  # maximum tokens per answer
_PROMPTS = (
    "Name three birds that live near water.",
    "Explain in two sentences why the sky is blue.",
    "Write a short greeting for a letter to a friend.",
)


@dataclass(frozen=True)
class MeasuredNorms:
    """Norms and attention of every side.

    reports: by side, "base" and "adapter", or only "model".
    samples: per prompt, the answer of each side.
    origin: source of the texts.
    pictures: files in the output folder.
    """

    reports: Mapping[str, NormReport]
    samples: tuple[dict[str, str], ...]
    origin: str
    pictures: tuple[str, ...]
    opened: OpenModel


def measure_model_norms(
    model: str,
    *,
    adapter: str | None = None,
    data: str | None = None,
    template: str | None = None,
    out: Path | None = None,
    bos: bool | None = None,
    generate_samples: bool = False,
    max_samples: int = _TEXTS,
    overwrite: bool = False,
) -> MeasuredNorms:
    """Measure `model`, and the adapter on it, on texts.

    data: data as in data.train; its first `max_samples` records are formatted as in training, or by `template`; None
        takes a built-in text, one paragraph each.
    bos: whether each text begins with BOS; None as the model was trained.
    out: folder for norms.json and pictures.
    generate_samples: also answer three fixed prompts.
    overwrite: replace findings of a different request in `out`.

    Raises InputError for an invalid model, data or output folder, EnvironmentFault for disk errors.
    """
    request = norms_request(
        model, adapter, data, template, max_samples=max_samples, generate_samples=generate_samples, bos=bos
    )
    if out is not None:
        require_same_request(out / RESULT, request, overwrite, tuple(_PICTURES))
    opened = with_bos(open_for_use(model, adapter, scored=True), bos)
    opened = replace(opened, cautions=(*opened.cautions, *about_bos(opened, bos)))
    facts = facts_of(opened.base)
    sequences, origin = _sequences(
        opened, None if data is None else DataRequest(data, template, max_samples=max_samples), max_samples
    )
    parts = layer_parts(opened.model, facts)
    device = next(opened.model.parameters()).device
    reports: dict[str, NormReport] = {}
    answers: list[dict[str, str]] = [{"prompt": prompt} for prompt in _PROMPTS] if generate_samples else []
    for side in sides(opened):
        with side.entered():
            batches = _batches(sequences, opened.pad_id, device)
            reports[side.name] = measure_norms(
                opened.model, parts, batches, layers=facts.layers, context=opened.context
            )
            if answers:
                for row, answer in zip(answers, _answers(opened), strict=True):
                    row[side.name] = answer
    found = MeasuredNorms(reports, tuple(answers), origin, (), opened)
    return found if out is None else _written(found, out, request)


def norms_to_json(found: MeasuredNorms, model: str, adapter: str | None) -> dict[str, Any]:
    return {
        "model": model,
        "adapter": adapter,
        "opened": found.opened.described,
        "texts": found.origin,
        "results": results_to_json(found),
        "samples": list(found.samples),
    }


def results_to_json(found: MeasuredNorms) -> dict[str, dict[str, Any]]:
    return {name: report_to_json(report) for name, report in found.reports.items()}


def report_to_json(report: NormReport) -> dict[str, Any]:
    return {
        "texts": report.texts,
        "tokens": report.tokens,
        "layers": [asdict(layer) for layer in report.layers],
        "norms": [asdict(norm) for norm in report.norms],
        "norm_by_position": [[float(f"{value:.6g}") for value in row] for row in report.by_position.tolist()],
    }


def _written(found: MeasuredNorms, out: Path, request: Mapping[str, Any]) -> MeasuredNorms:
    durable.require_writable(out)
    durable.make_folders(out)
    durable.write_json(out / RESULT, {"asked": request, **norms_to_json(found, request["model"], request["adapter"])})
    results = results_to_json(found)
    for name, draw in _PICTURES.items():
        durable.write_bytes(out / name, png(draw(results)))
    return MeasuredNorms(found.reports, found.samples, found.origin, tuple(_PICTURES), found.opened)


def _sequences(opened: OpenModel, data: DataRequest | None, texts: int) -> tuple[list[list[int]], str]:
    longest = min(_LONGEST, opened.positions)
    if data is None:
        paragraphs = [" ".join(one.split()) for one in TEXT.split("\n\n")][:texts]
        return [raw_ids(opened, one)[:longest] for one in paragraphs], "built-in text"
    prepared, _ = read_evaluation_data(opened, replace(data, max_length=longest), any_layout=True)
    without_pictures(prepared)
    examples = (prepared.train[place].ids for place in range(len(prepared.train)))
    return [[int(one) for one in ids] for ids in examples], data.source


def _batches(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches, longest first, so that there is little padding and lack of memory shows at once."""
    ordered = sorted(sequences, key=len, reverse=True)
    for start in range(0, len(ordered), _ROWS):
        yield left_padded(ordered[start : start + _ROWS], pad_id, device)


def _answers(opened: OpenModel) -> list[str]:
    prompts = [conversation_ids(opened, [Turn("user", prompt)]) for prompt in _PROMPTS]
    with opened.context():
        generated = generate_answers(
            opened.model,
            opened.tokenizer,
            prompts,
            max_new_tokens=room_for(opened, prompts, None, usual=_ANSWER),
            stop_ids=opened.template.stop_ids,
            pad_id=opened.pad_id,
        )
    return [one.text for one in generated]


@dataclass(frozen=True)
class FirstRest:
    """Mean norm and rms of the vectors at the first position and at the others; None if no text has others."""

    first_norm: float
    rest_norm: float | None
    first_rms: float
    rest_rms: float | None


@dataclass(frozen=True)
class NormFacts:
    """One norm layer. weight: None if it has none; for Gemma, 1 is added to the stored weight."""

    name: str
    layer: int | None
    weight: Summary | None
    input: FirstRest
    output: FirstRest


@dataclass(frozen=True)
class LayerFacts:
    """A decoder layer: the residual stream into and out of it, and the attention on the first position (None: one
    token, or no attention in this layer)."""

    layer: int
    residual_in: FirstRest
    residual_out: FirstRest
    attention: float | None


@dataclass(frozen=True)
class NormReport:
    """Norms of one model, by layer and by position.

    texts, tokens: numbers measured.
    norms: of all layers, the final one last.
    by_position: [layers + 1, longest], mean norm of the stream into each layer and out of the last, over the texts that
        reach the position.
    """

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
    """Run the model over the batches and accumulate norms and attention.

    batches: ids[B, T] and mask[B, T] of real tokens, padded on either side, at least one token per row.
    layers: number of decoder layers. The model runs with eager attention in evaluation mode, and is restored.
    """
    meter = _Meter()
    texts, tokens = 0, 0
    with eval_mode(model), watched(model, parts, range(layers), meter.see, attention=True):
        for ids, mask in batches:
            meter.mask = mask.bool()
            # Logits of only one position: all would take vocabulary x tokens, and none are used.
            last = torch.tensor([ids.numel() - 1], device=ids.device)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_from_mask(mask)}
            with context():
                narrowed_logits(model, last, **inputs, use_cache=False)
            texts, tokens = texts + len(ids), tokens + int(mask.sum())
    return NormReport(texts, tokens, *_results(model, parts, meter, layers))


class _Meter:
    """Sums by place. mask: of the current batch."""

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
        """Padding queries and keys are not counted."""
        total, count = self.attention.get(layer, (0.0, 0))
        for heads, real in zip(maps, self.mask, strict=True):
            attended = real.nonzero().flatten()
            shares = heads[:, attended[1:], attended[0]].double()
            total, count = total + float(shares.sum()), count + shares.numel()
        self.attention[layer] = (total, count)


class _Lengths:
    """Sum and number of vectors by position, counted from the first attended token."""

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

    def lengths(module: str, kind: str) -> FirstRest:
        return meter.lengths[module, kind].first_rest()

    def norm(name: str, layer: int | None) -> NormFacts:
        weight = effective_weights(base.get_submodule(name)).weight
        summary = None if weight is None else summarize(weight)
        return NormFacts(name, layer, summary, lengths(name, "input"), lengths(name, "output"))

    facts, norms, streams = [], [], []
    for number in range(layers):
        name = f"{parts.layers}.{number}"
        total, count = meter.attention.get(number, (0.0, 0))
        share = total / count if count else None
        facts.append(LayerFacts(number, lengths(name, "residual_in"), lengths(name, "residual_out"), share))
        norms += [norm(f"{name}.{part.path}", number) for part in parts.of_layer(base, number) if part.kind == "norm"]
        streams.append(meter.lengths[name, "residual_in"])
    if parts.final_norm is not None:
        norms.append(norm(parts.final_norm.path, None))
    streams.append(meter.lengths[f"{parts.layers}.{layers - 1}", "residual_out"])
    return tuple(facts), tuple(norms), np.stack([stream.sums / stream.counts for stream in streams])
