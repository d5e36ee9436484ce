"""Find a model's folder, and check its files before any library opens them.

`resolve_folder` returns a local folder unchanged and downloads a hub id to Hugging Face's cache. Only files that
surefoot reads are downloaded, including an adapter's, and never pickled weights (for the hub's errors see
`surefoot.system.hub`). `check_folder` reads `config.json` and the safetensors headers in plain Python: a few kilobytes,
no torch. This finds missing shards, truncated files, pickled weights and configs that would fetch code, but not flipped
bits, because safetensors has no checksums. `base_fingerprint` hashes the settings and the first bytes of every tensor,
so that a run recognizes its base without loading it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surefoot.families.files import PROCESSOR_FILES, read_json
from surefoot.families.stored_forms import obstacle, stored_form
from surefoot.models.convert.decoded import decoded
from surefoot.models.convert.safetensors_file import (
    INDEX,
    PICKLED,
    SINGLE,
    StoredTensor,
    indexed_files,
    lazy_tensors,
    read_header,
    stored_in,
    weights_error,
)
from surefoot.models.convert.tensors import LazyTensor
from surefoot.system import plain_files
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.folders import CONVERSION, QUANTISED
from surefoot.system.hub import fetch, look_up
from surefoot.system.locations import looks_local

_FACTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    *PROCESSOR_FILES,
    "adapter_config.json",
    "plan.json",
    "bos_zero_config.json",
)
# Not *.safetensors: some repositories contain the same weights again as consolidated.safetensors or in original/.
_WEIGHTS = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def resolve_folder(path: str, revision: str | None = None, *, weights: bool) -> Path:
    """Return the folder of a model or adapter; a hub model is in Hugging Face's cache, under its commit.

    path: a folder, or a hub id such as org/name.
    revision: branch, tag or commit; for hub ids only.
    weights: whether to download the weights too.

    Raises InputError if the folder, or the model or revision on the hub, does not exist, EnvironmentFault if the hub
    cannot be reached or denies access, or the disk is full.
    """
    if Path(path).is_dir():
        if revision is not None:
            what = f"{path} is a folder, but only hub models have revisions"
            raise InputError(Fault("model.revision", what, "leave it out", code="SF-CONFIG-CONFLICT"))
        return Path(path)
    if looks_local(path):
        fix = "give a folder, or a hub id such as org/name"
        raise InputError(Fault("model.path", f"folder {path} does not exist", fix, code="SF-FILE-MISSING"))
    repository = look_up(path, "model", revision)
    patterns = (*_FACTS, *(_WEIGHTS if weights else ()))
    wanted = [name for name in repository.files if any(fnmatchcase(name, pattern) for pattern in patterns)]
    _require_all_shards(path, wanted)
    return fetch(repository, wanted)


def _require_all_shards(path: str, names: Collection[str]) -> None:
    """Raises EnvironmentFault if shards are missing: offline, the cache may contain only some of them."""
    there: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        if shard := _SHARD.fullmatch(name):
            there[shard[1], int(shard[3])].add(int(shard[2]))
    for (stem, count), numbers in there.items():
        if len(numbers) < count:
            what = f"its weights are not all in the cache: {len(numbers)} of {count} files of {stem}"
            fix = "try again when the hub can be reached"
            raise EnvironmentFault(Fault(path, what, fix, code="SF-MODEL-WEIGHTS"))


ADAPTER_CONFIG = "adapter_config.json"
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"  # transformers would prefer these to model.safetensors

# Keys that name code or kernels to download, or other files to load. They are never passed to transformers.
_CODE_PREFIXES = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_DROPPED = ("auto_map", "custom_pipelines", "fusion_config", "transformers_weights", "name_or_path", "_name_or_path")


def check_folder(folder: Path) -> None:
    """Raises InputError unless the folder contains an adapter, or a model with a valid config."""
    if not (folder / ADAPTER_CONFIG).is_file():
        read_config(folder)


def require_adapter(folder: Path, name: str) -> None:
    """Raises InputError unless the folder, which the user calls `name`, contains an adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        what = f"is not an adapter: it has no {ADAPTER_CONFIG}"
        raise InputError(Fault(name, what, "name it as the model", code="SF-USE-FOLDER"))


