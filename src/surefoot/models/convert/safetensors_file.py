"""safetensors files: their header, checked in plain Python; their tensors, unread; and new files, tensor by tensor.

The format is 8 bytes of length, a JSON header with an offset per tensor, then the bytes. Written here because a writer
that takes all tensors at once would hold a whole shard in memory, and twice where it copies.
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
PICKLED = (".bin", ".pt", ".pth", ".ckpt")  # suffixes of what torch pickles instead
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors format itself


def weights_error(where: Path, what: str, fix: str = "") -> InputError:
    """A file or folder of weights that is missing, damaged or of a kind that is not read; arguments as in `Fault`."""
    return InputError(Fault(str(where), what, fix, code="SF-MODEL-WEIGHTS"))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk.

    dtype: the safetensors name, such as "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, from the header of one safetensors file: 8 bytes of length, then JSON with data offsets."""
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
    """The files that an index of shards names, by name. Raises InputError where it names none, or one elsewhere."""
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise weights_error(folder / index, "has no weight_map")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise weights_error(folder / index, f"points outside its folder: {json.dumps(outside[0])}")
    return [folder / name for name in names]


def _places(tensors: Mapping[str, StoredTensor], places: Mapping[str, tuple[int, int]]) -> tuple[int, str]:
    """Where the data end, and what is wrong with their order: each tensor has to begin where another ends, and to have
    the bytes that its shape and type need."""
    end = 0
    for name in sorted(places, key=lambda name: places[name]):
        start, stop = places[name]
        tensor = tensors[name]
        if tensor.dtype not in TORCH_NAMES:
            return end, f"{name} has the type {tensor.dtype}, which is not known here"
        if start != end or stop - start != bytes_of(tensor.shape, tensor.dtype):
            return end, f"{name} is said to lie at bytes {start} to {stop}, which its shape and neighbours contradict"
        end = stop
    return end, ""


def _size(value: object) -> int:
    """Of one dimension. Raises ValueError: a product of anything else could take hours, or all memory."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"a shape with {value!r}")
    return value


def _cut(file: Path, size: int, expected: str) -> InputError:
    return weights_error(file, f"damaged: {size:,} bytes, expected {expected}", "copy or download it again")


def lazy_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, LazyTensor]:
    """Tensors of files whose headers have been read. The file stays closed but while one of them is read."""
    return {name: _lazy_tensor(entry, name) for name, entry in stored.items()}


def _lazy_tensor(entry: StoredTensor, name: str) -> LazyTensor:
    def read() -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(entry.file, framework="pt") as file:
            return file.get_tensor(name)

    return LazyTensor(entry.shape, entry.dtype, read)


def write_model(folder: Path, tensors: Tensors, *, stem: str = "model", shard_bytes: int = 5_000_000_000) -> list[str]:
    """`stem`.safetensors, or shards of up to `shard_bytes` with an index. Returns the names of the files written."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, {key: tensors[key] for key in shard})
    if len(shards) == 1:
        return names
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    return [*names, f"{stem}.safetensors.index.json"]


def write_file(path: Path, tensors: Tensors) -> None:
    """One file, its tensors by name, one in memory at a time. Written plainly: staging is the caller's."""
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


def _shards(tensors: Tensors, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        if shards[-1] and size + tensors[name].bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].bytes
    return shards


def stored_in(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """All tensors of several files. Raises InputError with a fault for each file that is missing or damaged."""
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
