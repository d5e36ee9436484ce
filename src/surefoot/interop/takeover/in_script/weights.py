"""Hand over the weights that the script starts from, and take back the trained ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import replace


def source_of(base: Any) -> Path | None:
    """Return the local folder that the weights came from, None if there is none."""
    named = str(base.config._name_or_path)
    if os.path.isdir(named):
        return Path(named).resolve()
    try:
        from huggingface_hub import snapshot_download

        revision = getattr(base.config, "_commit_hash", None)
        return Path(snapshot_download(named, revision=revision, local_files_only=True))
    except Exception:  # not a hub id, or not in the cache: the weights are then saved
        return None


HEAD_FILE = "value_head.safetensors"
_FIRST_VALUES = {"eva_config", "corda_config", "lora_ga_config", "loftq_config"}
_HEAD = "score."  # of transformers' sequence classifiers


def scores(model: Any) -> bool:
    """Whether it is a reward model: a decoder with a head for one score in place of the output head."""
    return hasattr(model, _HEAD.rstrip("."))


def base_state(base: Any) -> dict[str, Any]:
    """Return the base's weights under the names that they have without an adapter, and without a head for scores."""
    state = {}
    for name, value in base.state_dict().items():
        if "lora_" in name or ".modules_to_save." in name:
            continue
        name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        if not name.startswith(_HEAD):
            state[name] = value
    return state


def is_same(state: Mapping[str, Any], source: Path, *, rounded: bool, headless: bool = False) -> bool:
    """Whether the folder's safetensors files hold exactly these weights, in their dtype or a narrower one.

    rounded: some are quantized on loading; then only the others are compared, in the model's dtype.
    headless: the model has no output head, the files may.
    """
    import torch
    from safetensors import safe_open

    files = sorted(source.glob("*.safetensors"))
    seen = set()
    for path in files:
        with safe_open(path, framework="pt") as saved:
            for name in saved.keys():  # noqa: SIM118 (safe_open is no dict)
                if name not in state:
                    if headless and name.startswith(("lm_head.", _HEAD)):
                        continue
                    return False
                seen.add(name)
                value, own = saved.get_tensor(name), state[name].detach().cpu()
                if rounded and not own.is_floating_point():
                    continue
                if rounded or own.dtype == torch.float32:
                    value = value.to(own.dtype)
                if value.dtype != own.dtype or value.shape != own.shape or not torch.equal(value, own):
                    return False
    pointers = {state[name].data_ptr() for name in seen}
    return bool(files) and (rounded or all(name in seen or one.data_ptr() in pointers for name, one in state.items()))


def write_base(base: Any, folder: Path) -> tuple[bool, str]:
    """Write a model without its adapter: links to the files that its weights came from, or a copy where they differ.

    Returns whether it is a copy, and why it cannot be written, "" if it was.
    """
    folder.mkdir(exist_ok=True)
    quantized = getattr(base.config, "quantization_config", None) is not None
    source, state = source_of(base), base_state(base)
    same = source is not None and is_same(state, source, rounded=quantized, headless=scores(base))
    if same and source is not None:
        for path in source.iterdir():
            if path.name.endswith((".safetensors", ".safetensors.index.json")):
                os.symlink(path.resolve(), folder / path.name)
        base.config.save_pretrained(folder)
        _restore_quantization(folder / "config.json", source / "config.json")
    elif quantized:
        return False, "has a quantized base whose other weights are not those of its files"
    elif scores(base) and not base.config.tie_word_embeddings:
        return False, "has a head for scores alone, and other weights than the files of the language model"
    else:
        base.save_pretrained(folder, state_dict=state)
    if scores(base):
        _as_language_model(folder / "config.json")
    _restore_padding(folder / "config.json", base)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    return not same, ""


def _restore_quantization(path: Path, source: Path) -> None:
    """Let config.json say of quantization what the files' own says: the script may have quantized on loading."""
    config, own = (json.loads(one.read_text()) for one in (path, source))
    config.pop("quantization_config", None)
    if "quantization_config" in own:
        config["quantization_config"] = own["quantization_config"]
    replace(path, json.dumps(config, indent=2))


def _restore_padding(path: Path, base: Any) -> None:
    """Let config.json name the PAD that the model was built with, whose embedding gets no gradient; TRL writes the
    tokenizer's into the config afterwards."""
    embedding, config = base.get_input_embeddings(), json.loads(path.read_text())
    if hasattr(embedding, "padding_idx") and "pad_token_id" in config:
        replace(path, json.dumps(config | {"pad_token_id": embedding.padding_idx}, indent=2))


