"""What a model folder holds, checked before any library opens it.

Reads `config.json` and the headers of the safetensors files in plain Python: a few kilobytes, no torch. That finds a
missing shard, a truncated file, pickled weights and a config that would fetch code, each with one clear line. What it
cannot find is a flipped bit: safetensors keeps no checksum.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json
from surefoot.models.convert.safetensors_file import INDEX, PICKLED, SINGLE, StoredTensor, stored_in
from surefoot.system.errors import Fault, InputError

ADAPTER_CONFIG = "adapter_config.json"
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"  # transformers would prefer these to model.safetensors

# Keys that name code or kernels to fetch, or a file to load in place of the usual one. They are never passed on.
_CODE_PREFIXES = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_DROPPED = ("auto_map", "custom_pipelines", "fusion_config", "transformers_weights", "name_or_path", "_name_or_path")


def check_folder(folder: Path) -> None:
    """Raises InputError unless the folder holds an adapter, or a model whose config can be used."""
    if not (folder / ADAPTER_CONFIG).is_file():
        read_config(folder)


def require_adapter(folder: Path, name: str) -> None:
    """Raises InputError unless the folder, which the user calls `name`, holds an adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise InputError(Fault(name, f"is no adapter: it has no {ADAPTER_CONFIG}", "name it as the model"))


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` without the keys that could load code. Raises InputError where there is none, or one that tries."""
    path = folder / "config.json"
    if (folder / ADAPTER_CONFIG).is_file():
        raise InputError(Fault(str(folder), "holds an adapter, not a model", "name its base model instead"))
    if not path.is_file():
        raise InputError(Fault(str(folder), "has no config.json", "give a folder with config.json and *.safetensors"))
    config = read_json(path)
    faults = list(_hostile_fields(config, str(path)))
    if "quantization_config" in config:
        faults.append(Fault(str(path), "the weights are quantised", "use the unquantised model"))
    if faults:
        raise InputError(faults)
    return _without_code(config)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> where and what, for all weights. Raises InputError: no safetensors, missing or damaged files."""
    return stored_in(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises InputError where there are none, with the way out for pickled ones."""
    if any(folder.glob(_DISTRIBUTED)):
        what = "a distributed checkpoint, whose metadata is pickled and can run code when opened"
        raise InputError(Fault(str(folder), what, "use a plain safetensors version of this model"))
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(Fault(str(folder / INDEX), "has no weight_map"))
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise InputError(Fault(str(folder / INDEX), f"points outside its folder: {outside[0]}"))
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        what = f"only pickled weights ({pickled[0]}), which can run code when opened"
        raise InputError(Fault(str(folder), what, convert_command(folder)))
    raise InputError(Fault(str(folder), f"no weights: neither {SINGLE} nor {INDEX}"))


def convert_command(folder: Path) -> str:
    """What turns pickled weights into safetensors: the fix of a fault."""
    source = shlex.quote(str(folder))
    return f"run: surefoot convert {source} --out {shlex.quote(str(folder).rstrip('/') + '-safetensors')}"


def _hostile_fields(value: Any, where: str) -> list[Fault]:
    """Fields, at any depth, that name a repository from which transformers would load a kernel (CVE-2026-4372)."""
    faults: list[Fault] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and key.startswith(_CODE_PREFIXES) and _names_repository(item):
                faults.append(Fault(where, f"{key} names code to download: {item!r}", f"delete {key} from the file"))
            faults.extend(_hostile_fields(item, where))
    elif isinstance(value, list):
        for item in value:
            faults.extend(_hostile_fields(item, where))
    return faults


def _names_repository(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_names_repository(item) for item in value.values())
    return isinstance(value, str) and "/" in value


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_code(item)
            for key, item in value.items()
            if key not in _DROPPED and not key.startswith(_CODE_PREFIXES)
        }
    return [_without_code(item) for item in value] if isinstance(value, list) else value
