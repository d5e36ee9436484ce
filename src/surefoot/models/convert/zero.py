"""Consolidate ZeRO checkpoints: put the optimizer's fp32 weights back into the shapes of the parameters.

A DeepSpeed checkpoint folder `global_step<N>` (its parent's file `latest` names it) holds, for world size W:

    [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt   optimizer_state_dict:
        zero_stage, partition_count
        stages 1, 2: single_partition_of_fp32_groups   one flat fp32 tensor per parameter group
        stage 3:     fp32_flat_groups                  one or more flat fp32 tensors, all groups in order
    mp_rank_00_model_states.pt (stages 1, 2) | zero_pp_rank_<r>_mp_rank_00_model_states.pt (stage 3)
        param_shapes                  per group: name -> shape, in the order of the flat tensor
        module, buffer_names          buffers, unsharded
        shared_params                 name -> the name whose tensor it is
        frozen_param_shapes, frozen_param_fragments   parameters that are not in the optimizer

Stages 1 and 2 shard a group's flat tensor (concatenated parameters, then padding) into W equal pieces, one per rank.
Stage 3 shards each parameter by itself: rank r holds its elements r·c to (r+1)·c, c = ceil(elements / W), padded at the
end. Reading a tensor reads only the pieces that it overlaps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.models.convert.tensors import LazyTensor, some
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    import torch

Open = Callable[[Sequence[tuple[Path, Sequence[str]]]], list[Any]]  # files, what to keep of each -> their values
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt")
_STATES = (
    "param_shapes",
    "buffer_names",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
)
_FLAT = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_OPTIMIZER = tuple(
    f"optimizer_state_dict.{key}" for key in ("zero_stage", "partition_count", *sorted(set(_FLAT.values())))
)


def _error(where: Path, what: str, fix: str = "") -> InputError:
    return InputError(Fault(str(where), what, fix, code="SF-CONVERT-ZERO"))


def find_checkpoint(folder: Path) -> Path | None:
    """Return the folder with the ranks' files: `folder`, or the one that its file `latest` names; None if there is no
    ZeRO checkpoint."""
    if any(_OPTIM.fullmatch(path.name) for path in folder.glob("*_optim_states.pt")):
        return folder
    if not (folder / "latest").is_file():
        return None
    tag = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    if Path(tag).name != tag or not (folder / tag).is_dir():
        raise _error(folder / "latest", f"names {tag!r}, which is not a folder next to it")
    return find_checkpoint(folder / tag)


def consolidate(folder: Path, open_files: Open) -> dict[str, LazyTensor]:
    """Return name -> fp32 weight, from all ranks' files in `folder`. Frozen weights and buffers keep their dtype.

    open_files: opens pickled files (`surefoot.models.convert.pickled`).

    Raises InputError if a rank is missing, for tensor parallelism, and if sizes do not match.
    """
    ranks = _ranks(folder)
    here = sorted(path for path in folder.iterdir() if _MODEL.fullmatch(path.name))
    opened = open_files([*((path, _OPTIMIZER) for path in ranks), *((path, _STATES) for path in here)])
    optimizers = [state["optimizer_state_dict"] for state in opened[: len(ranks)]]
    states = dict(zip(here, opened[len(ranks) :], strict=True))
    stage, world = _stage(optimizers[0], folder), _world(optimizers[0], folder)
    if len(ranks) != world:
        raise _error(folder, f"was written by {world} ranks, but has files of {len(ranks)}", "copy all files")
    model_files = _model_files(folder, world if stage == 3 else 1)
    models = [states[path] for path in model_files]
    flat = [[piece for piece in one[_FLAT[stage]] if piece is not None] for one in optimizers]
    groups = [_shapes(group) for group in models[0]["param_shapes"]]
    cut = _cut_by_parameter if stage == 3 else _cut_by_group
    tensors = cut(groups, flat, folder)
    tensors |= _frozen(models, stage, folder)
    tensors |= _buffers(models[0].get("buffer_names") or (), model_files[0], open_files)
    shared = models[0].get("shared_params") or {}
    for name, owner in shared.items() if isinstance(shared, Mapping) else shared:
        tensors[name] = tensors[owner]
    return tensors


def _ranks(folder: Path) -> list[Path]:
    found = {
        tuple(map(int, match.groups())): path for path in folder.iterdir() if (match := _OPTIM.fullmatch(path.name))
    }
    if any(model_rank for _, model_rank in found):
        what = "was trained with tensor parallelism; the files do not record how matrices were split"
        raise _error(folder, what, "consolidate it with the code that trained it")
    return [found[key] for key in sorted(found)]


def _model_files(folder: Path, count: int) -> list[Path]:
    if count == 1 and (folder / "mp_rank_00_model_states.pt").is_file():
        return [folder / "mp_rank_00_model_states.pt"]
    files = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(count)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise _error(folder, f"{len(missing)} files are missing: {some(missing)}", "copy all files")
    return files


def _buffers(names: Sequence[str], file: Path, open_files: Open) -> dict[str, LazyTensor]:
    """Return the buffers. Opens the file again to read only them: their names are known only from the file itself."""
    if not names:
        return {}
    (state,) = open_files([(file, [f"module.{name}" for name in names])])
    return {name: state["module"][name] for name in names}


def _stage(optimizer: Mapping[str, Any], folder: Path) -> int:
    value = optimizer.get("zero_stage", 1)
    if isinstance(value, dict):  # DeepSpeed's ZeroStageEnum
        value = int(next(iter(value.get("arguments", [])), 0))
    if value not in _FLAT:
        raise _error(folder, f"unknown ZeRO stage {value!r}")
    return value


def _world(optimizer: Mapping[str, Any], folder: Path) -> int:
    count = optimizer.get("partition_count", 1)
    counts = set(count) if isinstance(count, list) else {count}
    if len(counts) != 1:
        what = f"has groups sharded over different numbers of ranks, as with experts: {some(map(str, counts))}"
        raise _error(folder, what, "consolidate it with the code that trained it")
    return counts.pop()


def _shapes(group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in group.items()}


def _cut_by_group(
    groups: list[dict[str, tuple[int, ...]]], flat: list[list[LazyTensor]], folder: Path
) -> dict[str, LazyTensor]:
    tensors = {}
    for number, group in enumerate(groups):
        pieces = [rank[number] for rank in flat]
        there, wanted = sum(piece.shape[0] for piece in pieces), sum(map(math.prod, group.values()))
        padding = 2 * len(pieces)  # DeepSpeed aligns each rank's piece to 4 bytes: two fp16 elements
        if not wanted <= there < wanted + padding:
            what = f"group {number} has {there:,} elements, but its parameters have {wanted:,}"
            raise _error(folder, what, "a file is missing or from another run")
        start = 0
        for name, shape in group.items():
            tensors[name] = _between(pieces, start, shape)
            start += math.prod(shape)
    return tensors


def _cut_by_parameter(
    groups: list[dict[str, tuple[int, ...]]], flat: list[list[LazyTensor]], folder: Path
) -> dict[str, LazyTensor]:
    world = len(flat)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    wanted = sum(math.ceil(math.prod(shape) / world) for shape in shapes.values())
    tensors, start = {}, 0
    for rank in flat:
        if (there := sum(piece.shape[0] for piece in rank)) != wanted:
            what = f"a rank has {there:,} elements, but its shards of the parameters have {wanted:,}"
            raise _error(folder, what, "a file is missing or from another run")
    for name, shape in shapes.items():
        share = math.ceil(math.prod(shape) / world)
        tensors[name] = _whole([_between(rank, start, (share,)) for rank in flat], shape)
        start += share
    return tensors


def _frozen(models: list[Mapping[str, Any]], stage: int, folder: Path) -> dict[str, LazyTensor]:
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    tensors = {}
    for name, shape in _shapes(models[0].get("frozen_param_shapes") or {}).items():
        pieces = [fragment.get(name) for fragment in fragments]
        held = [piece for piece in pieces if isinstance(piece, LazyTensor)]
        if len(held) != len(models):
            raise _error(folder, f"the frozen weight {name} is missing in a rank's file")
        tensors[name] = _whole([_flattened(piece) for piece in held], shape) if stage == 3 else held[0]
    return tensors


def _flattened(tensor: LazyTensor) -> LazyTensor:
    return LazyTensor((math.prod(tensor.shape),), tensor.dtype, lambda: tensor.read().reshape(-1))


def _between(pieces: Sequence[LazyTensor], start: int, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor of `shape` from the elements at `start` of the concatenated flat pieces, reading only those that
    it overlaps."""
    stop = start + math.prod(shape)

    def read() -> torch.Tensor:
        import torch

        found, position = [], 0
        for piece in pieces:
            low, high = max(start, position), min(stop, position + piece.shape[0])
            if low < high:
                found.append(piece.read()[low - position : high - position])
            position += piece.shape[0]
        return torch.cat(found).reshape(shape) if found else torch.zeros(shape)

    return LazyTensor(shape, pieces[0].dtype, read)


def _whole(shares: Sequence[LazyTensor], shape: tuple[int, ...]) -> LazyTensor:
    """Concatenate the ranks' shards of one parameter, without the padding of the last."""

    def read() -> torch.Tensor:
        import torch

        return torch.cat([share.read() for share in shares])[: math.prod(shape)].reshape(shape)

    return LazyTensor(shape, shares[0].dtype, read)
