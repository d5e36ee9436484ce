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

        return Path(snapshot_download(named, local_files_only=True))
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


def is_same(state: Mapping[str, Any], source: Path) -> bool:
    """Whether the folder's safetensors files hold exactly these weights."""
    import torch
    from safetensors import safe_open

    files = sorted(source.glob("*.safetensors"))
    seen = set()
    for path in files:
        with safe_open(path, framework="pt") as saved:
            for name in saved.keys():  # noqa: SIM118 (safe_open is no dict)
                if name not in state:
                    return False
                value = saved.get_tensor(name)
                own = state[name].detach().cpu()
                if value.dtype != own.dtype or value.shape != own.shape or not torch.equal(value, own):
                    return False
                seen.add(name)
    pointers = {state[name].data_ptr() for name in seen}
    return bool(files) and all(name in seen or one.data_ptr() in pointers for name, one in state.items())


def link_weights(source: Path, folder: Path) -> None:
    """Make links in `folder` to the weight files of `source`."""
    clear_weights(folder)
    for path in source.iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            os.symlink(path.resolve(), folder / path.name)


def clear_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            path.unlink()


def drop_quantisation(path: Path) -> None:
    """Remove the quantisation from config.json: the linked weights are not quantised."""
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
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
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(adapter))
        return
    trained = type(model).from_pretrained(run)
    model.load_state_dict(trained.state_dict())  # copies, in the dtype of the script's model
