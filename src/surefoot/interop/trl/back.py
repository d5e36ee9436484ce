"""Write surefoot's sources, losses and rewards as TRL's settings.

Data sets of the hub and folders are named by dataset_name; files, several sources and parts of a split are `datasets`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from surefoot.families.templates import is_jinja
from surefoot.interop.backward import Back, Ours, launch_flags, processes, variables
from surefoot.interop.shared_rules import written_split
from surefoot.system.locations import data_kind

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "auto": "auto"}
_TEMPLATE = "chat_template.jinja"
_LOADERS = {".jsonl": "json", ".ndjson": "json", ".tsv": "csv", ".txt": "text"}  # of `datasets`, by a file's kind
_LISTED = ("orpo", "cpo", "gkd")  # methods that are scripts, not commands


def weights(ours: Ours) -> str | None:
    """dtype: of frozen weights, or of the products with 4-bit ones; trained weights are in fp32."""
    frozen, base = ours["adapter"] is not None, ours["precision.base"]
    kept = {"auto": "bf16"}.get(compute := ours["precision.compute"], compute) if base == "nf4" else base
    return next((theirs for theirs, mine in DTYPES.items() if frozen and mine == kept), None)


def _plain(ours: Ours) -> dict[str, Any]:
    """Return the source if dataset_name can name it, else nothing."""
    source = ours.only
    parts = any(key in source for key in ("share", "max_samples")) or (_columns(source) and not ours.evaluates)
    return {} if len(ours.train) > 1 or parts or data_kind(source["path"]) else source


def of_source(key: str) -> Back:
    """The value of a source that dataset_name names."""
    return lambda ours: _plain(ours).get(key)


def test_split(ours: Ours) -> str | None:
    """The evaluation's split of the same data."""
    splits = {source.get("split", "test") for source in ours.eval}
    same = [source["path"] for source in ours.eval] == [source["path"] for source in ours.train]
    return splits.pop() if same and len(splits) == 1 else None


def mixture(ours: Ours) -> list[dict[str, Any]] | None:
    return [_entry(source) for source in ours.train] if not _plain(ours) else None


def _columns(source: dict[str, Any]) -> list[str]:
    """Return the columns that make records conversations for TRL, whatever else they have."""
    return ["messages"] if source["format"] == "messages" and not source.get("columns") else []


def _entry(source: dict[str, Any]) -> dict[str, Any]:
    path, kind = source["path"], data_kind(source["path"])
    entry = {"path": _LOADERS.get(kind, kind[1:]), "data_files": path} if kind else {"path": path}
    entry |= {"name": source["subset"]} if "subset" in source else {}
    where, columns = written_split(source), _columns(source)
    return {**entry, **({"split": where} if where != "train" else {}), **({"columns": columns} if columns else {})}


_READ = ("messages", "sharegpt", "prompt-completion", "text", "preference", "judged", "prompts")
_FIELDS = "TRL reads messages, prompt and completion, text, chosen and rejected"
REMARKS: Mapping[str, str] = {"data.train.format": _FIELDS, "data.eval.format": _FIELDS}


def origin(ours: Ours, source: dict[str, Any]) -> dict[str, Any]:
    """Return the source with its format, where TRL recognizes it by the same columns."""
    same = [one for one in (*ours.train, *ours.eval) if one["path"] == source["path"] and not one.get("columns")]
    return {**source, "format": same[0]["format"]} if same and same[0]["format"] in _READ else source


def template_file(ours: Ours) -> str | None:
    named = ours["data.template"]
    return posixpath.join(ours.folder, _TEMPLATE) if is_jinja(named) else named if named.endswith(".jinja") else None


def files(ours: Ours) -> Mapping[str, str]:
    """The file of a chat template whose text is in the config."""
    return {_TEMPLATE: ours["data.template"]} if is_jinja(ours["data.template"]) else {}


def text_field(ours: Ours) -> str | None:
    fields = {source.get("columns", {}).get("text") for source in ours.train if source["format"] == "text"}
    return fields.pop() if len(fields) == 1 else None


def answers_only(ours: Ours) -> bool:
    """assistant_only_loss: for conversations."""
    record = ours.record(ours.only["path"]) or {}
    turns = ours.only["format"] in ("messages", "sharegpt") or not {"prompt", "text", "instruction"} & record.keys()
    return ours["data.train_on"] == "responses" and turns and ours.only["format"] not in ("text", "prompt-completion")


def start(ours: Ours, method: str, path: str) -> list[str]:
    shards = ["--accelerate_config", f"zero{ours['parallel.zero_stage']}"]
    profile = shards if ours["parallel.engine"] == "deepspeed" else []
    several = [*profile, *launch_flags(ours)] if processes(ours) > 1 else []
    if method not in _LISTED:
        return [*variables(ours), "trl", method, "--config", path, *several]
    launch = ["accelerate", "launch", *launch_flags(ours)]
    return [*variables(ours), *launch, f"examples/scripts/{method}.py", "--config", path]
