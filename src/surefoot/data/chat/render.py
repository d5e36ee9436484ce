"""Render a chat template: make the messages that templates expect from a conversation, and render them to text.

A template is untrusted code: it runs in jinja's sandbox, within the limits of `surefoot.data.chat.sandbox`. The
environment has only what templates on the hub use (trimmed blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, `{% generation %}`). `strftime_now` returns a constant; otherwise token ids would depend on the date,
and a resumed run would differ.

Tool calls get ids, because some templates (Mistral's) print them: nine-digit numbers that count the calls of the
conversation, independent of the ids in the data.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from surefoot.data.chat.sandbox import LimitedEnvironment, limited, render_limited
from surefoot.data.formats import IMAGE, RowFault, Turn
from surefoot.data.formats.conversation import pair_results

Parts = Literal["never", "pictures", "always"]
TODAY = datetime(2024, 7, 26)  # the default date of Llama 3's template
PRINTS_DATE = "strftime_now"  # a template that contains this name may print the date
_LONGEST_DATE = 1000  # characters of its form
_WIDEST_INDENT = 16  # one per level of nesting, in a part of the JSON


class TemplateFault(RowFault):
    """Raised when the template fails.

    line: of its source, from 1.
    problem: what is wrong there, without the line.
    """

    def __init__(self, line: int, verb: str, problem: str):
        super().__init__(f"the chat template{verb.format(line)}: {problem}")
        self.line, self.problem = line, problem


def render(
    source: str,
    turns: Sequence[Turn],
    tokens: Mapping[str, Any],
    generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    parts: Parts = "never",
) -> str:
    """Render the turns to text.

    tokens: names such as bos_token and their text, and values of other variables.
    tools: definitions in OpenAI's format.
    parts: which contents are lists of parts, as templates of vision-language models expect; others are texts, with
        U+FDD0 for a picture.

    Raises TemplateFault with the template's line for every error in it.
    """
    variables = {
        "documents": None,
        **tokens,
        "messages": messages(turns, parts),
        "add_generation_prompt": generation_prompt,
        "tools": [dict(tool) for tool in tools] or None,
    }
    try:
        return render_limited(_compile(source), variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(error.lineno, " has a syntax error in line {}", error.message or "syntax error") from None
    except Exception as error:  # any exception in untrusted code is the template's fault
        what = str(error) or type(error).__name__
        raise TemplateFault(_line(error), " fails in line {}", what) from None


def _line(error: Exception) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines and lines[-1] else 1


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    # Random choices would give other token ids at each start.
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _today,
        "namespace": _Namespace,
    }
    environment.filters["tojson"] = limited("tojson", _to_json)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None, **how: Any) -> str:
    """Replace jinja's own filter, which escapes for HTML."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _WIDEST_INDENT:
        raise jinja2.TemplateError(f"an indent of {width:,} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _today(form: str) -> str:
    if len(form) > _LONGEST_DATE:
        raise jinja2.TemplateError(f"a date of more than {_LONGEST_DATE} characters")
    return TODAY.strftime(form)


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace, without names that give access to Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.TemplateError(f"a namespace has no name {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """A short text, because namespaces can contain each other."""
        return "<Namespace>"


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks answers for other tools; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def call_ids(turns: Sequence[Turn]) -> list[tuple[str, ...]]:
    """Return for each turn the ids of its calls, or for a tool's result the id of its call ("" if there is none)."""
    found: list[tuple[str, ...]] = []
    count, latest = 0, ()
    for turn, call in zip(turns, pair_results(turns), strict=True):
        if turn.role == "tool":
            found.append(("" if call is None else latest[call],))
            continue
        latest = tuple(f"{count + number:09d}" for number in range(len(turn.calls)))
        count += len(latest)
        found.append(latest)
    return found


def messages(turns: Sequence[Turn], parts: Parts = "never") -> list[dict[str, Any]]:
    """Make one message per turn. `tool_calls` is set only if there are calls: templates test whether it is defined.

    parts: as in `render`.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for turn, ids in zip(turns, call_ids(turns), strict=True):
        listed = parts == "always" or (parts == "pictures" and IMAGE in turn.text)
        message: dict[str, Any] = {"role": turn.role, "content": _parts(turn.text) if listed else turn.text}
        if turn.thought:
            message |= {"reasoning_content": turn.thought, "thinking": turn.thought}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "id": own, "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for own, call in zip(ids, turn.calls, strict=True)
            ]
            names |= {own: call.name for own, call in zip(ids, turn.calls, strict=True)}
        if turn.role == "tool" and ids[0]:
            message |= {"tool_call_id": ids[0], "name": names[ids[0]]}
        made.append(message)
    return made


def _parts(text: str) -> list[dict[str, str]]:
    """The texts and pictures of a content, in order."""
    found: list[dict[str, str]] = []
    for number, part in enumerate(text.split(IMAGE)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": part}] if part else []
    return found or [{"type": "text", "text": ""}]


def contents_between(pieces: Sequence[str], texts: Sequence[str], rendered: str) -> list[str] | None:
    """Return each text as rendered between the pieces: unchanged or stripped. None if it is neither."""
    found: list[str] = []
    position = len(pieces[0]) if rendered.startswith(pieces[0]) else -1
    for text, after in zip(texts, pieces[1:], strict=True):
        forms = (text, text.strip(), text.lstrip(), text.rstrip())
        form = next((form for form in forms if position >= 0 and rendered.startswith(form + after, position)), None)
        if form is None:
            return None
        found.append(form)
        position += len(form) + len(after)
    return found if position == len(rendered) else None
