"""What one rendering of a chat template may take, and the checks that take from it.

Most of what a template computes is one call into C that nothing can stop, so what goes in is measured first: `step`
counts and looks at the clock, `bounded` looks at one length, `measured` at everything inside a value, `small` at a
number, `pay` at the work of a search that may take one length times the other.

A chat template is code from a stranger: jinja's sandbox, with limits on how long and how much it may write.

Jinja's own sandbox keeps a template away from Python, but not from looping or growing without end. Here every turn of a
loop and every call of a macro, a method or a filter is taken from one budget, which lies outside the template's names.
What makes text is checked before the text is there (products, `~`, join, replace, printed lists) or bounded by the size
of what goes in; what goes through a value (comparing, hashing, sorting, printing) is let at it once its size is known;
whole numbers stay small; and of methods only those are offered whose time is known. The last net is a limit on
computing time, looked at in every counted step. The limits are for mistakes and for plain malice; a process that must
withstand more needs limits of its own.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

STEPS = 1_000_000  # of one rendering; a conversation of a thousand turns takes some tens of thousands
CHARACTERS = 20_000_000  # of one rendering, or of one value: ten times the longest context that models have
MADE = 2_000_000_000  # bytes of all values of one rendering together: a template may build its text turn by turn
ITEM_BYTES = 64  # of what a list holds, about: numbers and short texts
ITEMS = 1_000_000  # of one list, and of everything inside one value that is printed, compared or looked up
LEVELS = 200  # of lists in lists: Python hashes a tuple by recursion, without a check of its stack
SEARCHED = 500_000_000  # characters times characters, of all searches backwards and strips of one rendering
SECONDS = 10.0  # of computing, by this thread's clock: a busy machine refuses nothing
WHOLE = sys.hash_info.modulus  # whole numbers below it differ in their hash, so no dict of them grows slow

_CONTAINERS = (list, tuple, dict, set, KeysView, ItemsView, ValuesView)
# What hands out values by its attributes, so that its size is no matter of what it holds now.
_HOLDERS = (jinja2.utils.Namespace, jinja2.utils.Cycler, jinja2.utils.Joiner, jinja2.runtime.LoopContext)


@dataclass
class Budget:
    """What one rendering has left."""

    steps: int = field(default_factory=lambda: STEPS)
    printed: int = field(default_factory=lambda: CHARACTERS)
    made: int = field(default_factory=lambda: MADE)
    searched: int = field(default_factory=lambda: SEARCHED)
    until: float = field(default_factory=lambda: time.thread_time() + SECONDS)


BUDGET: ContextVar[Budget] = ContextVar("budget of the rendering")


def step() -> None:
    budget = BUDGET.get()
    budget.steps -= 1
    if budget.steps < 0:
        raise jinja2.TemplateError(f"it has taken {STEPS:,} steps and is stopped")
    if time.thread_time() > budget.until:
        raise jinja2.TemplateError(f"it has computed for {SECONDS:g} seconds and is stopped")


def counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        step()
        yield item


def written(text: str) -> str:
    budget = BUDGET.get()
    budget.printed -= len(text)
    if budget.printed < 0:
        too_long()
    return text


def joined(values: Sequence[Any]) -> str:
    if sum(len(value) if isinstance(value, str) else _size(value) for value in values) > CHARACTERS:
        too_long()
    return bounded("".join(map(str, values)))


def bounded(value: Any) -> Any:
    """The value, unless it is too long; it is also taken from what may be made in all, for a template may keep it."""
    if isinstance(value, str):
        length = len(value)
        if length > CHARACTERS:
            too_long()
        charge(sys.getsizeof(value))
        if length > ITEMS:  # makes time pass outside of loops
            step()
    elif isinstance(value, list | tuple | dict):
        if len(value) > ITEMS:
            too_many()
        charge(sys.getsizeof(value) + ITEM_BYTES * len(value))
        if len(value) > ITEMS // 1000:
            step()
    return value


def charge(size: int) -> None:
    """size: bytes that were made."""
    budget = BUDGET.get()
    budget.made -= size
    if budget.made < 0:
        raise jinja2.TemplateError(f"it makes more than {MADE // 10**9} GB of texts and lists and is stopped")


def measured(value: Any) -> Any:
    """The value, unless what is inside it is too much: lists that hold one list twice grow by the power."""
    if isinstance(value, _CONTAINERS):
        _size(value)
    elif isinstance(value, str) and len(value) > ITEMS:
        step()
    return value


def looked_into(value: Any) -> Any:
    """The same for what goes through a value: an iterator's items are measured, too, as a list."""
    return measured(list(counted(value)) if isinstance(value, Iterator) else value)


def small(number: Any) -> Any:
    """The value, unless it is a whole number that templates have no use for."""
    if isinstance(number, int) and abs(number) >= WHOLE:
        raise jinja2.TemplateError(f"it makes a number without end (above {WHOLE:,}) and is stopped")
    return number


