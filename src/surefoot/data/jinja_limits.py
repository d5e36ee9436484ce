"""A chat template is code from a stranger: jinja's sandbox, with limits on how long and how much it may write.

Jinja's own sandbox keeps a template away from Python, but not from looping or growing without end. Here every turn of a
loop and every call of a macro, a method or a filter is taken from one budget, which lies outside the template's names.
What makes text is checked before the text is there (products, `~`, join, replace, printed lists) or bounded by the size
of what goes in; filters that grow in other ways are not offered. The last net is a limit on computing time, looked at
in every counted step. The limits are for mistakes and for plain malice; a process that must withstand more needs limits
of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

STEPS = 1_000_000  # of one rendering; a conversation of a thousand turns takes some tens of thousands
CHARACTERS = 20_000_000  # of one rendering, or of one value: ten times the longest context that models have
MADE = 100 * CHARACTERS  # of all values of one rendering together: a template may build its text turn by turn
ITEMS = 1_000_000  # of one list, and of everything inside one value that is printed or compared
SECONDS = 10.0  # of computing, by this thread's clock: a busy machine refuses nothing
_DIGITS = 10_000  # bits of a product of whole numbers

# Filters that grow without a bound of their own, or print at random.
_NOT_OFFERED = """
batch center filesizeformat format indent pprint random slice striptags urlize wordwrap xmlattr
"""
# Methods of texts and numbers whose result no size of what goes in bounds.
_GROWING = """
center ljust rjust zfill expandtabs format format_map translate encode to_bytes
"""
# Filters that go through a value to its innermost parts.
_LOOK_INSIDE = """
dictsort escape e forceescape groupby join max min replace sort string sum title tojson unique urlencode
"""
_COMPARE = """
eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in
"""
_CONTAINERS = (list, tuple, dict, set, KeysView, ItemsView, ValuesView)


@dataclass
class _Budget:
    """What one rendering has left."""

    steps: int
    printed: int = field(default_factory=lambda: CHARACTERS)
    made: int = field(default_factory=lambda: MADE)
    until: float = field(default_factory=lambda: time.thread_time() + SECONDS)


_BUDGET: ContextVar[_Budget] = ContextVar("budget of the rendering")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the limits. Use `render_limited`; a template's own `render` has no budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **settings: Any):
        super().__init__(finalize=_printed, **settings)
        offered = {name: filter_ for name, filter_ in self.filters.items() if name not in _NOT_OFFERED.split()}
        self.filters = {name: limited_filter(name, filter_) for name, filter_ in offered.items()}
        self.filters |= {f"_surefoot_{inner.__name__[1:]}": _takes_context(inner) for inner in _INNER}

    def _generate(self, source: jinja2.nodes.Template, *place: Any, **settings: Any) -> str:
        """jinja's hook between parsing and compiling."""
        _limit(source)
        source.set_environment(self)
        return super()._generate(source, *place, **settings)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (
            isinstance(obj, str | int) and attr in _GROWING.split()
        )

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Macros, methods, functions and, where a loop is recursive, the loop."""
        _step()
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = tuple(_counted(argument) for argument in args)
        elif not isinstance(__obj, jinja2.runtime.Macro):
            for argument in (*args, *kwargs.values()):
                _measured(argument)
            args = _checked_method(__obj, args)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The tests of select and reject."""
        _step()
        return super().call_test(name, _measured(value), *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError(f"{operator} is not offered to chat templates")
        if operator == "*":
            _check_product(left, right)
        return _bounded(self.binop_table[operator](left, right))


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its step, and checks of what goes in and what comes out."""
    wants = getattr(function, "jinja_pass_arg", None)  # how jinja marks what a filter is given first

    inside_too, guard = name in _LOOK_INSIDE.split(), _GUARDS.get(name)
    first = {None: lambda _: (), "context": lambda own: (own,), "eval_context": lambda own: (own.eval_ctx,)}.get(
        wants and wants.name, lambda own: (own.environment,)
    )

    @jinja2.pass_context
    @functools.wraps(function, updated=())
    def limited(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        _step()
        for inside in (value, *args, *kwargs.values()) if inside_too else ():
            _measured(inside)
        if guard is not None:
            value = guard(value, *args, **kwargs)
        return _bounded(function(*first(context), value, *args, **kwargs))

    return limited


def render_limited(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text. Raises jinja2.TemplateError at a limit, and whatever else the template raises."""
    token = _BUDGET.set(_Budget(STEPS))
    try:
        return "".join(template.root_render_func(template.new_context(variables)))
    except Exception:
        template.environment.handle_exception()  # raises it again, with the template's lines in its trace
    finally:
        _BUDGET.reset(token)


def _limit(node: jinja2.nodes.Node) -> None:
    """Put a check around everything below this node that takes time or makes text."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_limited(child) for child in value]
        elif isinstance(node, jinja2.nodes.CallBlock) and name == "call":
            _limit(value)  # a call block hands its own body to this call, so it must stay one
        elif isinstance(value, jinja2.nodes.Node):
            setattr(node, name, _limited(value))
    if isinstance(node, jinja2.nodes.For):
        node.iter = _filtered(node.iter, "counted")
    elif isinstance(node, jinja2.nodes.AssignBlock):
        node.filter = _filtered(node.filter, "bounded")
    elif isinstance(node, jinja2.nodes.FilterBlock):
        node.filter = _filtered(node.filter, "written")


def _limited(child: Any) -> Any:
    if isinstance(child, jinja2.nodes.Node):
        _limit(child)
    if isinstance(child, jinja2.nodes.TemplateData):  # so that it is counted where it is printed
        return jinja2.nodes.Const(child.data, lineno=child.lineno)
    if isinstance(child, jinja2.nodes.Concat):
        return _filtered(jinja2.nodes.List(child.nodes, lineno=child.lineno), "joined")
    if isinstance(child, jinja2.nodes.Getitem) and isinstance(child.arg, jinja2.nodes.Slice):
        return _filtered(child, "bounded")
    if isinstance(child, jinja2.nodes.Compare | jinja2.nodes.Operand):
        child.expr = _filtered(child.expr, "measured")
    elif isinstance(child, jinja2.nodes.Test) and child.name in _COMPARE.split():
        child.node = _filtered(child.node, "measured")
        child.args[:] = [_filtered(argument, "measured") for argument in child.args]
    return child


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, f"_surefoot_{name}", [], [], None, None, lineno=node.lineno if node else 1)


def _takes_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """What takes the context is never tried out while the template is compiled."""

    @jinja2.pass_context
    def filter_(_: jinja2.runtime.Context, value: Any) -> Any:
        return function(value)

    return filter_


@jinja2.pass_context
def _printed(_: jinja2.runtime.Context, value: Any) -> Any:
    """Everything that is printed comes by here; inside a macro or a block, once for each of them."""
    return _written(value if isinstance(value, str) else str(_measured(value)))


def _written(text: str) -> str:
    budget = _BUDGET.get()
    budget.printed -= len(text)
    if budget.printed < 0:
        _too_long()
    return text


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _joined(values: Sequence[Any]) -> str:
    if sum(len(value) if isinstance(value, str) else _size(value) for value in values) > CHARACTERS:
        _too_long()
    return _bounded("".join(map(str, values)))


def _step() -> None:
    budget = _BUDGET.get()
    budget.steps -= 1
    if budget.steps < 0:
        raise jinja2.TemplateError(f"it has taken {STEPS:,} steps and is stopped")
    if time.thread_time() > budget.until:
        raise jinja2.TemplateError(f"it has computed for {SECONDS:g} seconds and is stopped")


def _bounded(value: Any) -> Any:
    """The value, unless it is too long; texts are also taken from what may be made in all."""
    if isinstance(value, str):
        length, budget = len(value), _BUDGET.get()
        budget.made -= length
        if length > CHARACTERS or budget.made < 0:
            _too_long()
        if length > ITEMS:  # makes time pass outside of loops
            _step()
    elif isinstance(value, list | tuple | dict) and len(value) > ITEMS:
        _too_many()
    return value


def _measured(value: Any) -> Any:
    """The value, unless what is inside it is too much: lists that hold one list twice grow by the power."""
    if isinstance(value, _CONTAINERS):
        _size(value)
    return value


def _size(value: Any) -> int:
    """About as many characters as it takes to print the value."""
    characters = items = 0
    left = [value]
    while left:
        one = left.pop()
        characters += len(one) if isinstance(one, str) else 2
        if isinstance(one, _CONTAINERS):
            items += len(one)
            if items > ITEMS:
                _too_many()
            left += [part for pair in one.items() for part in pair] if isinstance(one, dict) else one
        if characters > CHARACTERS:
            _too_long()
    if items > ITEMS // 1000:
        _step()
    return characters


def _check_product(left: Any, right: Any) -> None:
    for many, number in ((left, right), (right, left)):
        if isinstance(many, str) and isinstance(number, int) and len(many) * number > CHARACTERS:
            _too_long()
        if isinstance(many, list | tuple) and isinstance(number, int) and len(many) * number > ITEMS:
            _too_many()
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _DIGITS:
        raise jinja2.TemplateError("it makes a number without end and is stopped")


def _checked_method(method: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method of a text, checked before it is called."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(text, str) and name == "replace" and len(args) > 1:
        _check_replace(text, *args)
    elif isinstance(text, str) and name == "join" and args:
        return (_check_join(args[0], text), *args[1:])
    return args


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> Any:
    text, old, new = str(text), str(old), str(new)
    if len(text) + text.count(old) * max(0, len(new) - len(old)) > CHARACTERS:
        _too_long()
    return text


def _check_join(items: Any, d: Any = "", attribute: Any = None) -> Any:
    items = list(_counted(items))
    if len(str(d)) * len(items) > CHARACTERS:
        _too_long()
    return _measured(items)


def _check_round(number: Any, precision: Any = 0, method: Any = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise jinja2.TemplateError(f"it rounds to {precision} digits")
    return number


def _check_sum(items: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("sum adds numbers only")
    return items


_GUARDS = {"replace": _check_replace, "join": _check_join, "round": _check_round, "sum": _check_sum}
_INNER = (_counted, _bounded, _measured, _joined, _written)


def _too_long() -> None:
    raise jinja2.TemplateError(f"it writes more than {CHARACTERS:,} characters and is stopped")


def _too_many() -> None:
    raise jinja2.TemplateError(f"it makes a list of more than {ITEMS:,} items and is stopped")
