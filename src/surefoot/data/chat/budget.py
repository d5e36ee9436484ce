"""What one rendering of a chat template may take, and the checks that take from it.

Most of what a template computes is one call into C that nothing can stop, so what goes in is measured first: `step`
counts and looks at the clock, `bounded` looks at one length, `measured` at everything inside a value, `small` at a
number, `pay` at the work of a search that may take one length times the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.runtime
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