def pay(text: str, *others: Any) -> None:
    """For an operation on text that goes through each of the others at every character."""
    longest = max((len(other) for other in others if isinstance(other, str)), default=0)
    budget = BUDGET.get()
    budget.searched -= len(text) * longest
    if budget.searched < 0:
        raise jinja2.TemplateError(f"it compares more than {SEARCHED:,} characters and is stopped")


def _size(value: Any) -> int:
    """About as many characters as it takes to print the value. Goes level by level, so depth costs no stack."""
    characters = items = 0
    level = [value]
    for _ in range(LEVELS):
        below: list[Any] = []
        for one in level:
            characters += len(one) if isinstance(one, str) else 2
            if isinstance(one, _CONTAINERS):
                items += len(one)
                if items > ITEMS:
                    too_many()
                if isinstance(one, dict):
                    below += one.keys()
                    below += one.values()
                else:
                    below += one
            elif isinstance(one, _HOLDERS):
                raise jinja2.TemplateError(f"a {type(one).__name__.strip('_')} inside a list is not offered")
        if characters > CHARACTERS:
            too_long()
        if not below:
            if items > ITEMS // 1000:
                step()
            return characters
        level = below
    raise jinja2.TemplateError(f"it makes a list of more than {LEVELS} levels and is stopped")


def too_long() -> None:
    raise jinja2.TemplateError(f"it writes more than {CHARACTERS:,} characters and is stopped")


def too_many() -> None:
    raise jinja2.TemplateError(f"it makes a list of more than {ITEMS:,} items and is stopped")


