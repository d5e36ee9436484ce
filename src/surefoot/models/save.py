"""Save and load trained weights in standard formats: PEFT adapters and transformers models.

Files are written directly; staging, hashing and fsync are up to the caller (`surefoot.system.durable`). Equal weights
give equal bytes: names are sorted, and there are no timestamps or absolute paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from surefoot.models.adapter_start import in_file, read_file, remember, take_out
from surefoot.models.adapters import ADAPTER
from surefoot.models.convert.tensors import Tensors
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.forward import causal_model
from surefoot.models.peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from surefoot.models.quiet import quiet_libraries
from surefoot.models.wrapped import LEFT_OUT
from surefoot.system.errors import Fault, InputError
from surefoot.system.libraries import left_alone

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WRAPPED = re.compile(r"(.+)\.(?:modules_to_save|original_module)\.(weight|bias)")

_T = TypeVar("_T")


def save_adapter(model: PeftModel, folder: Path, *, save_embedding: bool, name: str = ADAPTER) -> None:
    """Save adapter_model.safetensors and adapter_config.json for `PeftModel.from_pretrained(base, folder)`.

    save_embedding: also save embedding and head, if rows were added to them (the base must then be resized first).
    name: which of the model's adapters; the files do not contain it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: one.cpu().contiguous() for key, one in adapter_tensors(model, save_embedding, name).items()}
    tensors, settings = in_file(model, tensors, model.peft_config[name].to_dict())
    save_file(without_sharing(tensors.items()), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    fields["inference_mode"] = True  # as PEFT writes it: the adapter is loaded frozen
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def load_adapter_weights(
    model: PeftModel, folder: Path, *, save_embedding: bool, tensors: Tensors | None = None, name: str = ADAPTER
) -> None:
    """Load saved weights bit-exactly into a model with the same adapter. Raises InputError if names or shapes differ.

    save_embedding: as in `save_adapter`.
    tensors: converted tensors to use instead of the file's, if that is in another layout than PEFT's.
    name: which of the model's adapters.
    """
    path = folder / ADAPTER_WEIGHTS
    if tensors is None:
        saved = without_duplicates(load_file(path))
    else:
        saved = {key: tensor.read() for key, tensor in without_duplicates(tensors).items()}
    _give(model, saved, path, save_embedding=save_embedding, name=name)


def remember_start(model: PeftModel) -> None:
    """Keep the first values of an adapter that starts from the base's weights."""
    remember(model, adapter_tensors(model, save_embedding=False))


def resume_started(model: PeftModel, folder: Path, *, save_embedding: bool) -> None:
    """`load_adapter_weights` for an adapter that started from the base's weights: also changes these as then."""
    path = folder / ADAPTER_WEIGHTS
    own, first = read_file(path)
    _give(model, without_duplicates(own), path, save_embedding=save_embedding, name=ADAPTER)
    take_out(model, first)


def _give(model: PeftModel, saved: dict[str, torch.Tensor], path: Path, *, save_embedding: bool, name: str) -> None:
    expected = adapter_tensors(model, save_embedding, name)
    if different := sorted(saved.keys() ^ expected.keys()):
        what = f"{len(different)} weights are in only one of file and model, first {different[0]}"
        raise InputError(Fault(str(path), what, "it belongs to another model or adapter", code="SF-ADAPTER-FIT"))
    for key, tensor in saved.items():
        if tensor.shape != expected[key].shape:
            what = f"{key} is {list(tensor.shape)}, the model's is {list(expected[key].shape)}"
            raise InputError(Fault(str(path), what, "it belongs to another model or adapter", code="SF-ADAPTER-FIT"))
    with quiet_libraries():
        set_peft_model_state_dict(model, saved, name)


def adapter_tensors(model: PeftModel, save_embedding: bool, name: str = ADAPTER) -> dict[str, torch.Tensor]:
    """Return name in the file -> tensor, sorted. `save_embedding` is always given to PEFT, which would otherwise query
    the hub about the base."""
    with quiet_libraries():
        tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=save_embedding)
    return dict(sorted(without_duplicates(tensors).items()))


def without_duplicates(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Drop duplicates that PEFT writes for a fully trained embedding or head with added rows. It writes these three
    times: under the module's name (which PEFT reads), under the wrapper's name, and as before training."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (found := _WRAPPED.fullmatch(name)) is None or f"{found[1]}.{found[2]}" not in tensors
    }


def save_full(model: nn.Module, folder: Path, max_shard_size: int = 50 * 10**9) -> None:
    """Save config.json, generation_config.json and model*.safetensors for `AutoModelForCausalLM.from_pretrained`.

    Parameters keep their dtype and bits; a tied head is saved once and tied again on loading. Tensors that transformers
    did not load (`surefoot.models.wrapped`) are copied from the base's files.

    max_shard_size: bytes per file, which only a single larger tensor may exceed; the default is transformers'.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inner = causal_model(model)
    kept = {name: tensor.read() for name, tensor in getattr(inner, LEFT_OUT, {}).items()}
    state = inner.state_dict() | kept if kept else None
    with quiet_libraries(), left_alone("deepspeed"):
        inner.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)


def without_sharing(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a dict in which tensors that share memory are cloned, because safetensors does not save shared memory."""
    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        own[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return own
