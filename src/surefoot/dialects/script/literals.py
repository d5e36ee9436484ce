"""Values that a Python script spells out, read from its syntax tree. Nothing is imported and nothing runs.

    script = Script.parse(text, "train.py")
    script.value(node)          # 5e-5, "runs/x", [1, 2], or Unread with the place and the words of the source

Read are constants, containers of them, arithmetic on them, f-strings, os.path.join, torch's dtypes by name, and names
bound once, or several times one after another. Everything else is `Unread`: what it is at run time is not known here.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.errors import Fault, InputError

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


@dataclass(frozen=True)
class Unread:
    """What is no literal. where: "train.py:12:9". text: its source."""

    where: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Script:
    """names: what each name is bound to, line by line, where that can be told."""

    path: str
    tree: ast.Module
    names: Mapping[str, list[Binding]]

    @classmethod
    def parse(cls, text: str, path: str) -> Script:
        """Raises InputError where the text is no Python."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"{path}:{line}" if line else path
            raise InputError(Fault(where, "is not valid Python", "give a script that runs")) from None
        return cls(path, tree, _bindings(tree))

    def where(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}:{getattr(node, 'col_offset', 0) + 1}"

    def text(self, node: ast.AST) -> str:
        whole = " ".join(ast.unparse(node).split())
        return whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]}…"

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The literal that a node spells out, else Unread. Containers may hold Unread items."""
        unread = Unread(self.where(node), self.text(node))
        if depth > _DEEPEST:
            return unread
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.Dict():
                return self._mapping(node, depth, unread)
            case ast.Name():
                bound = self._bound(node)
                return unread if bound is None else self._inner(bound, depth, unread)
            case ast.UnaryOp(op=ast.USub()):
                held = self.value(node.operand, depth + 1)
                return -held if isinstance(held, int | float) and not isinstance(held, bool) else unread
            case ast.UnaryOp(op=ast.Not()):
                held = self.value(node.operand, depth + 1)
                return not held if isinstance(held, bool) else unread
            case ast.BinOp():
                return self._arithmetic(node, depth, unread)
            case ast.JoinedStr(values=parts):
                return self._joined(parts, depth, unread)
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype) if dtype.rstrip("0123456789") in _DTYPES:
                return f"torch.{dtype}"
            case ast.Call(args=arguments, keywords=[]) if self.callee(node) in ("os.path.join", "str", "Path"):
                parts = [self.value(argument, depth + 1) for argument in arguments]
                return "/".join(parts) if parts and all(isinstance(part, str) for part in parts) else unread
        return unread

    def callee(self, node: ast.Call) -> str:
        """ "AutoModelForCausalLM.from_pretrained"; without what a call returned or an item of something."""
        return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""

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

    def _inner(self, bound: ast.expr, depth: int, unread: Unread) -> Any:
        held = self.value(bound, depth + 1)
        return unread if isinstance(held, Unread) else held

    def _mapping(self, node: ast.Dict, depth: int, unread: Unread) -> Any:
        held: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.value(key, depth + 1)
            if not isinstance(name, str | int):
                return unread
            held[name] = self.value(value, depth + 1)
        return held

    def _arithmetic(self, node: ast.BinOp, depth: int, unread: Unread) -> Any:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        act = _OPERATORS.get(type(node.op))
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (left, right))
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return f"{left}/{right}"  # pathlib
        if act is None or not (numbers or texts):
            return unread
        try:
            held = act(left, right)
        except (ZeroDivisionError, OverflowError):
            return unread
        return unread if numbers and abs(held) > _LARGEST else held

    def _joined(self, parts: list[ast.expr], depth: int, unread: Unread) -> Any:
        held = []
        for part in parts:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    return unread
                part = part.value
            value = self.value(part, depth + 1)
            if not isinstance(value, str | int | float):
                return unread
            held.append(str(value))
        return "".join(held)


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


def _names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
