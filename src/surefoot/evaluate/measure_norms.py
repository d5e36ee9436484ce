"""`surefoot evaluate norms`: lengths of vectors and attention on the first token, of a base and its adapter.

    measured = measure_model_norms("models/base", adapter="runs/tuned", out=Path("norms"), generate_samples=True)

Both sides see the same token ids: the texts as the adapter's run lays them out. The base is the base alone, without the
adapter and without the run's BOS scaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.data.formats import Turn
from surefoot.evaluate.built_in_text import TEXT
from surefoot.evaluate.first_token import about_bos, with_bos
from surefoot.evaluate.measure_loss import read_evaluation_data
from surefoot.evaluate.norms import NormReport, measure_norms
from surefoot.evaluate.side_by_side import sides
from surefoot.methods.open_model import OpenModel, conversation_ids, open_for_use, raw_ids, room_for
from surefoot.methods.requests import DataRequest, norms_request
from surefoot.models.facts import facts_of
from surefoot.models.generate import generate_answers, left_padded
from surefoot.models.instrument import layer_parts
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
_TEXTS = 32  # texts measured unless more are asked for
_LONGEST = 512  # tokens of a text
_ROWS = 4  # texts per forward pass
_ANSWER = 64  # tokens
_PROMPTS = (
    "Name three birds that live near water.",
    "Explain in two sentences why the sky is blue.",
    "Write a short greeting for a letter to a friend.",
)


@dataclass(frozen=True)
class MeasuredNorms:
    """reports: by side, "base" and "adapter", or "model" alone. samples: per prompt, the answer of each side. origin:
    where the texts come from. pictures: files in the folder that was asked for."""

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
    texts: int = _TEXTS,
    overwrite: bool = False,
) -> MeasuredNorms:
    """data: what data.train takes, its first `texts` records laid out as in training, or by `template`; None takes a
    built-in text, a paragraph each. bos: whether each text begins with it; None as the model was trained. out:
    norms.json and pictures go there. generate_samples: also answers to three fixed prompts. overwrite: findings of
    another request in `out` may go.

    Raises InputError for anything wrong with model or data or in the way, EnvironmentFault for the disk.
    """
    asked = norms_request(model, adapter, data, template, texts, generate_samples, bos)
    if out is not None:
        require_same_request(out / RESULT, asked, overwrite, tuple(_PICTURES))
    opened = with_bos(open_for_use(model, adapter, scored=True), bos)
    opened = replace(opened, cautions=(*opened.cautions, *about_bos(opened, bos)))
    facts = facts_of(opened.base)
    sequences, origin = _sequences(
        opened, None if data is None else DataRequest(data, template, max_samples=texts), texts
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
    return found if out is None else _written(found, out, asked)


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


def _written(found: MeasuredNorms, out: Path, asked: Mapping[str, Any]) -> MeasuredNorms:
    durable.require_writable(out)
    durable.make_folders(out)
    durable.write_json(out / RESULT, {"asked": asked, **norms_to_json(found, asked["model"], asked["adapter"])})
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
    examples = (prepared.train[place].ids for place in range(len(prepared.train)))
    return [[int(one) for one in ids] for ids in examples], data.source


def _batches(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Longest first, so that little is padding and what does not fit is known at once."""
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
