"""Write the tensors of a forward pass to disk, one file per decoder layer, with an index and statistics.

A `CaptureWriter` is the callback of `models.instrument.watched`. It copies the tensors of one layer, writes them when
the layer is complete, and frees them, so memory is bounded by one layer. A tensor shared by several modules (q, k and v
read the same input) is stored once, under its first name; the index says where each name is.

    layer-00000.safetensors …   a tensor per name        final.safetensors   the final norm
    index.json                  ids, and per tensor: name, shape, dtype, layer, kind, role, file, statistics

Statistics are computed in float64, in pieces. Non-finite values are counted and left out of all other statistics, so
that one of them does not hide the rest.

Shapes: T tokens, h heads. Activations are [T, width], attention maps [h, T, T], matrices as in the model.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from surefoot.models.forward import causal_model
from surefoot.models.instrument import LayerParts, Part, Place, by_token
from surefoot.models.merge import effective_weights
from surefoot.models.peft import LoraLayer
from surefoot.system.errors import EnvironmentFault, Fault

FINAL = "final.safetensors"
Finished = Callable[[int | None, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True)
class _Seen:
    """A tensor stored under `name` while its layer runs. version: torch's version counter, to detect in-place
    writes."""

    # A weak reference, not an address: a freed tensor's address is reused.

    tensor: weakref.ref[torch.Tensor]
    version: int
    name: str


class CaptureWriter:
    """Writes the tensors that `models.instrument.watched` reports, layer by layer.

    folder: output folder.
    tokens: T.
    dtype: type to store in; None as computed.
    finished: called with each layer's tensors before they are freed.

    After the forward pass `entries` are the index's rows, `non_finite` the names of tensors with non-finite values,
    `overflown` those that overflowed in the stored dtype, `peak_bytes` the most memory used at once.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        parts: LayerParts,
        *,
        tokens: int,
        dtype: torch.dtype | None = None,
        finished: Finished = lambda layer, tensors: None,
    ):
        self.entries: list[dict[str, Any]] = []
        self.non_finite: list[str] = []
        self.overflown: list[str] = []
        self.peak_bytes = 0
        self._folder, self._model, self._parts = folder, causal_model(model), parts
        self._tokens, self._dtype, self._finished = tokens, dtype, finished
        self._held: dict[str, torch.Tensor] = {}
        self._seen: list[_Seen] = []

    def see(self, place: Place, tensor: torch.Tensor) -> None:
        if place.kind == "attention":
            maps = tensor[0]
            self._store(f"{place.module}.attention", place, maps, None, {"first_mass": first_mass(maps)})
            return
        name = f"{place.module}.{place.kind}"
        rows = by_token(tensor, 1, self._tokens)[0]
        if (known := self._known(tensor)) is None:
            self._store(name, place, rows, None, asdict(split_first(rows)))
            self._seen.append(_Seen(weakref.ref(tensor), tensor._version, name))
        else:
            same = next(entry for entry in reversed(self.entries) if entry["name"] == known)
            self.entries.append(same | {"name": name, "module": place.module, "kind": place.kind})
        if place.kind == "output" and place.part is not None:
            for role, piece in _split(rows, place.part, axis=1):
                self._store(f"{place.module}.{role}.output", place, piece, role, asdict(split_first(piece)))

    def through(self, layer: int | None) -> None:
        """Add the layer's matrices and write it; called when all of the layer was seen."""
        prefix = f"{self._parts.layers}.{layer}."
        final = [self._parts.final_norm] if self._parts.final_norm else []
        for part in final if layer is None else self._parts.of_layer(self._model, layer):
            path = part.path if layer is None else prefix + part.path
            self._store_weights(Place(layer, path, part, "output"), self._model.get_submodule(path))
        path = self._folder / _file(layer)
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise EnvironmentFault(
                Fault(str(path), f"cannot be written: {error}", "check the disk", code="SF-FILE-WRITE")
            ) from error
        # Freed only now, because the pictures are drawn from these tensors.
        self._finished(layer, self._held)
        self._held, self._seen = {}, []

    def _store_weights(self, place: Place, module: nn.Module) -> None:
        assert place.part is not None
        found = effective_weights(module)
        which: dict[str, Any] = {"weights": "base"}
        if found.before is not None and found.weight is not None:
            which = {"weights": "effective", "change": relative_difference(found.weight, found.before)}
        base = module.get_base_layer() if isinstance(module, LoraLayer) else module
        for kind, tensor in (("weight", found.weight), ("bias", found.bias)):
            if tensor is None:
                continue
            more = which if kind == "weight" else {}
            self._store(f"{place.module}.{kind}", place, tensor, None, more, kind)
            axis = 1 if kind == "weight" and isinstance(base, Conv1D) else 0
            for role, piece in _split(tensor, place.part, axis):
                self._store(f"{place.module}.{role}.{kind}", place, piece, role, {}, kind)

    def _store(
        self, name: str, place: Place, tensor: torch.Tensor, role: str | None, more: dict[str, Any], kind: str = ""
    ) -> None:
        summary = summarize(tensor)
        stored = tensor.detach().to("cpu", self._dtype or tensor.dtype, copy=True).contiguous()
        if summary.non_finite:
            self.non_finite.append(name)
        elif self._dtype is not None and not bool(stored.isfinite().all()):
            self.overflown.append(name)
        self._held[name] = stored
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes for one in self._held.values()))
        part = place.part
        self.entries.append(
            {
                "name": name,
                "layer": place.layer,
                "module": place.module,
                "kind": kind or place.kind,
                "role": role or (part.roles[0] if part and len(part.roles) == 1 else None),
                "shape": list(stored.shape),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "file": _file(place.layer),
                "tensor": name,
                "statistics": {key: as_json(value) for key, value in (asdict(summary) | more).items()},
            }
        )

    def _known(self, tensor: torch.Tensor) -> str | None:
        """The name under which this same tensor is already stored."""
        matches = (one.name for one in self._seen if one.tensor() is tensor and one.version == tensor._version)
        return next(matches, None)


