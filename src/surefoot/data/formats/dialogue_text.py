"""Dialogues written as one text, as Anthropic's hh-rlhf and DeepSpeed-Chat's data sets have them.

    \n\nHuman: What is a fjord?\n\nAssistant: A long, narrow inlet of the sea.

They become turns, so that any template can lay them out; the words Human and Assistant are left behind. What stands
before the first turn is a system text. Neighbouring turns of one speaker are one turn with a blank line in it, because
the layout has no way to tell them from a text that holds the marks itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.data.formats.conversation import Turn
from surefoot.data.formats.fields import RowFault

_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether both speakers have their marks in it."""
    return set(_MARK.findall(text)) == set(_SPEAKERS)


def is_open_dialogue(text: str) -> bool:
    """Whether it ends where the assistant begins to write."""
    return is_dialogue(text) and text.rstrip().endswith("\n\nAssistant:")


def read_dialogue_text(text: str, name: str) -> list[Turn]:
    """Its turns, each without blanks around it; an answer may be empty. name: the field, for RowFaults."""
    parts = _MARK.split(text)
    turns = [Turn("system", parts[0].strip())] if parts[0].strip() else []
    for speaker, words in zip(parts[1::2], parts[2::2], strict=True):
        role, content = _SPEAKERS[speaker], words.strip()
        if turns and turns[-1].role == role:
            turns[-1] = Turn(role, "\n\n".join(part for part in (turns[-1].content, content) if part))
        else:
            turns.append(Turn(role, content))
    if not any(turn.role == "user" and turn.content for turn in turns):
        raise RowFault(f"{name!r} has no turn in which a human says something")
    return turns


def read_opening_text(text: str, name: str) -> list[Turn]:
    """The turns of a dialogue up to where the assistant begins to write; of another text one turn of the user's."""
    if not is_open_dialogue(text):
        return [Turn("user", text)]
    return read_dialogue_text(text, name)[:-1]


def split_last_answers(better: str, worse: str) -> tuple[str, str, str]:
    """Of two dialogues what both begin with, up to the last `\\n\\nAssistant:` in it, and how each goes on."""
    shared = _shared(better, worse)
    marks = [found for found in _MARK.finditer(better, 0, shared) if found[1] == "Assistant"]
    if not marks:
        raise RowFault(
            "the dialogues in 'chosen' and 'rejected' have no beginning in common that an answer could follow",
            "a pair is two answers to the same prompt",
        )
    end = marks[-1].end()
    return better[:end], better[end:], worse[end:]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)
