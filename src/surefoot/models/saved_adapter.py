"""Open an adapter folder that anybody wrote, over its base model.

Only settings that describe a LoRA or DoRA adapter are read from `adapter_config.json`. A setting that would change the
result and is not known here is refused instead of ignored, and so are pickled weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surefoot.convert.recognise_adapter import RecognisedAdapter, fit_to_base, recognise_adapter
from surefoot.convert.safetensors_file import read_header, unread
from surefoot.convert.target import Target
from surefoot.convert.tensors import Tensors
from surefoot.errors import Fault, InputError
from surefoot.families.files import read_json
from surefoot.families.model_facts import ModelFacts
from surefoot.models.folder import ADAPTER_CONFIG, convert_command
from surefoot.models.load import is_finite
from surefoot.models.peft import LoraConfig, PeftModel, TaskType, get_peft_model
from surefoot.models.quiet import quiet_libraries
from surefoot.models.save import ADAPTER_WEIGHTS, load_adapter_weights

_READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_dora",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "bias",
        "lora_bias",
        "fan_in_fan_out",
        "ensure_weight_tying",
    }
)
# They say where an adapter comes from or how it was trained, and change nothing once it is.
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "qalora_group_size",
        "runtime_config",
    }
)
_PLAIN_STARTS = (True, False, None, "gaussian")  # others (pissa, olora …) alter the base itself


@dataclass(frozen=True)
class SavedAdapter:
    """base, revision: as the adapter's author wrote them. rows: of the embedding it brings along, if it does.

    tensors: under PEFT's names, unread. layouts: those that rules led from; () for PEFT's own.
    """

    folder: Path
    base: str
    revision: str | None
    rows: int | None
    settings: dict[str, Any]
    tensors: Tensors
    layouts: tuple[str, ...] = ()


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> SavedAdapter:
    """What the folder says of itself. Raises InputError for another kind of adapter and for pickled weights."""
    path, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        pickled = (folder / ADAPTER_WEIGHTS).with_suffix(".bin").is_file()
        what = "only pickled weights, and pickled ones are not opened" if pickled else f"has no {ADAPTER_WEIGHTS}"
        fix = convert_command(folder) if pickled else "save the adapter as safetensors"
        raise InputError([*_unknown_settings(read_json(path), str(path)), Fault(str(folder), what, fix)])
    found = recognise_adapter(unread(read_header(weights)), read_json(path), str(path))
    if faults := _unknown_settings(found.config, str(path)):
        raise InputError(faults)
    settings = {key: value for key, value in found.config.items() if key in _READ}
    base, revision = found.config.get("base_model_name_or_path") or "", found.config.get("revision")
    rows = _embedding_rows(found.tensors, settings)
    return SavedAdapter(folder, base, revision, rows, settings, found.tensors, found.layouts)


def fitted(saved: SavedAdapter, facts: ModelFacts) -> SavedAdapter:
    """The same on the matrices that the base has: fused ones split, or parts put together. Raises InputError where that
    is not exact."""
    plain = RecognisedAdapter(saved.layouts, (), saved.tensors, saved.settings)
    found = fit_to_base(plain, Target({}, facts), str(saved.folder / ADAPTER_CONFIG))
    return dataclasses.replace(saved, settings=dict(found.config), tensors=found.tensors, layouts=found.layouts)


def open_adapter(model: PreTrainedModel, saved: SavedAdapter) -> PeftModel:
    """Put the adapter over its base, which already has `saved.rows` rows. Raises InputError where it does not fit."""
    path = saved.folder / ADAPTER_WEIGHTS
    try:
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, **saved.settings)
        with quiet_libraries(), torch.random.fork_rng(devices=[]):
            adapted = get_peft_model(model, config)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(Fault(str(saved.folder / ADAPTER_CONFIG), f"does not fit this model: {error}")) from error
    load_adapter_weights(adapted, saved.folder, save_embedding=saved.rows is not None, tensors=saved.tensors)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and not is_finite(parameter):
            raise InputError(Fault(str(path), f"{name} has values that are NaN or infinite", "use another checkpoint"))
    return adapted.eval()


def _unknown_settings(config: Mapping[str, Any], where: str) -> list[Fault]:
    if config.get("peft_type") != "LORA":
        what = f"is a {config.get('peft_type')} adapter"
        return [Fault(where, what, "only LoRA and DoRA adapters are read")]
    faults = []
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        what = f"began as {config['init_lora_weights']}, which alters the base itself"
        faults.append(Fault(where, what, "convert it to a plain LoRA adapter with PEFT"))
    defaults = {field.name: getattr(LoraConfig(), field.name) for field in dataclasses.fields(LoraConfig)}
    unknown = sorted(config.keys() - _READ - _WITHOUT_EFFECT - {"init_lora_weights"})
    faults += [
        Fault(where, f"{key}: {config[key]!r} is not supported", "merge the adapter with PEFT first")
        for key in unknown
        if config[key] and config[key] != defaults.get(key)
    ]
    return faults


def _embedding_rows(tensors: Tensors, settings: dict[str, Any]) -> int | None:
    """Rows of an embedding that was saved because it had been resized, not because it was trained.

    Whatever the model calls it: besides the adapter and what trained in full, PEFT saves embedding and head alone.
    """
    trained = tuple(settings.get("modules_to_save") or ())
    modules = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    rest = [tensor for name, tensor in modules.items() if len(tensor.shape) == 2 and not name.endswith(trained)]
    return rest[0].shape[0] if rest and not any(name.endswith(trained) for name in modules) else None
