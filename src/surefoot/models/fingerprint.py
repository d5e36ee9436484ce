"""Which base model this is: a digest of its settings and of the first bytes of every tensor, without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from surefoot.models.convert.safetensors_file import read_header
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.system import plain_files

_SAMPLE = 4096  # bytes hashed of each tensor


def base_fingerprint(folder: Path) -> str:
    """SHA-256 over config.json, or an adapter's adapter_config.json, and, of every weight file, its header and the
    first bytes of each of its tensors.

    Read before the model is loaded, on every rank. Whatever trained or merged a tensor changed its first bytes as
    well, so another base is noticed; a single flipped bit further on is the business of `surefoot.runs.base_bytes`.
    """
    settings = folder / "config.json"
    digest = hashlib.sha256(plain_files.read_bytes(settings if settings.exists() else folder / ADAPTER_CONFIG))
    for path in safetensors_files(folder):
        header, places = tensor_places(path)
        digest.update(f"{path.name}:".encode() + header)
        with path.open("rb") as file:
            for start, end in places.values():
                file.seek(start)
                digest.update(file.read(min(end - start, _SAMPLE)))
    return digest.hexdigest()


def safetensors_files(folder: Path) -> list[Path]:
    """Every safetensors file directly in `folder`, by name; hidden ones included, so that none escapes the digest."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def tensor_places(file: Path) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header of a safetensors file as it is, and of each tensor the first byte in the file and the one after its
    last. Raises InputError for a file that is none."""
    read_header(file)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(size)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    ends = {name: entry["data_offsets"] for name, entry in entries.items()}
    return header, {name: (8 + size + start, 8 + size + end) for name, (start, end) in ends.items()}
