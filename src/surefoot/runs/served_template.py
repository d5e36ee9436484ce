"""Which row of the named templates a model is asked with, so that other programs can be told in their own words.

A run on a named template says so. The tokenizer's own template is a program in Jinja: it is known again by what it
writes. Where a row writes the same for every conversation tried, with and without a system text, the row stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.segments import Template, prompt_ids
from surefoot.data.templates import make_template
from surefoot.data.text_encoder import TextEncoder
from surefoot.families.template_row import Dialogue, Row, as_one_text
from surefoot.families.templates import ROWS, find_row
from surefoot.system.errors import InputError

_SYSTEM, _ASK = Turn("system", "Be brief."), Turn("user", "What is a heron?")
_MORE = (Turn("assistant", "A bird."), Turn("user", "And a trout?"))
_TRIED = ((_ASK,), (_SYSTEM, _ASK), (_ASK, *_MORE), (_SYSTEM, _ASK, *_MORE))


def served_row(template: Template, encoder: TextEncoder, stop_ids: Sequence[int]) -> tuple[Row | None, str]:
    """The row, or None and why not, as a sentence."""
    row = find_row(template.name)
    if row is not None:
        return (as_one_text(row) if isinstance(row, Dialogue) else row), ""
    wanted = _written(template, encoder)
    if wanted is None:
        return None, "the model's chat template cannot write a system text and two questions"
    for candidate in ROWS:
        if isinstance(candidate, Dialogue) and _same(candidate, wanted, encoder, stop_ids):
            return candidate, ""
    return None, "the model's own chat template writes something else than every template that surefoot knows by name"


def _same(row: Dialogue, wanted: list[list[int]], encoder: TextEncoder, stop_ids: Sequence[int]) -> bool:
    try:
        return _written(make_template(row.name, encoder, stop_ids), encoder) == wanted
    except InputError:  # the tokenizer lacks a token that the row needs
        return False


def _written(template: Template, encoder: TextEncoder) -> list[list[int]] | None:
    try:
        return [prompt_ids(Conversation(turns), template, encoder, None) for turns in _TRIED]
    except RowFault:
        return None