# Filters that grow without a bound of their own, or print at random.
_NOT_OFFERED = """
batch center filesizeformat format indent pprint random slice striptags urlize wordwrap xmlattr
"""
# Methods of texts that take no longer than the texts are long, or are paid for.
_OF_TEXTS = """
capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric
isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex
rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
# Those of them that look at every character for their argument anew (CPython searches forwards in linear time only).
_PAID = """
lstrip rfind rindex rpartition rsplit rstrip strip
"""
_OF_DICTS = """
copy get items keys values
"""
_OF_NUMBERS = """
is_integer
"""
# Filters that go through a value to its innermost parts.
_LOOK_INSIDE = """
dictsort escape e forceescape groupby join max min replace sort string sum title tojson unique urlencode
"""
# Tests that do, and those that compute with a number (and would format a text).
_COMPARE = """
eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in lower upper filter test
"""
_COMPUTE = """
divisibleby even odd
"""
_MAKES_NUMBERS = """
abs int round sum
"""
_LONGEST_NUMBER = 100  # digits of a text that becomes a number
_LITERALS = (jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Dict)
_OF_JINJA = ("_loop_vars", "_block_vars")  # what jinja adds to the arguments of every call


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the limits. Use `render_limited`; a template's own `render` has no budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **settings: Any):
        super().__init__(finalize=_printed, **settings)
        offered = {name: filter_ for name, filter_ in self.filters.items() if name not in _NOT_OFFERED.split()}
        self.filters = {name: limited_filter(name, filter_) for name, filter_ in offered.items()}
        self.filters |= {f"_surefoot_{inner.__name__}": _takes_context(inner) for inner in _INNER}
        self.tests |= {name: _limited_test(self.tests[name], measured) for name in _COMPARE.split()}
        self.tests |= {name: _limited_test(self.tests[name], _number) for name in _COMPUTE.split()}

    def _generate(self, source: jinja2.nodes.Template, *place: Any, **settings: Any) -> str:
        """jinja's hook between parsing and compiling."""
        _limit(source)
        source.set_environment(self)
        return super()._generate(source, *place, **settings)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        offered = next((names.split() for kinds, names in _OFFERED if isinstance(obj, kinds)), None)
        return super().is_safe_attribute(obj, attr, value) and (offered is None or attr in offered)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Macros, methods, functions and, where a loop is recursive, the loop."""
        step()
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = tuple(counted(argument) for argument in args)
        elif not isinstance(__obj, jinja2.runtime.Macro):
            named = [value for name, value in kwargs.items() if name not in _OF_JINJA]
            for argument in (*args, *named):
                measured(argument)
            args = _checked_method(__obj, args, named)
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(made, list | tuple) and isinstance(parted := getattr(__obj, "__self__", None), str):
            charge(sys.getsizeof(parted))  # its pieces are new texts, together as long as it
        return bounded(made)

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The tests of select and reject."""
        step()
        return super().call_test(name, value, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError(f"{operator} is not offered to chat templates")
        if isinstance(left, _VIEWS) or isinstance(right, _VIEWS):
            raise jinja2.TemplateError(f"{operator} takes no keys, values or items of a dict")
        small(left)
        small(right)
        if operator == "*":
            _check_product(left, right)
        return small(bounded(self.binop_table[operator](left, right)))


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its step, and checks of what goes in and what comes out."""
    inside_too, guard, first = name in _LOOK_INSIDE.split(), _GUARDS.get(name), _given_first(function)
    checked = small if name in _MAKES_NUMBERS.split() else bounded

    @jinja2.pass_context
    @functools.wraps(function, updated=())
    def limited(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        step()
        if inside_too:
            value = looked_into(value)
        for argument in (*args, *kwargs.values()):
            measured(argument)
        if guard is not None:
            value = guard(value, *args, **kwargs)
        return checked(function(*first(context), value, *args, **kwargs))

    return limited


def _limited_test(function: Callable[..., Any], check: Callable[[Any], Any]) -> Callable[..., Any]:
    """The test, with a check of what it is given."""
    first = _given_first(function)

    @jinja2.pass_context
    @functools.wraps(function, updated=())
    def limited(context: jinja2.runtime.Context, *values: Any) -> Any:
        for value in values:
            check(value)
        return function(*first(context), *values)

    return limited


def _given_first(function: Callable[..., Any]) -> Callable[[jinja2.runtime.Context], tuple[Any, ...]]:
    """What jinja gives the filter or test before its value, as it is marked."""
    wants = getattr(function, "jinja_pass_arg", None)
    return {None: lambda _: (), "context": lambda own: (own,), "eval_context": lambda own: (own.eval_ctx,)}.get(
        wants and wants.name, lambda own: (own.environment,)
    )


def render_limited(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text. Raises jinja2.TemplateError at a limit, and whatever else the template raises."""
    token = BUDGET.set(Budget())
    try:
        return "".join(template.root_render_func(template.new_context(variables)))
    except Exception:
        template.environment.handle_exception()  # raises it again, with the template's lines in its trace
    finally:
        BUDGET.reset(token)


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
    if isinstance(child, _LITERALS) and getattr(child, "ctx", "load") == "load":
        return _filtered(child, "bounded")
    if isinstance(child, jinja2.nodes.Concat):
        return _filtered(jinja2.nodes.List(child.nodes, lineno=child.lineno), "joined")
    if isinstance(child, jinja2.nodes.Getitem) and isinstance(child.arg, jinja2.nodes.Slice):
        return _filtered(child, "bounded")
    if isinstance(child, jinja2.nodes.Getitem):
        child.arg = _looked_up(child.arg)
    elif isinstance(child, jinja2.nodes.Pair):
        child.key = _looked_up(child.key)
    elif isinstance(child, jinja2.nodes.Const):
        try:
            small(child.value)
        except jinja2.TemplateError as error:
            raise jinja2.TemplateSyntaxError(str(error), child.lineno) from None
    elif isinstance(child, jinja2.nodes.Compare | jinja2.nodes.Operand):
        child.expr = _filtered(child.expr, "measured")
    return child


def _looked_up(key: Any) -> Any:
    """The key of a dict, measured before it is hashed."""
    return key if isinstance(key, jinja2.nodes.Const) else _filtered(key, "measured")


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
    return written(value if isinstance(value, str) else str(measured(value)))


def _check_product(left: Any, right: Any) -> None:
    for many, number in ((left, right), (right, left)):
        if isinstance(many, str) and isinstance(number, int) and len(many) * number > CHARACTERS:
            too_long()
        if isinstance(many, list | tuple) and isinstance(number, int) and len(many) * number > ITEMS:
            too_many()


def _checked_method(method: Any, args: tuple[Any, ...], named: list[Any]) -> tuple[Any, ...]:
    """The arguments of a method of a text or list, checked before it is called."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, list | tuple):  # index and count compare with everything in it
        measured(owner)
    elif isinstance(owner, str) and name in _PAID.split():
        pay(owner, *args, *named)
    elif isinstance(owner, str) and name == "replace" and len(args) > 1:
        _check_replace(owner, *args)
    elif isinstance(owner, str) and name == "join" and args:
        return (_check_join(args[0], owner), *args[1:])
    return args


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> Any:
    text, old, new = str(text), str(old), str(new)
    if len(text) + text.count(old) * max(0, len(new) - len(old)) > CHARACTERS:
        too_long()
    return text


def _check_join(items: Any, d: Any = "", attribute: Any = None) -> Any:
    items = list(counted(items))
    if len(str(d)) * len(items) > CHARACTERS:
        too_long()
    return measured(items)


def _check_round(number: Any, precision: Any = 0, method: Any = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise jinja2.TemplateError(f"it rounds to {precision} digits")
    return number


def _check_sum(items: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("sum adds numbers only")
    return items


def _check_int(value: Any, default: Any = 0, base: Any = 10) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
        raise jinja2.TemplateError(f"it makes a number of more than {_LONGEST_NUMBER} digits")
    return value


def _check_trim(value: Any, chars: Any = None) -> Any:
    text = str(value)
    pay(text, chars)
    return text


def _number(value: Any) -> None:
    if isinstance(value, str):
        raise jinja2.TemplateError("a text is no number")
    small(value)


_VIEWS = (KeysView, ItemsView, ValuesView)
_OFFERED = ((str, _OF_TEXTS), (dict, _OF_DICTS), (int | float, _OF_NUMBERS), (_VIEWS, ""))
_GUARDS = {
    "replace": _check_replace,
    "join": _check_join,
    "round": _check_round,
    "sum": _check_sum,
    "int": _check_int,
    "trim": _check_trim,
}
_INNER = (counted, bounded, measured, joined, written)
