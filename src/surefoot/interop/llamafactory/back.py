"""Write surefoot's sources, template and adapter as LLaMA-Factory's settings, with a dataset_info.json for its files.

Sources that already are entries of one description keep its folder and names.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Mapping
from typing import Any

from surefoot.families.other_templates import PREFIX
from surefoot.interop.backward import Back, Ours, Sources, of_model, processes, variables
from surefoot.interop.llamafactory.data import PICTURED, SAME, UNTHINKING
from surefoot.system.dataset_info import COLUMNS, FORMATS, OPENAI_TAGS, PAIR
from surefoot.system.errors import InputError
from surefoot.system.locations import DESCRIPTION, data_kind, is_address, is_function, is_hub_data

ONLINE = "ONLINE"  # dataset_dir if every name is a data set of the hub
_UNKNOWN = {"answers": "alpaca", "pairs": "preference", "judged": "judged"}  # records whose format is not known
_SAID = {"path", "columns", "name", "subset", "split"}  # of a source, by its entry


def folder(ours: Ours) -> str:
    """dataset_dir: where the description is."""
    every = [*ours.train, *ours.eval]
    described = {source["path"] for source in every if "name" in source}
    if len(described) == 1 and all("name" in source for source in every):
        return described.pop()
    plain = {"path", "format", "streaming", "max_samples", "split"}
    if all(is_hub_data(source["path"]) and source.keys() <= plain and source["format"] == "auto" for source in every):
        return ONLINE
    return ours.folder


def train_names(ours: Ours) -> str:
    return ",".join(_names(ours, ours.train))


def held_out_names(ours: Ours) -> str | None:
    return ",".join(_names(ours, ours.eval)) or None


def _names(ours: Ours, sources: Sources) -> list[str]:
    where = folder(ours)
    if where == ONLINE:
        return [source["path"] for source in sources]
    if where != ours.folder:
        return [source["name"] for source in sources]
    names = _entries(ours)
    return [next(name for name, (own, _) in names.items() if own is source) for source in sources]


def files(ours: Ours) -> Mapping[str, str]:
    """The description of the sources, if there is none yet."""
    if folder(ours) != ours.folder:
        return {}
    entries = {name: entry for name, (_, entry) in _entries(ours).items()}
    return {DESCRIPTION: json.dumps(entries, indent=2, ensure_ascii=False) + "\n"}


def origin(ours: Ours, source: dict[str, Any]) -> dict[str, Any]:
    """Return the source whose entry this one names, with the format that the entry has."""
    if folder(ours) == ONLINE:
        return source
    for name, (own, entry) in _entries(ours).items() if folder(ours) == ours.folder else ():
        named = source["path"] == ours.folder and source.get("name") == name
        path = entry.get("hf_hub_url") or posixpath.normpath(posixpath.join(ours.folder, entry["file_name"]))
        if named or posixpath.normpath(source["path"]) == path:
            said = {key: own[key] for key in _SAID & own.keys()}
            return {**{key: source[key] for key in source.keys() - {"name"}}, **said, "format": _layout(ours, own)}
    return source


def _entries(ours: Ours) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return name -> (source, entry of the description)."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for source in (*ours.train, *ours.eval):
        last = posixpath.basename(source.get("name") or source["path"]).replace(",", "_")
        stem = last.partition(".")[0] if data_kind(last) else last
        name = next(
            name for count in range(len(found) + 1) if (name := f"{stem}_{count}" if count else stem) not in found
        )
        found[name] = (source, _entry(ours, source))
    return found


def _layout(ours: Ours, source: Mapping[str, Any]) -> str:
    """Return the format that the entry says: of prompts and completions, that of the same records as instructions."""
    if source["format"] == "prompt-completion":
        return "alpaca"
    unknown = "text" if ours.facts.plain_texts else _UNKNOWN.get(ours.facts.records, "alpaca")
    return unknown if source["format"] == "auto" else source["format"]


def _entry(ours: Ours, source: Mapping[str, Any]) -> dict[str, Any]:
    path, layout = source["path"], _layout(ours, source)
    entry: dict[str, Any] = {"file_name": posixpath.relpath(path, ours.folder)}
    if is_hub_data(path):
        entry = {"hf_hub_url": path, **{key: source[key] for key in ("subset", "split") if key in source}}
    own: Mapping[str, str] = source.get("columns", {})
    if layout == "text":
        return {**entry, "columns": {"prompt": own.get("text", "text")}}
    record = ours.record(path) or {}
    marks = {"preference": PAIR, "judged": {"kto_tag": "label" if "label" in record else "kto_tag"}}.get(layout, {})
    if marks:
        layout = "sharegpt" if "conversations" in record else "messages" if "messages" in record else "alpaca"
    formatting = next((name for name, ours_ in FORMATS.items() if ours_ == layout), "alpaca")
    fields = dict(COLUMNS.get(layout, COLUMNS["alpaca"]))
    if layout == "alpaca" and (source["format"] == "prompt-completion" or (marks and "instruction" not in record)):
        fields = {"prompt": "prompt", "response": "completion", "system": "system"}
    there = set(record) | set(own)
    columns = {name: own.get(field, field) for name, field in fields.items() if field in there}
    columns |= {name: own.get(field, field) for name, field in marks.items()}
    return {
        **entry,
        **({"formatting": formatting} if formatting != "alpaca" else {}),
        **({"ranking": True} if marks is PAIR else {}),
        **({"columns": columns} if columns else {}),
        **({"tags": dict(OPENAI_TAGS)} if layout == "messages" else {}),
    }


def of_all(key: str) -> Back:
    """A value that all sources have."""

    def back(ours: Ours) -> Any:
        values = {source.get(key) for source in ours.train}
        return values.pop() if len(values) == 1 else None

    return back


def _weights(ours: Ours) -> list[float]:
    weights = [source.get("weight") for source in ours.train]
    return [float(one) for one in weights if one] if all(weights) and len(weights) > 1 else []


def mix(ours: Ours) -> str | None:
    return "interleave_under" if _weights(ours) else None


def shares(ours: Ours) -> str | None:
    weights = _weights(ours)
    return ",".join(repr(one / sum(weights)) for one in weights) or None


def template(ours: Ours) -> str | None:
    """LLaMA-Factory's name of the template: of several alike the model's, and one with pictures if there are some."""
    name = ours["data.template"]
    plain = "qwen3" if name == PREFIX + UNTHINKING else name.removeprefix(PREFIX)
    row = SAME.get(plain)
    seeing = [one for one in PICTURED if SAME[one] is row or (row is None and ours.sees)]
    usual = next(iter(seeing), plain) if ours.sees and plain not in PICTURED else plain
    return of_model(ours, seeing) or (usual if row else None)


def targets(ours: Ours) -> str | None:
    named = ours["adapter.targets"]
    return "all" if named == "all-linear" else ",".join(named or ()) or None


def reward_model(ours: Ours) -> str | None:
    name = ours["ppo.reward"]
    models = name is not None and not (is_address(name) or is_function(name) or name.startswith("entry_point:"))
    return name if models else None


def reward_type(ours: Ours) -> str | None:
    """reward_model_type: full for a folder with a whole model, and where LLaMA-Factory demands it."""
    if (name := reward_model(ours)) is None:
        return None
    for kind, file in (("lora", "adapter_config.json"), ("full", "config.json")):
        with contextlib.suppress(InputError):
            ours.options.read(f"{name}/{file}")
            return kind
    return "lora" if ours["adapter"] else "full"


def start(ours: Ours, method: str, path: str) -> list[str]:
    machines = ours["parallel.machines"]
    several = [f"NPROC_PER_NODE={processes(ours) // machines}"] if processes(ours) > 1 else []
    several += ["FORCE_TORCHRUN=1", f"NNODES={machines}"] if machines > 1 else []
    return [*variables(ours), *several, "llamafactory-cli", "train", path]
