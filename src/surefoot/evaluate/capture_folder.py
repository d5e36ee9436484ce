"""Read a capture back: its index, and its tensors one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from surefoot.errors import Fault, InputError
from surefoot.families.files import read_json

INDEX = "index.json"
FORMAT = "surefoot capture 1"


@dataclass(frozen=True)
class Capture:
    """A capture on disk. index: as `index.json` holds it. entries: its tensors by name, in the order of the model."""

    folder: Path
    index: dict[str, Any]
    entries: dict[str, dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        return self.index["ids"]

    @property
    def layers(self) -> list[int]:
        return self.index["layers"]

    def tensor(self, name: str) -> torch.Tensor:
        """Raises InputError where its file is damaged or gone."""
        entry = self.entries[name]
        path = self.folder / entry["file"]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(entry["tensor"])
        except (OSError, SafetensorError) as error:
            raise InputError(Fault(str(path), f"cannot be read: {error}", "capture again")) from None
        if list(tensor.shape) != entry["shape"]:
            what = f"{name} is {list(tensor.shape)}, and the index says {entry['shape']}"
            raise InputError(Fault(str(path), what, "capture again"))
        return tensor


def is_capture(folder: Path) -> bool:
    if not (folder / INDEX).is_file():
        return False
    try:
        return read_json(folder / INDEX).get("format") == FORMAT
    except InputError:
        return False


def open_capture(folder: Path) -> Capture:
    """Raises InputError for a folder that is none."""
    if not is_capture(folder):
        raise InputError(Fault(str(folder), f"is no capture: it has no {INDEX} of one", "name a folder of `capture`"))
    index = read_json(folder / INDEX)
    entries = {entry["name"]: entry for entry in index["tensors"]}
    return Capture(folder, index, entries)
