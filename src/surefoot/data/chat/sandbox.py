"""jinja's sandbox with limits on time and memory, for untrusted chat templates.

Jinja's own sandbox prevents access to Python, but not endless loops or huge values. Here every loop iteration and every
call of a macro, method or filter is a step of one budget, and every value that an operation makes is measured once,
with everything inside it. The inputs of an operation are therefore small; operations that can make large values from
small ones are checked before (products, `~`, join, replace) or not available. A call into C cannot be interrupted, so
the time is checked between steps. The limits are for mistakes and simple attacks.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

STEPS = 1_000_000  # per rendering; a conversation of a thousand turns takes some tens of thousands
CHARACTERS = 20_000_000  # per rendering, and per value: ten times the longest context of models
ITEMS = 1_000_000  # of everything inside one value
LEVELS = 200  # of nested lists: Python hashes tuples recursively without a check of the stack
SEARCHED = 500_000_000  # characters times characters, of one reverse search or strip
SECONDS = 10.0  # of CPU time of this thread, independent of the load
WHOLE = sys.hash_info.modulus  # integers below it have different hashes, so dicts of them stay fast

# Make large values from small ones, search without a bound, or are random.
_NO_FILTERS = {
    "batch",
    "center",
    "format",
    "indent",
    "pprint",
    "random",
    "slice",
    "striptags",
    "urlize",
    "wordwrap",
    "xmlattr",
}
_NO_METHODS = {
    "center",
    "encode",
    "expandtabs",
    "format",
    "format_map",
    "ljust",
    "rjust",
    "to_bytes",
    "translate",
    "zfill",
}
_SEARCHES = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}  # length times length


class _Budget:
    """Remaining budget of one rendering."""

    def __init__(self) -> None:
        self.steps, self.characters, self.until = STEPS, CHARACTERS, time.thread_time() + SECONDS


_BUDGET: ContextVar[_Budget] = ContextVar("budget of the rendering")


class LimitReached(jinja2.TemplateError):
    """Raised for a template that exceeds a limit.

    limit: its name, for programs.
    """

    def __init__(self, limit: str, what: str):
        super().__init__(f"{what} and was stopped")
        self.limit = limit


def step() -> None:
    budget = _BUDGET.get()
    budget.steps -= 1
    if budget.steps < 0:
        raise LimitReached("steps", f"it took {STEPS:,} steps")
    if time.thread_time() > budget.until:
        raise LimitReached("seconds", f"it ran for {SECONDS:g} seconds")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        step()
        yield item


def measured(value: Any) -> Any:
    """Return the value after checking its size with everything inside it; items of an iterator as they are read.

    Checked level by level, because a list that contains one list twice, and so on, has millions of items after twenty
    levels.
    """
    if isinstance(value, str):
        _fits(len(value), 0)
    elif isinstance(value, int):
        if abs(value) >= WHOLE:
            raise LimitReached("whole", f"it makes a number above {WHOLE:,}")
    elif isinstance(value, list | tuple | dict | set):
        characters, items, level = 0, 0, [value]
        for _ in range(LEVELS):
            below: list[Any] = []
            for one in level:
                items += len(one)
                _fits(characters, items)
                for inner in (*one, *one.values()) if isinstance(one, dict) else one:
                    if isinstance(inner, str):
                        characters += len(inner)
                    elif isinstance(inner, list | tuple | dict | set):
                        below.append(inner)
            _fits(characters, items)
            if not (level := below):
                return value
        raise LimitReached("levels", f"it makes a list of more than {LEVELS} levels")
    elif isinstance(value, Iterator):
        return _measured_items(value)
    return value


def _measured_items(items: Iterator[Any]) -> Iterator[Any]:
    characters = count = 0
    for item in items:
        characters, count = characters + (len(item) if isinstance(item, str) else 0), count + 1
        _fits(characters, count)
        yield measured(item)


def _fits(characters: int, items: int) -> None:
    if characters > CHARACTERS:
        raise LimitReached("characters", f"it writes more than {CHARACTERS:,} characters")
    if items > ITEMS:
        raise LimitReached("items", f"it makes a list of more than {ITEMS:,} items")


def _written(value: Any) -> str:
    """Check printed text. Called for everything that is printed; inside macros and blocks once for each of them."""
    text = value if isinstance(value, str) else str(value)
    budget = _BUDGET.get()
    budget.characters -= len(text)
    _fits(CHARACTERS - budget.characters, 0)
    return text


def _joined(values: Iterable[Any], separator: Any = "") -> str:
    texts = [str(value) for value in values]
    _fits(sum(map(len, texts)) + len(str(separator)) * len(texts), 0)
    return str(separator).join(texts)


def _check(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Check the size of a filter's or method's result before it is called.

    args: of a method, or of a filter after the value, by name or by position.
    """
    if name == "join" and args:
        _fits(len(str(args[0])) * len(value) if isinstance(value, Sized) else 0, 0)
    elif name == "replace" and len(args) > 1:
        text, old, new = str(value), str(args[0]), str(args[1])
        _fits(len(text) + text.count(old) * max(0, len(new) - len(old)), 0)
    elif name == "round" and any(isinstance(one, int) and abs(one) > 100 for one in args):
        raise LimitReached("digits", f"it rounds to {args} digits")
    elif name in _SEARCHES and any(len(str(value)) * len(one) > SEARCHED for one in args if isinstance(one, str)):
        raise LimitReached("searched", f"it compares more than {SEARCHED:,} characters")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with limits. Use `render_limited`; a template's own `render` has no budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **settings: Any):
        super().__init__(finalize=_in_context(_written), **settings)
        self.filters = {name: limited(name, one) for name, one in self.filters.items() if name not in _NO_FILTERS}
        self.filters |= {
            f"_surefoot_{one.__name__}": _in_context(one) for one in (_counted, measured, _joined, _written)
        }
        self.tests |= {name: _of_number(self.tests[name]) for name in ("divisibleby", "even", "odd")}

    def _generate(self, source: jinja2.nodes.Template, *place: Any, **settings: Any) -> str:
        """jinja's hook between parsing and compiling."""
        _limit(source)
        source.set_environment(self)
        return super()._generate(source, *place, **settings)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Disable jinja's own `format`, which can pad to any width."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, method, function, or a recursive loop."""
        step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = tuple(map(_counted, args))
        elif isinstance(owner, str) and name == "join" and args:
            return measured(_joined(args[0], owner))
        elif isinstance(owner, str):
            _check(name, owner, (*args, *kwargs.values()))
        return measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.exceptions.SecurityError(f"{operator} is not available in chat templates")
        if operator == "*":
            for many, number in ((left, right), (right, left)):
                if isinstance(many, Sized) and isinstance(number, int):
                    _fits(len(many) * number, 0 if isinstance(many, str) else len(many) * number)
        return measured(self.binop_table[operator](left, right))