def _as_language_model(path: Path) -> None:
    """Let the config.json of a classifier describe the language model under it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads(path.read_text())
    for name in ("id2label", "label2id", "num_labels"):
        config.pop(name, None)
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    replace(path, json.dumps(config, indent=2))


def head_of(base: Any) -> Any:
    """Return the trained module with the weight of a reward model's scores."""
    head = base.score
    return head.modules_to_save["default"] if hasattr(head, "modules_to_save") else head


def write_head(base: Any, folder: Path) -> None:
    """Write the weight of the scores as surefoot's value head, whose bias is 0."""
    import torch
    from safetensors.torch import save_file

    weight = head_of(base).weight.detach().cpu().float().contiguous()
    named = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.zeros(1)}
    save_file(named, folder / HEAD_FILE, metadata={"format": "pt"})


def _state(model: Any) -> dict[str, Any]:
    """Return a PEFT model's weights, also where the script has replaced model.state_dict by the adapter's alone."""
    return type(model).state_dict(model)


def write_adapter(model: Any, folder: Path) -> dict[str, Any]:
    """Write the adapter "default", without a head for scores, and return its config.

    How its first values and the base's were found (PiSSA, OLoRA, EVA …) is left out: the values themselves are taken.
    """
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder, selected_adapters=["default"], state_dict=_state(model))
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"init_lora_weights": True, **dict.fromkeys(_FIRST_VALUES & config.keys())}
    if scores(model.get_base_model()):
        path = folder / "adapter_model.safetensors"
        kept = {name: one for name, one in load_file(path).items() if f".{_HEAD}" not in name}
        save_file(kept, path, metadata={"format": "pt"})
        beside = [name for name in config["modules_to_save"] or [] if name not in ("score", "classifier")]
        config |= {"modules_to_save": beside or None, "task_type": "CAUSAL_LM"}
    replace(folder / "adapter_config.json", json.dumps(config, indent=2))
    return config


def write_reference(model: Any, reference: Any, folder: Path) -> tuple[str, str]:
    """Write the reference of a preference loss, unless it is the model as it is, without its adapter if it has one.

    reference: the trainer's ref_model, which may be None.

    Returns the name of what was written in the folder, "" for nothing, and why it cannot be.
    """
    adapted = hasattr(model, "get_base_model")
    if reference is None:  # computed beforehand, or by the model under another adapter
        if not adapted or "ref" not in model.peft_config or _adds_nothing(model):
            return "", ""
        model.save_pretrained(folder, selected_adapters=["ref"], state_dict=_state(model))
        path = folder / "ref/adapter_config.json"
        config = json.loads(path.read_text()) | {"base_model_name_or_path": str(folder.with_suffix("") / "model")}
        replace(path, json.dumps(config, indent=2))
        return "ref", ""
    state, own = (base_state(one) for one in (reference, model.get_base_model() if adapted else model))
    if state.keys() == own.keys() and all(_equal(state[name], own[name]) for name in own):
        return "", ""
    _, fault = write_base(reference, folder / "reference")
    return "reference", fault


def _adds_nothing(model: Any) -> bool:
    """Whether the adapter "ref" leaves the base as it is."""
    own = {name: one for name, one in model.named_parameters() if ".ref." in name}
    return all(not one.any() for name, one in own.items() if ".lora_B." in name) and not any(
        ".modules_to_save." in name for name in own
    )


def _equal(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one.to(other.device) == other).all())


def to_cpu(*models: Any) -> list[Any]:
    """Move the models to CPU memory, but not quantized ones. Returns those that it moved; None is no model."""
    import torch

    moved = [one for one in models if one is not None and getattr(one.config, "quantization_config", None) is None]
    for model in moved:
        model.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return moved


def load_trained(model: Any, run: Path) -> None:
    """Load the weights that surefoot trained."""
    from safetensors.torch import load_file

    head = {"score.weight": load_file(run / HEAD_FILE)["v_head.summary.weight"]} if (run / HEAD_FILE).is_file() else {}
    adapter = run / "adapter_model.safetensors"
    if adapter.is_file():
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        trained = load_file(adapter) | {f"base_model.model.{name}": one for name, one in head.items()}
        if trained.keys() != get_peft_model_state_dict(model, _state(model)).keys():
            raise RuntimeError(f"the weights in {adapter} have other names than the script's adapter")
        set_peft_model_state_dict(model, trained)
        return
    from transformers import AutoModelForCausalLM

    whole = (AutoModelForCausalLM if head else type(model)).from_pretrained(run)
    own = model.state_dict()
    trained = {name: one for name, one in whole.state_dict().items() if name in own or not head} | head
    model.load_state_dict(trained)  # copies, in the dtype of the script's model
