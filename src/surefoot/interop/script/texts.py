"""What a script's own functions make of a record, as far as their syntax tree spells it out, and what surefoot trains.

    first_text(script, function, {"q": "2+2", "a": "4"})      # "Q: 2+2 A: 4" of a function that returns this f-string

Nothing is executed, so code that changes data is never said to be carried over: both texts of the first record are
shown, and the reader judges.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from surefoot.interop.script.literals import Script
from surefoot.interop.translation import Note
from surefoot.system.redaction import redacted

_SHOWN = 240  # characters of each text
_TEXTS = ("text", "prompt")  # of what a function returns, where it returns a record
_ORDINARY = ("remove_columns", "select_columns", "with_format", "cast")  # of what is left of a record, not of its text


def code_notes(
    script: Script,
    code: Collection[ast.Call],
    formatting: ast.expr | None,
    record: Mapping[str, Any] | None,
    trained: Callable[[], str | None],
) -> Iterator[Note]:
    """code: calls on the training data. formatting: what the trainer gets as formatting_func. record: the first.
    trained: the text that surefoot makes of it."""
    plain = formatting is None and all(_name(call) in _ORDINARY for call in code)
    ours = None if plain else trained()
    made = record  # one function after the other
    for call in code:
        where, name = script.where(call), _name(call)
        if name in _ORDINARY:
            yield Note(f".{name}(…)", "listed", (), "changes no text: surefoot takes the columns that it trains", where)
            continue
        theirs = first_text(script, call.args[0], made) if call.args and made is not None else None
        made = made if made is None or theirs is None else {**made, "text": theirs}
        shown = f".{name}({', '.join(script.text(one) for one in call.args)})"
        yield Note(shown, "changed", (), _told(theirs, ours), where)
    if formatting is not None:
        theirs = None if made is None else first_text(script, formatting, made)
        shown = f"formatting_func={script.text(formatting)}"
        yield Note(shown, "changed", (), _told(theirs, ours), script.where(formatting))


def first_text(script: Script, function: ast.expr, record: Mapping[str, Any]) -> str | None:
    """The text that a function of one record returns; None where it cannot be read without running it."""
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


def _told(theirs: str | None, ours: str | None) -> str:
    made = "what it makes of a record is not known here" if theirs is None else f"it makes {_cut(theirs)} of the first"
    trains = "`surefoot data` shows what is trained" if ours is None else f"surefoot trains {_cut(ours)}"
    return f"is code, and is not run: {made}; {trains}"


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
    """What it returns, and what it stores in the record's text; nothing where it branches."""
    straight = all(isinstance(node, ast.Assign | ast.Expr | ast.Return) for node in function.body)
    for node in function.body if straight else ():
        match node:
            case ast.Return(value=ast.expr() as value):
                yield value
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=name))], value=value) if name in _TEXTS:
                yield value


def _text(script: Script, node: ast.expr) -> str | None:
    """A text, the text of a record, a list of one, or what a tokenizer is given."""
    node = script.bound(node)
    if isinstance(node, ast.Call) and node.args and not isinstance(node.func, ast.Attribute):
        return _text(script, node.args[0])  # tokenizer(text, truncation=True)
    held = script.value(node)
    if isinstance(held, dict):
        texts = [value for name, value in held.items() if isinstance(value, str) and name in _TEXTS]
        held = texts[0] if texts else None
    if isinstance(held, list) and len(held) == 1:
        held = held[0]
    return held if isinstance(held, str) else None


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
