"""The child process that converts pickled files to safetensors, one after the other.

`python -m surefoot.models.convert.unpickle FOLDER BYTES`

stdin: a JSON list of {"source": file, "folder": subfolder of FOLDER, "keep": dotted prefixes, [] for everything}.
BYTES: limit of the address space.

Only torch's weights-only unpickler opens a file. Tensors are saved in tensors.safetensors under numbers, one for each
storage view, even if several names share it; everything else in structure.json, written last, where {"$tensor": "7"}
stands for a tensor. Objects of DeepSpeed's classes, which its checkpoints contain besides the weights, are replaced by
inert ones, and their code is not imported. An audit hook forbids processes, connections and writing outside FOLDER.

The first refused file ends the process with one line on stdout and exit code 3.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

REFUSED = 3
TENSORS, STRUCTURE = "tensors.safetensors", "structure.json"
_INERT = ("deepspeed.", "argparse.Namespace")
_FORBIDDEN = ("os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.", "urllib.")


def main(folder: str, memory: str) -> int:
    _limit_memory(int(memory))
    jobs = json.loads(sys.stdin.buffer.read())
    import torch

    sys.addaudithook(_hook(Path(folder).resolve()))
    for job in jobs:
        Path(job["folder"]).mkdir()
        if status := _opened(job["source"], Path(job["folder"]), tuple(job["keep"]), torch):
            return status
        gc.collect()  # the memory limit is for the largest file, not for all together
    return 0


def _opened(source: str, folder: Path, wanted: tuple[str, ...], torch: Any) -> int:
    from surefoot.models.convert.safetensors_file import write_file
    from surefoot.models.convert.tensors import held

    if tarfile.is_tarfile(source):
        return _refuse("is a tar archive, a format that torch left in 2018; load and save it with its own version")
    try:
        value = _load(torch, source)
    except Exception as error:  # a malicious file may raise anything
        return _refuse(_reason(str(error) or type(error).__name__))
    tensors: dict[Any, tuple[str, Any]] = {}
    structure = _walk(value, "", wanted, tensors, torch)
    try:
        write_file(folder / TENSORS, {name: held(tensor) for name, tensor in tensors.values()})
    except KeyError as error:
        return _refuse(f"contains a tensor of a dtype that safetensors lacks: {error}")
    (folder / STRUCTURE).write_text(json.dumps({"value": structure}), encoding="utf-8")
    return 0


def _load(torch: Any, source: str) -> Any:
    """Load the file: a zip file is memory-mapped, the older format is read completely."""
    with open(source, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    inert: list[Any] = []
    if zipped:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        inert = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in names if name.startswith(_INERT)]
    with torch.serialization.safe_globals(inert), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)


class _Inert:
    """Replaces an object of a class that is not imported; keeps its constructor arguments."""

    def __init__(self, *arguments: Any, **more: Any):
        self.arguments = arguments


def _walk(value: Any, path: str, wanted: tuple[str, ...], tensors: dict[Any, tuple[str, Any]], torch: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        key = (plain.data_ptr(), tuple(plain.shape), plain.stride(), plain.dtype) if plain.numel() else len(tensors)
        tensors.setdefault(key, (str(len(tensors)), plain))
        return {"$tensor": tensors[key][0]}
    if isinstance(value, dict):
        pairs = [(key, f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        kept = [(key, inner, item) for key, inner, item in pairs if _is_wanted(inner, wanted)]
        return {"$dict": [[str(key), _walk(item, inner, wanted, tensors, torch)] for key, inner, item in kept]}
    if isinstance(value, list | tuple):
        return [_walk(item, path, wanted, tensors, torch) for item in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, _Inert):
        return {"$object": type(value).__name__, "arguments": [str(one) for one in getattr(value, "arguments", ())]}
    return {"$object": type(value).__name__, "arguments": []}


def _is_wanted(path: str, wanted: tuple[str, ...]) -> bool:
    """Whether the path contains a wanted entry, or is within one."""
    return not wanted or any(f"{path}.".startswith(f"{one}.") or f"{one}.".startswith(f"{path}.") for one in wanted)


def _reason(text: str) -> str:
    """Return a short reason from torch's error, whose advice would be to open the file anyway."""
    if requested := re.search(r"GLOBAL ([\w.]+\.\w+)", text):
        return f"unpickling it would call {requested[1]}, which is not a tensor; it was not run"
    if "weights_only" in text.lower() or "Weights only" in text:
        return "it contains more than tensors; no code of it was run"
    return f"is not a weight file that torch can read: {' '.join(text.split())[:120]}"


def _refuse(reason: str) -> int:
    print(reason)
    return REFUSED


def _limit_memory(limit: int) -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _hook(folder: Path) -> Any:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"asks for {event}")
        if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[1], str):
            writes = any(letter in arguments[1] for letter in "wax+")
            if writes and folder not in Path(os.path.realpath(arguments[0])).parents and arguments[0] != os.devnull:
                raise PermissionError(f"asks to write {arguments[0]}")

    return hook


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