def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: count a step and check inputs and result."""
    marked = getattr(function, "jinja_pass_arg", None)
    wants = marked and marked.name  # passed by jinja before the value

    @jinja2.pass_context
    @functools.wraps(function, updated=())
    def filter_(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        step()
        if name == "join" and isinstance(value, Iterator):
            value = list(value)
        _check(name, value, (*args, *kwargs.values()))
        first = {None: (), "context": (context,), "eval_context": (context.eval_ctx,)}.get(
            wants, (context.environment,)
        )
        return measured(function(*first, value, *args, **kwargs))

    return filter_


def _of_number(test: Callable[..., bool]) -> Callable[..., bool]:
    def of_number(value: Any, *others: Any) -> bool:
        if isinstance(value, str):  # whose % would format it
            raise jinja2.exceptions.SecurityError("a text is not a number")
        return test(value, *others)

    return of_number


def render_limited(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render to text. Raises jinja2.TemplateError at a limit, and any exception of the template."""
    token = _BUDGET.set(_Budget())
    try:
        return "".join(template.root_render_func(template.new_context(variables)))
    except Exception:
        template.environment.handle_exception()  # raises it again, with the template's lines in the traceback
    finally:
        _BUDGET.reset(token)


def _limit(node: jinja2.nodes.Node) -> None:
    """Add a check to every loop, literal, `~` and printed text below this node."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_limited(child) for child in value]
        elif isinstance(node, jinja2.nodes.CallBlock) and name == "call":
            _limit(value)  # a call block passes its body to this call, so it must stay a call
        elif isinstance(value, jinja2.nodes.Node):
            setattr(node, name, _limited(value))
    if isinstance(node, jinja2.nodes.For):
        node.iter = _filtered(node.iter, _counted)
    elif isinstance(node, jinja2.nodes.FilterBlock):
        node.filter = _filtered(node.filter, _written)


def _limited(child: Any) -> Any:
    if isinstance(child, jinja2.nodes.Node):
        _limit(child)
    if isinstance(child, jinja2.nodes.TemplateData):  # so that it is counted when it is printed
        return jinja2.nodes.Const(child.data, lineno=child.lineno)
    if isinstance(child, jinja2.nodes.List | jinja2.nodes.Tuple | jinja2.nodes.Dict):
        return child if getattr(child, "ctx", "load") == "store" else _filtered(child, measured)
    if isinstance(child, jinja2.nodes.Concat):
        return _filtered(jinja2.nodes.List(child.nodes, lineno=child.lineno), _joined)
    return child


def _filtered(node: Any, check: Callable[..., Any]) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, f"_surefoot_{check.__name__}", [], [], None, None, lineno=node.lineno)


def _in_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Call a filter as jinja does. Filters that take the context are never evaluated at compile time."""

    @jinja2.pass_context
    def filter_(_: jinja2.runtime.Context, value: Any) -> Any:
        return function(value)

    return filter_
