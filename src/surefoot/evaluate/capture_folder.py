"""Read a capture: its index, and its tensors one at a time; and check the output folder. torch is imported lazily."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.families.files import read_json
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import require_replaceable

if TYPE_CHECKING:
    import torch

INDEX = "index.json"
COMPARISON, COMPARISON_PICTURE = "comparison.json", "comparison.png"
FORMAT = "surefoot capture 1"


@dataclass(frozen=True)
class Capture:
    """A capture on disk.

    name: for messages.
    index: the content of `index.json`.
    entries: its tensors by name, in the order of the model.
    """

    folder: Path
    name: str
    index: dict[str, Any]
    entries: dict[str, dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        return self.index["ids"]

    @property
    def layers(self) -> list[int]:
        return self.index["layers"]

    def tensor(self, name: str) -> torch.Tensor:
        """Load a tensor. Raises InputError if its file is damaged or missing."""
        from safetensors import SafetensorError, safe_open

        entry = self.entries[name]
        path = self.folder / entry["file"]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(entry["tensor"])
        except (OSError, SafetensorError) as error:
            raise InputError(
                Fault(str(path), f"cannot be read: {error}", "capture again", code="SF-FILE-UNREADABLE")
            ) from None
        if list(tensor.shape) != entry["shape"]:
            what = f"{name} is {list(tensor.shape)}, but the index says {entry['shape']}"
            raise InputError(Fault(str(path), what, "capture again", code="SF-EVALUATE"))
        return tensor


def is_capture(folder: Path) -> bool:
    if not (folder / INDEX).is_file():
        return False
    try:
        return read_json(folder / INDEX).get("format") == FORMAT
    except InputError:
        return False


def open_capture(folder: Path) -> Capture:
    """Raises InputError for a folder that is not a capture."""
    if not is_capture(folder):
        raise InputError(
            Fault(
                str(folder),
                f"is not a capture: it has no {INDEX} of a capture",
                "name a folder written by `surefoot capture`",
                code="SF-USE-FOLDER",
            )
        )
    index = read_json(folder / INDEX)
    return make_capture(folder, str(folder), index)


def make_capture(folder: Path, name: str, index: dict[str, Any]) -> Capture:
    return Capture(folder, name, index, {entry["name"]: entry for entry in index["tensors"]})


def require_room(out: Path, overwrite: bool, against: Path | None = None) -> None:
    """Raises InputError unless a capture may be written there, EnvironmentFault if the folder is not writable."""

    def written(index: Any) -> set[str]:
        if index["format"] != FORMAT:
            raise KeyError(FORMAT)
        files = {entry["file"] for entry in index["tensors"]}
        pictures = {Path(name).with_suffix(".png").name for name in files}
        return {*files, *pictures, "norms.png", COMPARISON, COMPARISON_PICTURE}

    require_replaceable(out, overwrite, INDEX, "capture", written)
    if against is not None and out.resolve() == against.resolve():
        raise InputError(
            Fault("--out", f"{out} is the capture to compare with", "choose another folder", code="SF-EVALUATE")
        )
    durable.require_writable(out)


def require_room_to_compare(out: Path, overwrite: bool) -> None:
    """The same check for a comparison alone. A capture may contain a comparison and still counts as a capture."""

    def written(comparison: Any) -> set[str]:
        if is_capture(out):
            raise KeyError(INDEX)
        return {COMPARISON_PICTURE} if comparison["tensors"] is not None else set()

    require_replaceable(out, overwrite, COMPARISON, "comparison", written)
