"""The adapter alone, as PEFT reads it: copied byte for byte, without what a run keeps beside it.

One in another layout (`surefoot.models.convert`) is written in PEFT's, which would misread it and say nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.files import read_json
from surefoot.models.convert.safetensors_file import write_file
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.runs.export.files import copy_tokenizer, input_record, write_certificate
from surefoot.runs.export.parts import ExportParts
from surefoot.runs.export.record import base_notes, layout_note
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError

_BESIDE = ("generation_config.json", BOS_FILE, VALUE_HEAD_FILE, "README.md")


def copy_adapter(parts: ExportParts, out: Path, overwrite: bool) -> dict[str, Any]:
    """Publish the only adapter of `parts`; returns what export.json holds. Raises InputError for several of them."""
    if len(parts.chain) != 1:
        what = "several adapters are one only when they are merged"
        raise InputError(Fault("--adapter", what, "give --merge, or export them one by one", code="SF-EXPORT"))
    saved = parts.chain[0]
    notes = ["the adapter alone; its base is not part of this folder", *base_notes(parts)]
    with durable.staged_folder(out, replace=overwrite) as staging:
        layouts = _other_layouts(saved)
        if layouts:
            _write_as_peft(saved, staging)
            notes.append(layout_note(saved.folder.resolve().name, layouts))
        for name in (*(() if layouts else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)), *_BESIDE):
            if (saved.folder / name).is_file():
                durable.copy_file(saved.folder / name, staging / name)
        if parts.bos_scale is not None:
            what = f"the first embedding of every sequence is to be multiplied by {parts.bos_scale:g}"
            notes.append(f"{what}, as {BOS_FILE} says; surefoot does so, PEFT does not")
            if not (staging / BOS_FILE).is_file():  # the base's own file says it
                durable.write_json(staging / BOS_FILE, bos_file(parts.bos_scale))
        copy_tokenizer(parts, staging)
        record: dict[str, Any] = {"notes": notes, "checks": {}}
        write_certificate(staging, record, input_record(parts))
    return record


def _other_layouts(saved: SavedAdapter) -> tuple[str, ...]:
    """() where PEFT reads the files as they are. It stops at the settings of DoRA's first code, whatever the names."""
    of_peft = read_json(saved.folder / ADAPTER_CONFIG).get("peft_type") == "LORA"
    return saved.layouts or (() if of_peft else ("old-dora",))


def _write_as_peft(saved: SavedAdapter, folder: Path) -> None:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.base,
        "revision": saved.revision,
        "inference_mode": True,
        **saved.settings,
    }
    durable.write_json(folder / ADAPTER_CONFIG, dict(sorted(fields.items())))
    write_file(folder / ADAPTER_WEIGHTS, saved.tensors)
    durable.flush(folder / ADAPTER_WEIGHTS)
