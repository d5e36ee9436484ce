"""`surefoot capture`: load a model, run it once over known token ids, and store the tensors of its layers.

    captured = capture("models/base", Path("captures/base"), seq_len=1024, layers="0,5-7")
    captured = capture("models/base", Path("captures/tuned"), adapter="runs/tuned", against=Path("captures/base"))

Everything is written to a hidden folder that becomes `out` in one rename, so a capture is complete or absent. Two
captures are compared only if they used the same token ids; `against` takes the ids from the earlier one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from surefoot.data.tokenize.segments import Piece
from surefoot.evaluate.capture_comparison import (
    CaptureComparison,
    CapturePictures,
    check_ids,
    compare_captures,
    draw_comparison,
)
from surefoot.evaluate.capture_folder import (
    COMPARISON,
    FORMAT,
    INDEX,
    Capture,
    make_capture,
    open_capture,
    require_room,
    require_room_to_compare,
)
from surefoot.evaluate.capture_tensors import CaptureWriter
from surefoot.evaluate.loss import read_evaluation_data, without_pictures
from surefoot.evaluate.texts import TEXT, about_bos, with_bos
from surefoot.methods.open_model import OpenModel, open_for_use
from surefoot.methods.requests import (
    DataRequest,
    layer_numbers,
    require_maps,
    require_positions,
    usual_tokens,
    written_text,
)
from surefoot.models.facts import facts_of
from surefoot.models.forward import causal_model, narrowed_logits
from surefoot.models.instrument import layer_parts, watched
from surefoot.models.precision import TORCH_DTYPE
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Captured:
    """The result of `capture`.

    folder: the capture.
    index: the content of index.json.
    comparison: the comparison with `against`, if given.
    pictures: file names.
    described, cautions: about the opened model.
    """

    folder: Path
    index: dict[str, Any]
    comparison: CaptureComparison | None
    pictures: tuple[str, ...]
    described: str
    cautions: tuple[str, ...]


@dataclass(frozen=True)
class _Text:
    """ids[T], and their origin for the index."""

    ids: list[int]
    origin: dict[str, Any]


def capture(
    model: str,
    out: Path,
    *,
    adapter: str | None = None,
    seq_len: int | None = None,
    layers: str = "all",
    text: Path | None = None,
    data: str | None = None,
    template: str | None = None,
    bos: bool | None = None,
    attention: bool = False,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    against: Path | None = None,
    overwrite: bool = False,
) -> Captured:
    """Capture `model` into the folder `out`.

    seq_len: number of tokens; None takes 512, or that of `against`.
    layers: "all" or for example "0,5-7".
    text: a file that is repeated or cut to seq_len tokens.
    data: data as in data.train; the first record with enough tokens is used, cut, formatted by `template` if given.
        Without text and data a built-in text is used.
    bos: whether the text begins with BOS; None as the model was trained.
    attention: whether to store attention maps.
    dtype: type to store in; None stores as computed.
    against: an earlier capture to compare with.
    overwrite: replace a capture in `out`.

    Raises InputError for an invalid request, EnvironmentFault for disk errors; `out` is then unchanged.
    """
    reference = open_capture(against) if against is not None else None
    require_room(out, overwrite, against)
    opened = with_bos(open_for_use(model, adapter, scored=True), bos)
    facts = facts_of(opened.base)
    numbers = list(layer_numbers(layers, facts.layers))
    request = None if data is None else DataRequest(data, template)
    tokens = _token_ids(opened, reference, seq_len, text, request, anew=bos is not None)
    if attention:
        require_maps(facts, len(tokens.ids))
    parts = layer_parts(opened.model, facts)
    with durable.staged_folder(out, replace=overwrite) as staging:
        pictures = CapturePictures(staging, model if adapter is None else f"{model} with {adapter}", numbers)
        writer = CaptureWriter(
            staging,
            opened.model,
            parts,
            tokens=len(tokens.ids),
            dtype=TORCH_DTYPE[dtype] if dtype else None,
            finished=pictures.layer_finished,
        )
        with watched(opened.model, parts, numbers, writer.see, writer.through, attention=attention):
            _run(opened, tokens.ids)
        pictures.draw_overview()
        index = {
            "format": FORMAT,
            "model": model,
            "adapter": adapter,
            "opened": opened.described,
            "bos_scale": opened.bos_scale,
            "text": tokens.origin,
            "ids": tokens.ids,
            "layers": list(numbers),
            "attention": attention,
            "stored_as": dtype or "computed",
            "held_bytes_at_most": writer.peak_bytes,
            "non_finite": writer.non_finite,
            "overflown": writer.overflown,
            "tensors": writer.entries,
        }
        durable.write_json(staging / INDEX, index)
        comparison = None
        if reference is not None:
            comparison = compare_captures(reference, make_capture(staging, str(out), index))
            pictures.names += write_comparison(staging, comparison)
    cautions = (*opened.cautions, *_about_the_first(opened, tokens))
    cautions += () if reference is not None else tuple(about_bos(opened, bos))
    return Captured(out, index, comparison, tuple(pictures.names), opened.described, cautions)


def _about_the_first(opened: OpenModel, tokens: _Text) -> list[str]:
    """Return a caution for a model with a scaled BOS, which scales the first token whatever it is."""
    if opened.bos_scale == 1 or tokens.ids[0] == opened.bos_id:
        return []
    return [
        f"the first token is {tokens.ids[0]}, not this model's BOS {opened.bos_id}, but its "
        f"embedding is multiplied by {opened.bos_scale:g} as well; capture this model first to use ids with BOS"
    ]


def compare_folders(reference: Path, other: Path, out: Path, *, overwrite: bool = False) -> CaptureComparison:
    """Compare two existing captures, and write the table and the picture into the folder `out`."""
    found = compare_captures(open_capture(reference), open_capture(other))
    require_room_to_compare(out, overwrite)
    with durable.staged_folder(out, replace=overwrite) as staging:
        write_comparison(staging, found)
    return found


def write_comparison(folder: Path, found: CaptureComparison) -> list[str]:
    """Write comparison.json and its picture; returns the picture's name in a list."""
    differences = [vars(one) for one in found.differences]
    durable.write_json(
        folder / COMPARISON,
        {"reference": found.reference, "other": found.other, "notes": list(found.notes), "tensors": differences},
    )
    return draw_comparison(folder, found)


