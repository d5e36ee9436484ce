"""The adapter alone, as PEFT reads it: copied byte for byte, without what a run keeps beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot import durable
from surefoot.errors import Fault, InputError
from surefoot.families.bos_zero import BOS_FILE
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.stages.export_files import copy_tokenizer, input_record, write_certificate
from surefoot.stages.export_parts import ExportParts

_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "generation_config.json", BOS_FILE, "README.md")


def copy_adapter(parts: ExportParts, out: Path, overwrite: bool) -> dict[str, Any]:
    """Publish the only adapter of `parts`; returns what export.json holds. Raises InputError for several of them."""
    if len(parts.chain) != 1:
        what = "several adapters are one only when they are merged"
        raise InputError(Fault("--adapter", what, "give --merge, or export them one by one"))
    saved = parts.chain[0]
    record: dict[str, Any] = {"notes": ["the adapter alone; its base is not part of this folder"], "checks": {}}
    with durable.staged_folder(out, replace=overwrite) as staging:
        for name in _FILES:
            if (saved.folder / name).is_file():
                durable.copy_file(saved.folder / name, staging / name)
        copy_tokenizer(parts, staging)
        write_certificate(staging, record, input_record(parts))
    return record
