"""A chat template is code from a stranger: jinja's sandbox, with limits on how long and how much it may write.

Jinja's own sandbox keeps a template away from Python, but not from looping or growing without end. Here every step of
a loop and every call of a macro is taken from one budget, and no text may outgrow a limit, whichever way it is put
together: printed, added, multiplied, concatenated, returned or captured by a block. An exhausted budget takes about a
second. The limits are for mistakes and for plain malice; a process that must withstand more needs limits of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

STEPS = 1_000_000  # of all loops of one rendering; a conversation of a thousand turns takes a few thousand
CHARACTERS = 20_000_000  # of one rendering or one value: ten times the longest context that models have
_COUNTER = "_surefoot_steps"
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"})  # up to any width


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the limits. Use `render_limited`; a template's own `render` has no budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name in ("center", "format", "indent", "wordwrap"):
            del self.filters[name]
        self.filters |= {"_surefoot_counted": _counted, "_surefoot_call": _call, "_surefoot_bounded": _bounded}

    def _generate(self, source: jinja2.nodes.Template, *place: Any, **settings: Any) -> str:
        """jinja's hook between parsing and compiling."""
        _limit(source)
        source.set_environment(self)
        return super()._generate(source, *place, **settings)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError(f"{operator} is not offered to chat templates")
        if operator == "*":
            for text, number in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(number, int):
                    _check(len(text) * number)
        return _bounded(super().call_binop(context, operator, left, right))


def render_limited(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text. Raises jinja2.TemplateError at a limit, and whatever else the template raises."""
    parts: list[str] = []
    written = 0
    try:
        for part in template.root_render_func(template.new_context({**variables, _COUNTER: [STEPS]})):
            written += len(part)
            _check(written)
            parts.append(part)
    except Exception:
        template.environment.handle_exception()  # raises it again, with the template's lines in its trace
    return "".join(parts)


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
        node.iter = _filtered(node.iter, "_surefoot_counted")
    elif isinstance(node, jinja2.nodes.AssignBlock):
        node.filter = _filtered(node.filter, "_surefoot_bounded")
    elif isinstance(node, jinja2.nodes.Macro | jinja2.nodes.CallBlock):
        step = _filtered(jinja2.nodes.Const(""), "_surefoot_call")
        node.body.insert(0, jinja2.nodes.Output([step], lineno=node.lineno))


def _limited(child: Any) -> Any:
    if isinstance(child, jinja2.nodes.Node):
        _limit(child)
    if isinstance(child, jinja2.nodes.Concat) or type(child) is jinja2.nodes.Call:
        return _filtered(child, "_surefoot_bounded")
    return child


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno if node else 1)


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step(context)
        yield item


@jinja2.pass_context
def _call(context: jinja2.runtime.Context, text: str) -> str:
    _step(context)
    return text


def _step(context: jinja2.runtime.Context) -> None:
    counter = context[_COUNTER]
    counter[0] -= 1
    if counter[0] < 0:
        raise jinja2.TemplateError(f"it has taken {STEPS:,} steps and is stopped")


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        _check(len(value))
    return value


def _check(characters: int) -> None:
    if characters > CHARACTERS:
        raise jinja2.TemplateError(f"it writes more than {CHARACTERS:,} characters and is stopped")
