"""A tool that goes on with a saved adapter. PEFT's from_pretrained takes kind, rank, scale, dropout and modules from
the adapter's own adapter_config.json, whatever the tool's settings for a new adapter say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from surefoot.config.saved_shape import saved_shape
from surefoot.interop.draft import Draft
from surefoot.interop.shared_rules import module_names
from surefoot.system.errors import InputError

MERGE = "merge it first (surefoot export --merge), or leave it out for a new adapter"


def set_initial(draft: Draft, name: str, shape: Sequence[str], *, dropout: bool) -> None:
    """Set `adapter` to the saved adapter that a setting names, or refuse it.

    name: the setting; its value is a folder.
    shape: settings for a new adapter.
    dropout: whether the tool has the adapter's dropout on in this stage.
    """
    folder = draft[name].rstrip("/")
    if draft.written("stage") == "reward":
        draft.refuse(name, "the value head of a saved adapter is not read", MERGE)
        return
    try:
        saved = json.loads(draft.options.read(f"{folder}/adapter_config.json"))
        targets = module_names(saved["target_modules"])
        if not targets:
            raise ValueError("it names no target_modules")
        found = saved_shape({**saved, "target_modules": "all-linear" if targets == ["all-linear"] else targets})
        found["dropout"] = float(saved.get("lora_dropout") or 0) if dropout else 0.0
    except InputError:
        what = "its adapter_config.json, which decides rank, alpha and modules, cannot be read here"
        draft.refuse(name, what, f"give a folder on this machine; else {MERGE}")
        return
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        draft.refuse(name, f"its adapter_config.json is not one that surefoot reads: {error}", MERGE)
        return
    found = {key: value for key, value in found.items() if value}  # the others are surefoot's defaults
    for key, value in {"initial": folder, **found}.items():
        draft.set(f"adapter.{key}", value, name)
    draft.drop(f"{name} is given, and the saved adapter decides", *shape)
