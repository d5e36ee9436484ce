"""A chat template is code from a stranger: it is rendered in jinja's sandbox, and always to the same text.

The environment offers what templates on the hub use (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, `{% generation %}`) and nothing else. The date that some templates print is a constant: otherwise the
same data would give other token ids tomorrow, and a resumed run would not be the run that was stopped.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from surefoot.data.formats import RowFault, Turn

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's own template falls back to
PRINTS_DATE = "strftime_now"  # a template that holds this name may print the date


def render(source: str, turns: Sequence[Turn], tokens: Mapping[str, str], generation_prompt: bool) -> str:
    """The text of the turns. tokens: names such as bos_token and their text. RowFault names the template's line."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    try:
        return _compile(source).render(
            messages=messages, add_generation_prompt=generation_prompt, tools=None, documents=None, **tokens
        )
    except jinja2.TemplateSyntaxError as error:
        raise RowFault(f"the chat template's line {error.lineno} is wrong: {error.message}") from None
    except Exception as error:  # whatever a stranger's code raises is the template's fault
        what = str(error) or type(error).__name__
        raise RowFault(f"the chat template fails at its line {_line(error)}: {what}") from None


def _line(error: Exception) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines and lines[-1] else 1


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": TODAY.strftime,
        "namespace": _Namespace,
        "dict": lambda *pairs, **fields: dict(*pairs, **fields),
    }
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


class _Namespace(jinja2.utils.Namespace):
    """jinja's, without names that reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a namespace has no name {name!r}")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks an answer for others; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
