"""Which data a script trains on: a chain of calls from `load_dataset` to the trainer, followed back link by link."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.interop.rows import Refusal
from surefoot.interop.script.literals import Script, Unread
from surefoot.interop.slices import first_of
from surefoot.system.errors import Fault, InputError

_FILES = ("json", "csv", "parquet", "text")
_OF_CODE = ("map", "rename_column", "rename_columns", "remove_columns", "select_columns", "with_format", "cast")
_ORDER = ("shuffle", "flatten_indices")
_LONGEST = 100  # calls from the data set to the trainer


@dataclass(frozen=True)
class Found:
    """source: surefoot's. share: of a split made in the script, and whether this is its test part. code: calls whose
    functions shape the records."""

    source: dict[str, Any]
    where: str
    files: dict[str, str] = field(default_factory=dict)
    share: float | int | None = None
    is_test: bool = False
    code: tuple[ast.Call, ...] = ()


def trace(script: Script, node: ast.expr, links: int = 0) -> Found:
    """Raises InputError where the chain leads to no data set that can be named. links: followed so far."""
    node = script.bound(node)
    where = script.where(node)
    if links > _LONGEST:
        raise _lost(script, node, "leads back to itself")  # def f(data): data = data.map(…)
    if isinstance(node, ast.Subscript):
        part = script.value(node.slice)
        if isinstance(part, str):
            return _part(trace(script, node.value, links + 1), part, where)
        raise _lost(script, node, "takes a part of the data")
    if not isinstance(node, ast.Call):
        raise _lost(script, node, "is no data set that can be read from the script")
    name = script.callee(node).rpartition(".")[2] or getattr(node.func, "attr", "")
    if name == "load_dataset":
        return _loaded(script, node, where)
    if not isinstance(node.func, ast.Attribute):
        raise _lost(script, node, "makes the data in the script")
    if name in ("from_list", "from_dict", "from_generator", "from_pandas", "load_from_disk"):
        raise _lost(script, node, "makes the data in the script")
    found = trace(script, node.func.value, links + 1)
    if name in _OF_CODE:
        return replace(found, code=(*found.code, node))
    if name in _ORDER:
        return found
    if name == "train_test_split":
        arguments = {word.arg: script.value(word.value) for word in node.keywords}
        share = script.value(node.args[0]) if node.args else arguments.get("test_size", 0.25)
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise _lost(script, node, "holds out a part whose size is no literal")
        return replace(found, share=share)
    if name == "select" and (count := _first(script, node)) is not None:
        return replace(found, source=found.source | {"max_samples": count})
    raise _lost(script, node, f"changes the data with .{name}")


def _loaded(script: Script, node: ast.Call, where: str) -> Found:
    given = {word.arg: script.value(word.value) for word in node.keywords if word.arg}
    given |= {name: script.value(value) for name, value in zip(("path", "name"), node.args, strict=False)}
    for name, value in given.items():
        if isinstance(value, Unread) and name in ("path", "name", "split", "data_files", "revision"):
            raise InputError(
                Fault(
                    value.where,
                    f"load_dataset: {name} is {value}, which is no literal",
                    "write it out",
                    code="SF-TRANSLATE-SCRIPT",
                )
            )
    path, files = given.get("path"), given.get("data_files")
    held: dict[str, str] = {}
    if path in _FILES:
        named = files if isinstance(files, dict) else {"train": files}
        for split, one in named.items():
            one = one[0] if isinstance(one, list) and len(one) == 1 else one
            if not isinstance(one, str):
                raise InputError(
                    Fault(
                        where,
                        "load_dataset: data_files is not one file for each split",
                        "name one",
                        code="SF-TRANSLATE-SCRIPT",
                    )
                )
            held[str(split)] = one
        if "train" not in held:
            raise InputError(
                Fault(where, "load_dataset: data_files has no train", "name one", code="SF-TRANSLATE-SCRIPT")
            )
        source: dict[str, Any] = {"path": held["train"]}
    elif files is not None:
        raise InputError(
            Fault(
                where,
                "load_dataset: data_files of a hub data set",
                "name it by subset and split",
                code="SF-TRANSLATE-SCRIPT",
            )
        )
    else:
        source = {"path": path, **({"subset": given["name"]} if given.get("name") else {})}
        source |= {"revision": given["revision"]} if given.get("revision") else {}
    found = Found(source, where, held)
    return _part(found, given["split"], where) if given.get("split") else found


def _part(found: Found, split: str, where: str) -> Found:
    if found.share is not None and split in ("train", "test"):
        return replace(found, is_test=split == "test")
    try:
        split, count = first_of(split)
    except Refusal as refusal:
        raise InputError(Fault(where, refusal.what, refusal.fix, code="SF-TRANSLATE-SCRIPT")) from None
    source = dict(found.source)
    if found.files:
        if split not in found.files:
            raise InputError(Fault(where, f"data_files has no {split}", "name it", code="SF-TRANSLATE-SCRIPT"))
        source["path"] = found.files[split]
    else:
        source["split"] = split
    if count is not None:
        source["max_samples"] = count
    return replace(found, source=source)


def _first(script: Script, node: ast.Call) -> int | None:
    """N of `.select(range(N))`."""
    match node.args:
        case [ast.Call(func=ast.Name(id="range"), args=[count])]:
            held = script.value(count)
            return held if isinstance(held, int) and not isinstance(held, bool) else None
    return None


def _lost(script: Script, node: ast.AST, why: str) -> InputError:
    fix = "write the records into a file, and translate with load_dataset('json', data_files=…) in its place"
    return InputError(Fault(script.where(node), f"{script.text(node)}: {why}", fix, code="SF-TRANSLATE-SCRIPT"))
