"""The shape of a saved adapter: its adapter_config.json decides the keys of `adapter` that are left out beside
`adapter.initial`. Dropout is not among them: it belongs to a training, not to an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.config.sections import PATTERN
from surefoot.system import plain_files

_MOST = 1 << 20  # bytes


def with_saved_shape(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the shape of the adapter that `adapter.initial` names where keys are left out; `data` itself
    if it names none that can be read here, of which later checks tell.

    data: plain config with short forms expanded.
    """
    adapter = data.get("adapter")
    if not isinstance(adapter, dict) or not isinstance(folder := adapter.get("initial"), str):
        return data
    try:
        saved = json.loads(plain_files.read_text(Path(folder) / "adapter_config.json", _MOST))
        shape = saved_shape(saved)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return data
    if saved.get("target_parameters"):  # of experts; their names are not those of adapter.targets
        del shape["targets"]
    return data | {"adapter": shape | adapter}


def saved_shape(saved: dict[str, Any]) -> dict[str, Any]:
    """Return keys of `adapter` for PEFT's settings. Raises TypeError, ValueError or KeyError for others."""
    targets = saved["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        targets = [f"{PATTERN}{targets}"]
    return {
        "kind": "dora" if saved.get("use_dora") else "lora",
        "rank": int(saved["r"]),
        "alpha": float(saved["lora_alpha"]),
        "targets": targets if targets == "all-linear" else sorted(targets),
        "rslora": bool(saved.get("use_rslora")),
        "modules_to_save": list(saved.get("modules_to_save") or ()),
    }
