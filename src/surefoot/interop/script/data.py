"""Find the data that a script trains on, and the text that its functions make of a record.

    trace(script, node)                                       # from the trainer back to load_dataset
    first_text(script, function, {"q": "2+2", "a": "4"})      # "Q: 2+2 A: 4" if the function returns this f-string

Nothing is executed, so code that changes data is never reported as carried over. Its text for the first record and the
text that surefoot trains on are both shown, so that the user can compare them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.interop.faults import script_error
from surefoot.interop.script.literals import Script, Unread
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import parse_split
from surefoot.interop.translation import Note
from surefoot.system.errors import InputError
from surefoot.system.redaction import redacted

_FILES = ("json", "csv", "parquet", "text")
_OF_CODE = ("map", "rename_column", "rename_columns", "remove_columns", "select_columns", "with_format", "cast")
_ORDER = ("shuffle", "flatten_indices")
_LONGEST = 100  # calls from the dataset to the trainer


@dataclass(frozen=True)
class Found:
    """A dataset in a script.

    source: surefoot's source.
    where: place of load_dataset.
    files: split -> data file.
    share, is_test: size of a test split made in the script, and whether this is that split.
    code: calls whose functions change the records.
    """

    source: dict[str, Any]
    where: str
    files: dict[str, str] = field(default_factory=dict)
    share: float | int | None = None
    is_test: bool = False
    code: tuple[ast.Call, ...] = ()


def trace(script: Script, node: ast.expr, links: int = 0) -> Found:
    """Follow an expression to its dataset. links: calls followed so far. Raises InputError if it cannot be named."""
    node = script.bound(node)
    where = script.where(node)
    if links > _LONGEST:
        raise _lost(script, node, "refers to itself")  # def f(data): data = data.map(…)
    if isinstance(node, ast.Subscript):
        part = script.value(node.slice)
        if isinstance(part, str):
            return _part(trace(script, node.value, links + 1), part, where)
        raise _lost(script, node, "selects a part of the data")
    if not isinstance(node, ast.Call):
        raise _lost(script, node, "is not a dataset that can be read from the script")
    name = script.callee(node).rpartition(".")[2] or getattr(node.func, "attr", "")
    if name == "load_dataset":
        return _loaded(script, node, where)
    if not isinstance(node.func, ast.Attribute):
        raise _lost(script, node, "creates the data in the script")
    if name in ("from_list", "from_dict", "from_generator", "from_pandas", "load_from_disk"):
        raise _lost(script, node, "creates the data in the script")
    found = trace(script, node.func.value, links + 1)
    if name in _OF_CODE:
        return replace(found, code=(*found.code, node))
    if name in _ORDER:
        return found
    if name == "train_test_split":
        arguments = {word.arg: script.value(word.value) for word in node.keywords}
        share = script.value(node.args[0]) if node.args else arguments.get("test_size", 0.25)
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise _lost(script, node, "holds out a split whose size is not a literal")
        return replace(found, share=share)
    if name == "select" and (count := _first(script, node)) is not None:
        return replace(found, source=found.source | {"max_samples": count})
    raise _lost(script, node, f"changes the data with .{name}")


def _loaded(script: Script, node: ast.Call, where: str) -> Found:
    given = {word.arg: script.value(word.value) for word in node.keywords if word.arg}
    given |= {name: script.value(value) for name, value in zip(("path", "name"), node.args, strict=False)}
    for name, value in given.items():
        if isinstance(value, Unread) and name in ("path", "name", "split", "data_files", "revision"):
            raise script_error(value.where, f"load_dataset: {name} is {value}, which is not a literal", "write it out")
    path, files = given.get("path"), given.get("data_files")
    by_split: dict[str, str] = {}
    if path in _FILES:
        named = files if isinstance(files, dict) else {"train": files}
        for split, one in named.items():
            one = one[0] if isinstance(one, list) and len(one) == 1 else one
            if not isinstance(one, str):
                raise script_error(where, "load_dataset: data_files is not one file per split", "give one")
            by_split[str(split)] = one
        if "train" not in by_split:
            raise script_error(where, "load_dataset: data_files has no train", "add it")
        source: dict[str, Any] = {"path": by_split["train"]}
    elif files is not None:
        raise script_error(
            where, "load_dataset: data_files of a hub dataset are not supported", "use a subset and split"
        )
    else:
        source = {"path": path, **({"subset": given["name"]} if given.get("name") else {})}
        source |= {"revision": given["revision"]} if given.get("revision") else {}
    found = Found(source, where, by_split)
    return _part(found, given["split"], where) if given.get("split") else found


def _part(found: Found, split: str, where: str) -> Found:
    if found.share is not None and split in ("train", "test"):
        return replace(found, is_test=split == "test")
    try:
        split, part = parse_split(split)
    except Refusal as refusal:
        raise script_error(where, refusal.what, refusal.fix) from None
    source = dict(found.source)
    if found.files:
        if split not in found.files:
            raise script_error(where, f"data_files has no {split}", "add it")
        source["path"] = found.files[split]
    else:
        source["split"] = split
    return replace(found, source=source | part)


def _first(script: Script, node: ast.Call) -> int | None:
    """Return N of `.select(range(N))`."""
    match node.args:
        case [ast.Call(func=ast.Name(id="range"), args=[count])]:
            value = script.value(count)
            return value if isinstance(value, int) and not isinstance(value, bool) else None
    return None


def _lost(script: Script, node: ast.AST, why: str) -> InputError:
    fix = "write the records to a file, and use load_dataset('json', data_files=…) instead"
    return script_error(script.where(node), f"{script.text(node)}: {why}", fix)


_SHOWN = 240  # characters of each text that are shown
_TEXTS = ("text", "prompt")  # keys with the text, if a function returns a record
_ORDINARY = (
    "remove_columns",
    "select_columns",
    "with_format",
    "cast",
)  # calls that change the columns of a record, not its text


def code_notes(
    script: Script,
    code: Collection[ast.Call],
    formatting: ast.expr | None,
    record: Mapping[str, Any] | None,
    trained: Callable[[], str | None],
) -> Iterator[Note]:
    """Note every function that shapes the training texts, with its text and surefoot's text.

    code: calls on the training data.
    formatting: the trainer's formatting_func.
    record: the first record, None if not available.
    trained: returns the text that surefoot makes of that record.
    """
    plain = formatting is None and all(_name(call) in _ORDINARY for call in code)
    ours = None if plain else trained()
    made = record  # the functions apply one after the other
    for call in code:
        where, name = script.where(call), _name(call)
        if name in _ORDINARY:
            yield Note(f".{name}(…)", "listed", (), "does not change texts: surefoot selects the columns itself", where)
            continue
        theirs = first_text(script, call.args[0], made) if call.args and made is not None else None
        made = made if made is None or theirs is None else {**made, "text": theirs}
        shown = f".{name}({', '.join(script.text(one) for one in call.args)})"
        yield Note(shown, "changed", (), _difference(theirs, ours), where)
    if formatting is not None:
        theirs = None if made is None else first_text(script, formatting, made)
        shown = f"formatting_func={script.text(formatting)}"
        yield Note(shown, "changed", (), _difference(theirs, ours), script.where(formatting))


def first_text(script: Script, function: ast.expr, record: Mapping[str, Any]) -> str | None:
    """Return the text that a function makes of a record; None if that cannot be told without running it."""
    found = _function(script, function)
    names = [] if found is None else [argument.arg for argument in found.args.args]
    if found is None or len(names) != 1:
        return None
    filled = _Filled(names[0], record).visit(copy.deepcopy(found))
    if isinstance(filled, ast.Lambda):
        return _text(script, filled.body)
    inside = Script.of_tree(
        ast.Module([*(one for one in script.tree.body if one is not found), filled], []), script.path
    )
    return next((text for given in _returned(filled) if (text := _text(inside, given)) is not None), None)


def _difference(theirs: str | None, ours: str | None) -> str:
    made = "its text is unknown" if theirs is None else f"for the first record it makes {_cut(theirs)}"
    trains = "`surefoot data` shows the training text" if ours is None else f"surefoot trains on {_cut(ours)}"
    return f"is code, which is not run: {made}; {trains}"


def _cut(text: str) -> str:
    text = redacted(text)
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _function(script: Script, node: ast.expr) -> ast.FunctionDef | ast.Lambda | None:
    node = script.bound(node)
    if isinstance(node, ast.Lambda):
        return node
    named = [one for one in ast.walk(script.tree) if isinstance(one, ast.FunctionDef)]
    return next((one for one in named if isinstance(node, ast.Name) and one.name == node.id), None)


def _returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the expressions that it returns or stores as the record's text; none if it branches."""
    straight = all(isinstance(node, ast.Assign | ast.Expr | ast.Return) for node in function.body)
    for node in function.body if straight else ():
        match node:
            case ast.Return(value=ast.expr() as value):
                yield value
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=name))], value=value) if name in _TEXTS:
                yield value


def _text(script: Script, node: ast.expr) -> str | None:
    """Return a string literal: itself, a record's text, the only item of a list, or a tokenizer's first argument."""
    node = script.bound(node)
    if isinstance(node, ast.Call) and node.args and not isinstance(node.func, ast.Attribute):
        return _text(script, node.args[0])  # tokenizer(text, truncation=True)
    value = script.value(node)
    if isinstance(value, dict):
        texts = [text for name, text in value.items() if isinstance(text, str) and name in _TEXTS]
        value = texts[0] if texts else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None


class _Filled(ast.NodeTransformer):
    """Puts the record's values where a function reads them: row["q"], row.get("q")."""

    def __init__(self, name: str, record: Mapping[str, Any]):
        self._name, self._record = name, record

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
            return self._value(node.value, node.slice.value) or self.generic_visit(node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=key), *_]):
                return self._value(holder, key) or self.generic_visit(node)
        return self.generic_visit(node)

    def _value(self, holder: ast.expr, key: Any) -> ast.expr | None:
        if isinstance(holder, ast.Name) and holder.id == self._name:
            value = self._record.get(key)
            if isinstance(value, str | int | float):
                return ast.Constant(value)
        return None
