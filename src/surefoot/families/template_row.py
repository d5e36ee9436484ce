"""What a named template consists of: the words around every text of a conversation.

Plain text, so that planning, encoding and the docs read one table. Slots: {content} is the text; {bos} and {eos} are
the tokenizer's own tokens; {alone} writes nothing: what follows is a text of its own for the tokenizer. Whether BOS
stands at the very start is the plan's choice, not the row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from surefoot.families.tool_layouts import HERMES, ToolLayout

ALONE = "{alone}"


@dataclass(frozen=True)
class Dialogue:
    """A template for any number of turns.

    user, system: around the text. merged: the system text stands inside the first user turn, before its text.
    prefix: {bos} where the published template writes it as text: some tokenizers put a blank before a text, but none
    behind BOS. opening: what the program writes before an answer. lead: what the model writes before its text, left out
    where the text holds `own_lead`. close: ends an answer, and is learned. after, between, finish: written by the
    program behind an answer, before every user turn but the first, behind the last answer. trimmed: roles whose texts
    lose blanks around them. control: tokens that the tokenizer must have as special ones. stops: those of them that end
    an answer, besides EOS. tools: None where it has no place for them. takes_text: a text without turns is learned as
    it is.
    """

    name: str
    about: str
    user: str
    opening: str
    close: str
    system: str
    merged: bool = False
    default_system: str = ""
    prefix: str = ""
    lead: str = ""
    own_lead: str = ""
    after: str = ""
    between: str = ""
    finish: str = ""
    trimmed: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    tools: ToolLayout | None = HERMES
    takes_text: bool = False


@dataclass(frozen=True)
class Prompt:
    """A template for one prompt and one answer. header: what it begins with; header_input: where there is an input
    (context) as well. A system text takes the header's place where that is allowed. EOS ends the answer."""

    name: str
    about: str
    header: str
    header_input: str
    instruction: str
    input: str
    response: str
    system_as_header: bool = False
    lead: str = ""
    control: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()


Row = Dialogue | Prompt


def filled_row(row: Dialogue, slots: Mapping[str, str]) -> Dialogue:
    """The row with these texts in its slots."""
    texts = {field.name: getattr(row, field.name) for field in fields(row)}
    changed = {name: text for name, text in texts.items() if isinstance(text, str)}
    for slot, text in slots.items():
        changed = {name: words.replace(slot, text) for name, words in changed.items()}
    return replace(row, **changed)


def as_one_text(row: Dialogue) -> Dialogue:
    """For programs that render one text and tokenise it: where it is cut for the tokenizer cannot be said there."""
    return filled_row(row, {ALONE: ""})
