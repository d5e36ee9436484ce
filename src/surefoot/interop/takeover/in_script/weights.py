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


def base_state(base: Any) -> dict[str, Any]:
    """Return the base's weights under the names that they have without an adapter."""
    state = {}
    for name, value in base.state_dict().items():
        if "lora_" in name or ".modules_to_save." in name:
            continue
        state[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return state


def is_same(state: Mapping[str, Any], source: Path, *, rounded: bool) -> bool:
    """Whether the folder's safetensors files hold exactly these weights.

    rounded: some are quantised on loading; then only the others are compared, in the model's dtype.
    """
    import torch
    from safetensors import safe_open

    files = sorted(source.glob("*.safetensors"))
    seen = set()
    for path in files:
        with safe_open(path, framework="pt") as saved:
            for name in saved.keys():  # noqa: SIM118 (safe_open is no dict)
                if name not in state:
                    return False
                seen.add(name)
                value, own = saved.get_tensor(name), state[name].detach().cpu()
                if rounded and not own.is_floating_point():
                    continue
                if rounded:
                    value = value.to(own.dtype)
                if value.dtype != own.dtype or value.shape != own.shape or not torch.equal(value, own):
                    return False
    pointers = {state[name].data_ptr() for name in seen}
    return bool(files) and (rounded or all(name in seen or one.data_ptr() in pointers for name, one in state.items()))


def link_weights(source: Path, folder: Path) -> None:
    """Make links in `folder` to the weight files of `source`."""
    for path in source.iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            os.symlink(path.resolve(), folder / path.name)


def restore_quantisation(path: Path, source: Path) -> None:
    """Let config.json say of quantisation what the files' own says: the script may have quantised on loading."""
    config, own = (json.loads(one.read_text()) for one in (path, source))
    config.pop("quantization_config", None)
    if "quantization_config" in own:
        config["quantization_config"] = own["quantization_config"]
    replace(path, json.dumps(config, indent=2))


def to_cpu(model: Any) -> None:
    import torch

    if getattr(model.config, "quantization_config", None) is None:
        model.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_trained(model: Any, run: Path) -> None:
    """Load the weights that surefoot trained."""
    from safetensors.torch import load_file

    adapter = run / "adapter_model.safetensors"
    if adapter.is_file():
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        trained = load_file(adapter)
        if trained.keys() != get_peft_model_state_dict(model).keys():
            raise RuntimeError(f"the weights in {adapter} have other names than the script's adapter")
        set_peft_model_state_dict(model, trained)
        return
    whole = type(model).from_pretrained(run)
    model.load_state_dict(whole.state_dict())  # copies, in the dtype of the script's model