_STORED = "quantization_config"


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` without the keys that could load code. Raises InputError if it is missing or names code to
    download, EnvironmentFault for a quantized model in an unsupported form (`stored_form`)."""
    path = folder / "config.json"
    if (folder / ADAPTER_CONFIG).is_file():
        what = "contains an adapter, not a model"
        fix = "merge it with `surefoot export ADAPTER --merge --out DIR` and name DIR, or name its base model"
        raise InputError(Fault(str(folder), what, fix, code="SF-MODEL-KIND"))
    if not path.is_file():
        raise weights_error(folder, "has no config.json", "give a folder with config.json and *.safetensors")
    config = read_json(path)
    faults = list(_hostile_fields(config, str(path)))
    if faults:
        raise InputError(faults)
    if (stored := config.pop(_STORED, None)) is not None and not stored_form(stored):
        raise EnvironmentFault(_stored_quantized(folder, path, stored))
    return _without_code(config)


def plain_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return name -> lazily read weight of a model; quantized ones are decoded. Raises InputError for missing or
    damaged safetensors files."""
    tensors = lazy_tensors(stored_tensors(folder))
    stored = read_json(folder / "config.json").get(_STORED)
    return decoded(tensors, stored) if stored and stored_form(stored) else tensors


def unpacked_caution(folder: Path) -> str | None:
    """Return a caution if config.json names a quantized form, but no weight is stored in it."""
    stored = read_json(folder / "config.json").get(_STORED)
    if not stored or not (form := stored_form(stored)):
        return None
    tensors = lazy_tensors(stored_tensors(folder))
    plain = decoded(tensors, stored)
    if any(plain.get(name) is not one for name, one in tensors.items()):
        return None
    return f"{folder / 'config.json'} says {form}, but its weights are plain: they are used as they are"


def _stored_quantized(folder: Path, path: Path, stored: Any) -> Fault:
    """Return the fault for an unsupported quantized model. stored: quantization_config of config.json."""
    named = stored if isinstance(stored, dict) else {}
    method = str(named.get("quant_method") or "").lower()
    form = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4"}.get(method, method) or "a quantized form"
    bits = named.get("bits")
    form += f" with {bits} bits" if isinstance(bits, int) else ""
    why = obstacle(named)
    what = f"its weights are stored in {form}{f' with {why}' if why else ''}, which surefoot does not decode"
    if folder.name == QUANTISED and (folder.parent / CONVERSION).is_file():
        fix = f"name the run, {folder.parent}: it computes with the same numbers"
        return Fault(str(path), what, fix, code="SF-MODEL-QUANTISED")
    original = _made_from(folder)
    fix = f"use {original or 'the original model'}; precision.base: nf4 or int8 quantizes it to 4 or 8 bits"
    return Fault(str(path), what, fix, code="SF-MODEL-QUANTISED")


def _made_from(folder: Path) -> str:
    """Return the base model named in the model card; "" if it names none or several."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = text.removeprefix("---\n").partition("\n---\n")[0] if text.startswith("---\n") else ""
    named = re.search(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]+)?([\w./-]+)[ \t]*(?:\n(?![ \t]*-)|\Z)", head, re.MULTILINE)
    return named[1] if named else ""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return name -> file, dtype and shape of all weights. Raises InputError for missing or damaged safetensors
    files."""
    return stored_in(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model. Raises InputError if there are none; for pickled weights it says how to
    convert them."""
    if any(folder.glob(_DISTRIBUTED)):
        what = "a distributed checkpoint, whose metadata is pickled and can run code when opened"
        raise weights_error(folder, what, "use a plain safetensors version of this model")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return indexed_files(folder)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        what = f"only pickled weights ({pickled[0]}), which can run code when opened"
        raise weights_error(folder, what, convert_command(folder))
    raise weights_error(folder, f"no weights: neither {SINGLE} nor {INDEX}")


def convert_command(folder: Path) -> str:
    """Return the fix of a fault for pickled weights: the command that converts them to safetensors."""
    source = shlex.quote(str(folder))
    return f"run: surefoot convert {source} --out {shlex.quote(str(folder).rstrip('/') + '-safetensors')}"


def _hostile_fields(value: Any, where: str) -> list[Fault]:
    """Return faults for fields, at any depth, that name a repository with kernels to download (CVE-2026-4372)."""
    faults: list[Fault] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and key.startswith(_CODE_PREFIXES) and _names_repository(item):
                what = f"{key} names code to download: {item!r}"
                faults.append(Fault(where, what, f"delete {key} from the file", code="SF-MODEL-KIND"))
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


_SAMPLE = 4096  # bytes hashed of each tensor


def base_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of config.json (or adapter_config.json) and, for every weight file, of its header and the
    first bytes of each tensor.

    Computed before the model is loaded, on every rank. Training or merging changes also the first bytes of a tensor, so
    a different base is detected; single flipped bits are detected by `surefoot.runs.identity`.
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
    """Return the safetensors files directly in `folder`, sorted; including hidden ones, so that all are hashed."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def tensor_places(file: Path) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the raw header of a safetensors file, and name -> (start, end) of each tensor's bytes in the file. Raises
    InputError for an invalid file."""
    read_header(file)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(size)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    ends = {name: entry["data_offsets"] for name, entry in entries.items()}
    return header, {name: (8 + size + start, 8 + size + end) for name, (start, end) in ends.items()}
