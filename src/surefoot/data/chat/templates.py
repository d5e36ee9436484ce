"""Find a template by name: the tokenizer's own, a row of the table of named templates, or a user's file.

No template writes BOS at the start: the plan decides about BOS.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.data.chat.builtin_jinja import write_dialogue, write_prompt
from surefoot.data.chat.builtin_template import lay_out_dialogue, lay_out_prompt
from surefoot.data.chat.jinja_template import make_chat_template, make_file_template
from surefoot.data.formats import Conversation, RowFault
from surefoot.data.tokenize.segments import Piece, Template, TextEncoder
from surefoot.families.files import read_text
from surefoot.families.template_row import ALONE, Prompt, PromptInTurn, Row, as_one_text, filled_row
from surefoot.families.templates import IN_CONFIG, OWN, is_jinja, is_users_own, named_row
from surefoot.system.errors import Fault, InputError

_VERSION = 2  # of the code that renders rows: runs started with another version are not resumed


def make_template(name: str, encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    """Make the template `name` for this tokenizer.

    stop_ids: tokens that end an answer, EOS first.

    Raises InputError if the name is unknown, the file is wrong, or the tokenizer lacks what the template needs.
    """
    if name == OWN:
        return make_chat_template(encoder, stop_ids)
    if is_jinja(name):
        return make_file_template(IN_CONFIG, name, encoder, stop_ids)
    if is_users_own(name):
        return make_file_template(name, read_text(Path(name)), encoder, stop_ids)
    row = named_row(name, lambda token: token in encoder.control.values())
    if isinstance(row, Fault):
        raise InputError(row)
    return _named(row, encoder, stop_ids)


def templates_to_try(planned: str, requested: bool, fallbacks: Sequence[str], *, texts: bool) -> tuple[str, ...]:
    """Return the possible templates for one source, best first.

    requested: the user named it; then it is the only one.
    texts: the records are plain texts without turns.
    """
    if requested:
        return (planned,)
    return ("plain",) if texts else (planned, *fallbacks)


def template_for_all(
    batches: Callable[[], Iterable[list[Conversation]]], encoder: TextEncoder, stop_ids: Sequence[int]
) -> str | None:
    """Return a template for any model that supports all these records, to suggest in an error.

    batches: returns all records, at each call.
    """
    for generic in ("chatml", "vicuna"):
        try:
            template = make_template(generic, encoder, stop_ids)
            for one in itertools.chain.from_iterable(batches()):
                template.segments(one)
        except (InputError, RowFault):  # a token that the tokenizer lacks, or an unsupported record
            continue
        return generic
    return None


def _named(row: Row, encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    ids = {text: number for number, text in encoder.control.items()}
    stops = tuple(dict.fromkeys((*stop_ids, *(ids[token] for token in row.stops))))
    if isinstance(row, PromptInTurn) and row.close:
        eos = row.close
    else:
        eos = _eos_text(encoder, stop_ids) if isinstance(row, Prompt) or "{eos}" in repr(row) else ""
    blank = " " if encoder.puts_blank else ""  # which the tokenizer adds before a text, but not after a BOS in it
    if isinstance(row, Prompt):
        return Template(
            row.name,
            identity=f"{_VERSION} {replace(row, about='')} {eos}",
            stop_ids=stops,
            segments=lambda conversation: lay_out_prompt(row, conversation, eos),
            jinja=lambda bos: write_prompt(
                replace(row, lead=row.lead.replace(ALONE, blank)), bos + blank if bos else "", eos
            ),
        )
    own_bos = str(encoder.tokenizer.bos_token or "")
    filled = filled_row(row, {"{eos}": eos, "{bos}": own_bos})
    joined = bool(row.prefix) and ALONE not in row.prefix  # BOS and the rest are tokenized together
    return Template(
        row.name,
        identity=f"{_VERSION} {replace(filled, about='')}",
        stop_ids=stops,
        segments=lambda conversation: lay_out_dialogue(filled, conversation),
        jinja=lambda bos: write_dialogue(as_one_text(filled), bos + ("" if joined else blank) if bos else ""),
        repeats_bos=bool(own_bos) and own_bos in filled.between + filled.user,
        learns_behind_stop=not filled.close.replace(ALONE, "").endswith((eos, *row.stops) if eos else row.stops),
    )


def _eos_text(encoder: TextEncoder, stop_ids: Sequence[int]) -> str:
    if not stop_ids:
        raise InputError(
            Fault("tokenizer", "has no end-of-sequence token, so an answer could not end", code="SF-TOKENIZER")
        )
    text = str(encoder.tokenizer.convert_ids_to_tokens(stop_ids[0]))
    if encoder.encode([Piece(text, literal=False, opening=False)]) != [[stop_ids[0]]]:
        raise InputError(
            Fault(
                "tokenizer", f"tokenizes its own end-of-sequence token {text!r} as something else", code="SF-TOKENIZER"
            )
        )
    return text
