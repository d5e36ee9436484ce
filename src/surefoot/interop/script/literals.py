"""Values that a Python script spells out, read from its syntax tree. Nothing is imported and nothing runs.

    script = Script.parse(text, "train.py")
    script.value(node)          # 5e-5, "runs/x", [1, 2], or Unread with the place and the words of the source

Read are constants, containers of them, arithmetic on them, f-strings, os.path.join, torch's dtypes by name, and names
bound once, or several times one after another. Everything else is `Unread`: what it is at run time is not known here.
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
_LONGEST = 80  # characters of a source text that a message shows
_DEEPEST = 40  # names that refer to names
_LARGEST = 10**12  # a product of literals beyond this is no setting, and could fill the memory
_LONGEST_TEXT = 100_000  # characters: the same for sums of texts
_MOST = 10_000  # nodes looked at for one value: names that name two names each would double them line by line


@dataclass(frozen=True)
class Unread:
    """What is no literal. where: "train.py:12:9". text: its source."""

    where: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Script:
    """names: what each name is bound to, line by line, where that can be told. imports: what an import calls it."""

    path: str
    tree: ast.Module
    names: Mapping[str, list[Binding]]
    imports: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, path: str) -> Script:
        """Raises InputError where the text is no Python."""
        try:
            with warnings.catch_warnings():  # "\d" in a script of somebody else's is no news
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: nested too deeply
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
        """The literal that a node spells out, else Unread. Containers may hold Unread items."""
        return self._value(node, 0, itertools.count())

    def _value(self, node: ast.expr, depth: int, looked_at: Iterator[int]) -> Any:
        if depth > _DEEPEST or next(looked_at) > _MOST:
            return self._unread(node)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._value(item, depth + 1, looked_at) for item in items]
            case ast.Dict():
                return self._mapping(node, depth, looked_at)
            case ast.Name():
                if (bound := self._bound(node)) is not None:
                    held = self._value(bound, depth + 1, looked_at)
                    return self._unread(node) if isinstance(held, Unread) else held
            case ast.UnaryOp(op=ast.USub()):
                held = self._value(node.operand, depth + 1, looked_at)
                return -held if isinstance(held, int | float) and not isinstance(held, bool) else self._unread(node)
            case ast.UnaryOp(op=ast.Not()):
                held = self._value(node.operand, depth + 1, looked_at)
                return not held if isinstance(held, bool) else self._unread(node)
            case ast.BinOp():
                return self._arithmetic(node, depth, looked_at)
            case ast.JoinedStr():
                return self._joined(node, depth, looked_at)
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype) if dtype.rstrip("0123456789") in _DTYPES:
                return f"torch.{dtype}"
            case ast.Call(args=arguments, keywords=[]) if self.callee(node) in ("os.path.join", "str", "Path"):
                parts = [self._value(argument, depth + 1, looked_at) for argument in arguments]
                return "/".join(parts) if parts and all(isinstance(part, str) for part in parts) else self._unread(node)
        return self._unread(node)

    def _unread(self, node: ast.AST) -> Unread:
        return Unread(self.where(node), self.text(node))

    def callee(self, node: ast.Call) -> str:
        """ "AutoModelForCausalLM.from_pretrained"; without what a call returned or an item of something."""
        return _source(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""

    def dotted(self, node: ast.expr) -> str:
        """ "torch.backends.cuda.enable_flash_sdp", whatever it was imported or assigned as; "" for what has no name."""
        node = self.bound(node)
        match node:
            case ast.Name():
                return self.imports.get(node.id, node.id)
            case ast.Attribute():
                holder = self.dotted(node.value)
                return f"{holder}.{node.attr}" if holder else ""
        return ""

    def bound(self, node: ast.expr) -> ast.expr:
        """What a name stands for, as far as that can be followed; else the node itself."""
        for _ in range(_DEEPEST):
            found = self._bound(node) if isinstance(node, ast.Name) else None
            if found is None:
                return node
            node = found
        return node

    def _bound(self, node: ast.Name) -> ast.expr | None:
        """Of several bindings the last one above the place where the name is used."""
        bindings = self.names.get(node.id, [])
        if len(bindings) < 2:
            return bindings[0][1] if bindings else None
        return next((value for line, value in reversed(bindings) if line < node.lineno), None)

    def _mapping(self, node: ast.Dict, depth: int, looked_at: Iterator[int]) -> Any:
        held: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self._value(key, depth + 1, looked_at)
            if not isinstance(name, str | int):
                return self._unread(node)
            held[name] = self._value(value, depth + 1, looked_at)
        return held

    def _arithmetic(self, node: ast.BinOp, depth: int, looked_at: Iterator[int]) -> Any:
        left, right = self._value(node.left, depth + 1, looked_at), self._value(node.right, depth + 1, looked_at)
        act = _OPERATORS.get(type(node.op))
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (left, right))
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return f"{left}/{right}"  # pathlib
        if act is None or not (numbers or texts):
            return self._unread(node)
        try:
            held = act(left, right)
        except (ZeroDivisionError, OverflowError):
            return self._unread(node)
        return self._unread(node) if (abs(held) > _LARGEST if numbers else len(held) > _LONGEST_TEXT) else held

    def _joined(self, node: ast.JoinedStr, depth: int, looked_at: Iterator[int]) -> Any:
        held = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    return self._unread(node)
                part = part.value
            value = self._value(part, depth + 1, looked_at)
            if not isinstance(value, str | int | float):
                return self._unread(node)
            held.append(str(value))
        whole = "".join(held)
        return self._unread(node) if len(whole) > _LONGEST_TEXT else whole


@dataclass
class Findings:
    """What is read from a script, each word, note and fault with its place. shown: the source that says it."""

    script: Script
    words: list[Word] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def word(self, node: ast.AST, name: str, value: ast.expr | None, shown: str) -> None:
        held = None if value is None else self.script.value(value)
        if isinstance(held, Unread):
            self.fault(node, f"{shown}: {held} is not a literal", "write its value into the script")
        else:
            self.words.append(Word(name, held, self.script.where(node), shown))

    def note(self, node: ast.AST, shown: str, why: str, outcome: Outcome = "listed", *keys: str) -> None:
        self.notes.append(Note(shown, outcome, keys, why, self.script.where(node)))

    def fault(self, node: ast.AST, what: str, fix: str = "leave it out") -> None:
        self.faults.append(script_fault(self.script.where(node), what, fix))


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"  # deeper than Python's own limit


_DTYPES = ("float", "bfloat", "half", "int", "uint")


Binding = tuple[int, ast.expr]  # the last line of the assignment, and what it assigns


def _bindings(tree: ast.Module) -> dict[str, list[Binding]]:
    """Names that plain assignments of one scope bind, outside of branches and loops, and nothing else does."""
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
