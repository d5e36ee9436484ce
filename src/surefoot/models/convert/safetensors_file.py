"""Read and write safetensors files with one tensor in memory at a time.

The format: 8 bytes header length, a JSON header with the offsets of each tensor, then the data. The header is checked
in plain Python. safetensors' own writer takes all tensors of a file at once, so a whole shard would be in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.families.files import read_json
from surefoot.models.convert.tensors import TORCH_NAMES, LazyTensor, Tensors, as_bytes, bytes_of
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")  # suffixes of torch's pickled weights
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_SHARD_BYTES = 5_000_000_000  # of a shard, unless a single tensor is larger


def weights_error(where: Path, what: str, fix: str = "") -> InputError:
    """Make the error for weight files that are missing, damaged or of an unknown kind; arguments as in `Fault`."""
    return InputError(Fault(str(where), what, fix, code="SF-MODEL-WEIGHTS"))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    dtype: the safetensors name, such as "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return name -> stored tensor of a safetensors file.

    Raises InputError if the file is missing or truncated, or its offsets contradict shapes and dtypes.
    """
    if not file.is_file():
        raise weights_error(file, f"missing, but {INDEX} names it", "copy or download the model again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length or length > _HEADER_LIMIT:
            raise _cut(file, size, "a complete header")
        try:
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {
                name: StoredTensor(file, entry["dtype"], tuple(map(_size, entry["shape"])))
                for name, entry in entries.items()
            }
            end, wrong = _places(tensors, {name: tuple(entry["data_offsets"]) for name, entry in entries.items()})
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise weights_error(file, "not a safetensors file", "copy or download the model again") from error
    if wrong:
        raise weights_error(file, f"damaged: {wrong}", "copy or download it again")
    if size != 8 + length + end:
        raise _cut(file, size, f"{8 + length + end:,} bytes")
    return tensors


def indexed_files(folder: Path, index: str = INDEX) -> list[Path]:
    """Return the shards that an index file names, sorted. Raises InputError if it names none, or one elsewhere."""
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise weights_error(folder / index, "has no weight_map")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise weights_error(folder / index, f"points outside its folder: {json.dumps(outside[0])}")
    return [folder / name for name in names]


def _places(tensors: Mapping[str, StoredTensor], places: Mapping[str, tuple[int, int]]) -> tuple[int, str]:
    """Return (end of the data, what is wrong with the offsets or ""). Tensors must be contiguous, each with the bytes
    that its shape and dtype need."""
    end = 0
    for name in sorted(places, key=lambda name: places[name]):
        start, stop = places[name]
        tensor = tensors[name]
        if tensor.dtype not in TORCH_NAMES:
            return end, f"{name} has the unknown dtype {tensor.dtype}"
        if start != end or stop - start != bytes_of(tensor.shape, tensor.dtype):
            return end, f"the offsets of {name}, {start} to {stop}, contradict its shape or the previous tensor's end"
        end = stop
    return end, ""


def _size(value: object) -> int:
    """Check a dimension. Raises ValueError: computing with other JSON values could take hours, or all memory."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"a shape with {value!r}")
    return value


def _cut(file: Path, size: int, expected: str) -> InputError:
    return weights_error(file, f"damaged: {size:,} bytes, expected {expected}", "copy or download it again")


def lazy_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, LazyTensor]:
    """Return lazy tensors. A file is open only while one of its tensors is read."""
    return {name: _lazy_tensor(entry, name) for name, entry in stored.items()}


def _lazy_tensor(entry: StoredTensor, name: str) -> LazyTensor:
    def read() -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(entry.file, framework="pt") as file:
            return file.get_tensor(name)

    return LazyTensor(entry.shape, entry.dtype, read)


def write_model(folder: Path, tensors: Tensors) -> list[str]:
    """Write model.safetensors, or shards with an index. Returns the names of the written files."""
    shards = _shards(tensors)
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, {key: tensors[key] for key in shard})
    if len(shards) == 1:
        return names
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
    return [*names, INDEX]


def write_file(path: Path, tensors: Tensors) -> None:
    """Write one file, tensors sorted by name. Not atomic: the caller writes into a staged folder."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].bytes
        header[name] = {"dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(as_bytes(tensors[name].read()).numpy().data)


def _shards(tensors: Tensors) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        if shards[-1] and size + tensors[name].bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].bytes
    return shards


def stored_in(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return all tensors of several files. Raises InputError with a fault per missing or damaged file."""
    tensors: dict[str, StoredTensor] = {}
    faults: list[Fault] = []
    for file in files:
        try:
            tensors.update(read_header(file))
        except InputError as error:
            faults.extend(error.faults)
    if faults:
        raise InputError(faults)
    return tensors
