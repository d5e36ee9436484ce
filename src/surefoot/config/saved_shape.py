"""The shape of a saved adapter: its adapter_config.json decides the keys of `adapter` that are left out beside
`adapter.initial`. Dropout is not among them: it belongs to a training, not to an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.config.sections import PATTERN
from surefoot.system import plain_files

_MOST = 1 << 20  # bytes
ALL_LINEAR = "all-linear"


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


def with_shape_of_then(data: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an earlier run as it would be read today: until 2026-11 `adapter.targets` kept its default
    beside `adapter.initial`, whose targets it had to be.

    data: plain config.
    """
    adapter = data.get("adapter")
    if not isinstance(adapter, dict) or not adapter.get("initial") or adapter.get("targets") != ALL_LINEAR:
        return data
    left_out = {key: value for key, value in adapter.items() if key != "targets"}
    found = with_saved_shape(data | {"adapter": left_out})
    return data | {"adapter": adapter | found["adapter"]}


def saved_shape(saved: dict[str, Any]) -> dict[str, Any]:
    """Return keys of `adapter` for PEFT's settings. Raises TypeError, ValueError or KeyError for others."""
    targets = saved["target_modules"]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        targets = [f"{PATTERN}{targets}"]
    return {
        "kind": "dora" if saved.get("use_dora") else "lora",
        "rank": int(saved["r"]),
        "alpha": float(saved["lora_alpha"]),
        "targets": targets if targets == ALL_LINEAR else sorted(targets),
        "rslora": bool(saved.get("use_rslora")),
        "modules_to_save": list(saved.get("modules_to_save") or ()),
    }