def _run(opened: OpenModel, ids: list[int]) -> None:
    """Run one forward pass of the whole model; computes only the last position's logits."""
    device = next(opened.model.parameters()).device
    last = torch.tensor([len(ids) - 1], device=device)
    with torch.no_grad(), opened.context():
        narrowed_logits(opened.model, last, input_ids=torch.tensor([ids], device=device), use_cache=False)


def _token_ids(
    opened: OpenModel,
    reference: Capture | None,
    seq_len: int | None,
    text: Path | None,
    data: DataRequest | None,
    *,
    anew: bool,
) -> _Text:
    """Return the ids of the text, the data or `reference`. anew: ignore `reference` even if no text is given."""
    if reference is not None and seq_len is None and text is None and data is None and not anew:
        found = _Text(reference.ids, {"source": f"the ids of {reference.name}"})
    else:
        usual = usual_tokens(opened.positions) if reference is None else len(reference.ids)
        found = _requested_text(opened, seq_len or usual, text, data)
    require_positions("--seq-len", len(found.ids), opened.positions)
    rows = causal_model(opened.model).get_input_embeddings().get_parameter("weight").shape[0]
    if (highest := max(found.ids)) >= rows:
        what = f"contains token id {highest}, but this model has {rows} embedding rows"
        raise InputError(
            Fault(
                reference.name if reference else "the text",
                what,
                "capture models with the same tokenizer",
                code="SF-EVALUATE",
            )
        )
    if reference is not None:
        fix = "leave --text, --data, --bos and --seq-len out to take its ids"
        check_ids(reference, found.ids, "the requested text", fix)
    return found


def _requested_text(opened: OpenModel, length: int, text: Path | None, data: DataRequest | None) -> _Text:
    if data is not None:
        return _record(opened, length, data)
    content = TEXT if text is None else written_text(text)
    origin = {"source": "built-in" if text is None else str(text), "sha256": _digest(content)}
    return _Text(_repeated(opened, content, length), origin)


def _repeated(opened: OpenModel, text: str, length: int) -> list[int]:
    """BOS as the model uses it, then the text repeated. Names of control tokens in it are plain text."""
    begin = [opened.bos_id] if opened.bos_id is not None else []
    wanted = length - len(begin)
    ids: list[int] = []
    for times in (1, 2 + wanted // max(1, len(_encoded(opened, text)))):
        ids = _encoded(opened, "\n\n".join([text] * times))
        if len(ids) >= wanted:
            break
    return [*begin, *ids[:wanted]]


def _encoded(opened: OpenModel, text: str) -> list[int]:
    (ids,) = opened.encoder.encode([Piece(text, literal=True, opening=True)])
    return ids


def _record(opened: OpenModel, length: int, data: DataRequest) -> _Text:
    """The first record with enough tokens, formatted as in training (plain text unchanged) and cut."""
    prepared, _ = read_evaluation_data(opened, replace(data, max_length=min(length, opened.positions)), any_layout=True)
    without_pictures(prepared)
    lengths = [len(prepared.train[place].ids) for place in range(len(prepared.train))]
    place = next((place for place, found in enumerate(lengths) if found >= length), None)
    if place is None:
        what = f"its longest record has {max(lengths)} tokens, fewer than {length}"
        raise InputError(Fault(data.source, what, "lower --seq-len", code="SF-DATA-LENGTH"))
    origin = {"source": data.source, "sha256": prepared.audit.source.sha256, "example": place}
    return _Text([int(one) for one in prepared.train[place].ids[:length]], origin)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
