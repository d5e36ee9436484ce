"""Read literal values of a Python script from its syntax tree. Nothing is imported or run.

    script = Script.parse(text, "train.py")
    script.value(node)          # 5e-5, "runs/x", [1, 2], or Unread with its place and source

Supported are constants, containers and arithmetic of them, f-strings, os.path.join, torch dtypes, and names that are
bound by plain assignments. Everything else is `Unread`, since its value at run time is not known.
"""

from __future__ import annotations

import ast
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.interop.faults import script_error, script_fault
from surefoot.interop.translation import Note, Outcome
from surefoot.interop.words import Word
from surefoot.system.errors import Fault

_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LONGEST = 80  # characters of source that a message shows
_DEEPEST = 40  # names that refer to other names
_LARGEST = 10**12  # larger products of literals are no settings and could exhaust memory
_LONGEST_TEXT = 100_000  # characters: the same for concatenated strings
_MOST = 10_000  # nodes visited for one value: names that each use two names grow exponentially


@dataclass(frozen=True)
class Unread:
    """An expression that is not a literal. where: "train.py:12:9". text: its source."""

    where: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Script:
    """A parsed script. names: name -> bindings in order of lines, if known. imports: local name -> imported name."""

    path: str
    tree: ast.Module
    names: Mapping[str, list[Binding]]
    imports: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, path: str) -> Script:
        """Parse a script. Raises InputError if it is not valid Python."""
        try:
            with warnings.catch_warnings():  # "\d" in the user's script is not our concern
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # MemoryError: nested too deeply
            line = getattr(error, "lineno", None)
            where = f"{path}:{line}" if line else path
            raise script_error(where, "is not valid Python", "give a script that runs") from None
        return cls.of_tree(tree, path)

    @classmethod
    def of_tree(cls, tree: ast.Module, path: str) -> Script:
        return cls(path, tree, _bindings(tree), _imports(tree))

    def where(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}:{getattr(node, 'col_offset', 0) + 1}"

    def text(self, node: ast.AST) -> str:
        whole = " ".join(_source(node).split())
        return whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]}…"

    def value(self, node: ast.expr) -> Any:
        """Return the literal value of a node, else Unread. Containers may contain Unread items."""
        return self._value(node, 0, itertools.count())

    def _value(self, node: ast.expr, depth: int, visited: Iterator[int]) -> Any:
        if depth > _DEEPEST or next(visited) > _MOST:
            return self._unread(node)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._value(item, depth + 1, visited) for item in items]
            case ast.Dict():
                return self._mapping(node, depth, visited)
            case ast.Name():
                if (bound := self._bound(node)) is not None:
                    value = self._value(bound, depth + 1, visited)
                    return self._unread(node) if isinstance(value, Unread) else value
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand, depth + 1, visited)
                return -value if isinstance(value, int | float) and not isinstance(value, bool) else self._unread(node)
            case ast.UnaryOp(op=ast.Not()):
                value = self._value(node.operand, depth + 1, visited)
                return not value if isinstance(value, bool) else self._unread(node)
            case ast.BinOp():
                return self._arithmetic(node, depth, visited)
            case ast.JoinedStr():
                return self._joined(node, depth, visited)
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype) if dtype.rstrip("0123456789") in _DTYPES:
                return f"torch.{dtype}"
            case ast.Call(args=arguments, keywords=[]) if self.callee(node) in ("os.path.join", "str", "Path"):
                parts = [self._value(argument, depth + 1, visited) for argument in arguments]
                return "/".join(parts) if parts and all(isinstance(part, str) for part in parts) else self._unread(node)
        return self._unread(node)

    def _unread(self, node: ast.AST) -> Unread:
        return Unread(self.where(node), self.text(node))

    def callee(self, node: ast.Call) -> str:
        """Return "AutoModelForCausalLM.from_pretrained"; "" if the callee is not a dotted name."""
        return _source(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""

    def dotted(self, node: ast.expr) -> str:
        """Return "torch.backends.cuda.enable_flash_sdp", resolving imports and assignments; "" if it is not a name."""
        node = self.bound(node)
        match node:
            case ast.Name():
                return self.imports.get(node.id, node.id)
            case ast.Attribute():
                holder = self.dotted(node.value)
                return f"{holder}.{node.attr}" if holder else ""
        return ""

    def bound(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name is bound to, followed as far as possible; else the node itself."""
        for _ in range(_DEEPEST):
            found = self._bound(node) if isinstance(node, ast.Name) else None
            if found is None:
                return node
            node = found
        return node

    def _bound(self, node: ast.Name) -> ast.expr | None:
        """Return the last binding above the place where the name is used."""
        bindings = self.names.get(node.id, [])
        if len(bindings) < 2:
            return bindings[0][1] if bindings else None
        return next((value for line, value in reversed(bindings) if line < node.lineno), None)

    def _mapping(self, node: ast.Dict, depth: int, visited: Iterator[int]) -> Any:
        mapping: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self._value(key, depth + 1, visited)
            if not isinstance(name, str | int):
                return self._unread(node)
            mapping[name] = self._value(value, depth + 1, visited)
        return mapping

    def _arithmetic(self, node: ast.BinOp, depth: int, visited: Iterator[int]) -> Any:
        left, right = self._value(node.left, depth + 1, visited), self._value(node.right, depth + 1, visited)
        act = _OPERATORS.get(type(node.op))
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (left, right))
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return f"{left}/{right}"  # pathlib
        if act is None or not (numbers or texts):
            return self._unread(node)
        try:
            result = act(left, right)
        except (ZeroDivisionError, OverflowError):
            return self._unread(node)
        return self._unread(node) if (abs(result) > _LARGEST if numbers else len(result) > _LONGEST_TEXT) else result

    def _joined(self, node: ast.JoinedStr, depth: int, visited: Iterator[int]) -> Any:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    return self._unread(node)
                part = part.value
            value = self._value(part, depth + 1, visited)
            if not isinstance(value, str | int | float):
                return self._unread(node)
            parts.append(str(value))
        whole = "".join(parts)
        return self._unread(node) if len(whole) > _LONGEST_TEXT else whole


@dataclass
class Findings:
    """Settings, notes and faults found in a script, each with its place. shown: its source text."""

    script: Script
    words: list[Word] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def word(self, node: ast.AST, name: str, value: ast.expr | None, shown: str) -> None:
        literal = None if value is None else self.script.value(value)
        if isinstance(literal, Unread):
            self.fault(node, f"{shown}: {literal} is not a literal", "write its value into the script")
        else:
            self.words.append(Word(name, literal, self.script.where(node), shown))

    def note(self, node: ast.AST, shown: str, why: str, outcome: Outcome = "listed", *keys: str) -> None:
        self.notes.append(Note(shown, outcome, keys, why, self.script.where(node)))

    def fault(self, node: ast.AST, what: str, fix: str = "leave it out") -> None:
        self.faults.append(script_fault(self.script.where(node), what, fix))


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"  # nested too deeply for ast.unparse


_DTYPES = ("float", "bfloat", "half", "int", "uint")


Binding = tuple[int, ast.expr]  # (last line of the assignment, assigned expression)


def _bindings(tree: ast.Module) -> dict[str, list[Binding]]:
    """Return names that are bound only by plain assignments of one scope, outside of branches and loops."""
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    straight = {id(node): scope for scope in scopes for node in scope.body if isinstance(node, ast.Assign)}
    bound: dict[str, list[tuple[ast.AST | None, Binding | None]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _names(target):
                    binding = (node.end_lineno or node.lineno, node.value) if isinstance(target, ast.Name) else None
                    bound.setdefault(name, []).append((straight.get(id(node)), binding))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            bound.setdefault(node.target.id, []).append((None, (node.end_lineno or node.lineno, node.value)))
        elif isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr | ast.comprehension):
            for name in _names(node.target):
                bound.setdefault(name, []).append((None, None))
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append((None, None))
    plain: dict[str, list[Binding]] = {}
    for name, found in bound.items():
        scopes_of = {id(scope) for scope, _ in found}
        bindings = [binding for _, binding in found if binding is not None]
        in_order = len(scopes_of) == 1 and found[0][0] is not None
        if len(bindings) == len(found) and (len(found) == 1 or in_order):
            plain[name] = bindings
    return plain


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
                for one in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