def _split(tensor: torch.Tensor, part: Part, axis: int) -> Sequence[tuple[str, torch.Tensor]]:
    """(role, part) of a fused tensor; empty for an unfused one."""
    if len(part.roles) < 2:
        return ()
    return tuple(zip(part.roles, tensor.split(list(part.sizes), dim=axis), strict=True))


def _file(layer: int | None) -> str:
    return FINAL if layer is None else f"layer-{layer:05d}.safetensors"


_PIECE = 1 << 20  # values in float64 at once


@dataclass(frozen=True)
class Summary:
    """Statistics of a tensor.

    std: population standard deviation.
    zeros: share of values that are exactly 0.
    non_finite: number of NaN and infinite values. The others are 0.0 if no value is finite.
    """

    count: int
    mean: float
    std: float
    rms: float
    abs_max: float
    zeros: float
    non_finite: int


@dataclass(frozen=True)
class Split:
    """The first position of a text compared with the rest. norm: length of a position's vector, mean over positions;
    rms,
    abs_max: over values. None for the rest of a text with one token."""

    first: dict[str, float]
    rest: dict[str, float] | None


def summarize(tensor: torch.Tensor) -> Summary:
    count, non_finite, zeros = 0, 0, 0
    total, squares, largest = 0.0, 0.0, 0.0
    for piece in _pieces(tensor):
        finite = piece[piece.isfinite()]
        count += piece.numel()
        non_finite += piece.numel() - finite.numel()
        zeros += int((finite == 0).sum())
        total += float(finite.sum())
        squares += float(finite.square().sum())
        largest = max(largest, float(finite.abs().max()) if finite.numel() else 0.0)
    good = count - non_finite
    if not good:
        return Summary(count, 0.0, 0.0, 0.0, 0.0, 0.0, non_finite)
    mean = total / good
    summary = Summary(count, mean, 0.0, math.sqrt(squares / good), largest, zeros / good, non_finite)
    return replace(summary, std=math.sqrt(_spread(tensor, mean) / good))


def split_first(activation: torch.Tensor) -> Split:
    """Split an activation [T, width] of one text into first position and rest."""
    norms = activation.double().norm(dim=-1)
    parts = [_part(activation[:1], norms[:1])]
    if len(activation) > 1:
        parts.append(_part(activation[1:], norms[1:]))
    return Split(parts[0], parts[1] if len(parts) > 1 else None)


def relative_difference(new: torch.Tensor, old: torch.Tensor) -> float | None:
    """|new - old| / |old|. 0.0 if both are zero, None if only the old is or if one is not finite."""
    difference, length = 0.0, 0.0
    for one, other in zip(_pieces(new), _pieces(old), strict=True):
        difference += float((one - other).square().sum())
        length += float(other.square().sum())
    if not math.isfinite(difference) or not math.isfinite(length):
        return None
    if length == 0.0:
        return 0.0 if difference == 0.0 else None
    return math.sqrt(difference / length)


def first_mass(attention: torch.Tensor) -> float | None:
    """Share of attention on the first position; [h, T, T] averaged over heads and over queries after the first, which
    can only attend to itself. None if there are none."""
    return float(attention[:, 1:, 0].double().mean()) if attention.shape[1] > 1 else None


def as_json(value: Any) -> Any:
    """Replace floats that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _part(values: torch.Tensor, norms: torch.Tensor) -> dict[str, float]:
    found = summarize(values)
    return {"norm": float(norms.mean()), "rms": found.rms, "abs_max": found.abs_max}


def _spread(tensor: torch.Tensor, mean: float) -> float:
    """Sum of squared deviations from the mean, in a second pass: a single pass would lose it to rounding."""
    return sum(float((piece[piece.isfinite()] - mean).square().sum()) for piece in _pieces(tensor))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE].double()
