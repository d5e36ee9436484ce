"""The `preference` format: a prompt with a better and a worse answer, in all the ways in which they are published.

`chosen` and `rejected` are texts, turn objects (LLaMA-Factory's sharegpt ranking), or lists of turns (TRL). The prompt
stands in `prompt`, `conversations`, `messages` or `instruction`; or both dialogues are given as a whole, and what they
begin with in common is the prompt: turn by turn in lists, up to the last `Assistant:` in texts as hh-rlhf has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.dialogue_text import is_dialogue, read_dialogue_text, split_last_answers
from surefoot.data.formats.fields import RowFault, field, text
from surefoot.data.formats.openings import answer_turn, opening_field, opening_form, read_opening, read_turn
from surefoot.data.formats.tools import read_tools
from surefoot.data.formats.turns import check_order, read_turns
from surefoot.data.rows import kind_of

PAIR = ("chosen", "rejected")
_WHOLE_TEXTS = "Human/Assistant dialogues in 'chosen' and 'rejected', read as turns: what both begin with is the prompt"
_WHOLE_LISTS = "whole dialogues in 'chosen' and 'rejected': the turns that both begin with are the prompt"


@dataclass(frozen=True)
class Ranked:
    """prompt: ends before an answer. better, worse: how it goes on; each begins and ends with an answer."""

    prompt: tuple[Turn, ...]
    better: tuple[Turn, ...]
    worse: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]


def read_preference(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """The better and the worse conversation. Of both only what follows the common prompt is learned."""
    ranked = read_ranked(record)
    prompt = tuple(replace(turn, learned=False) for turn in ranked.prompt)
    better = Conversation((*prompt, *ranked.better), tools=ranked.tools, good=True)
    return better, Conversation((*prompt, *ranked.worse), tools=ranked.tools, good=False)


def read_ranked(record: Mapping[str, Any]) -> Ranked:
    """The three parts of a preference record; turns are in order in both conversations that they make."""
    kinds = {name: type(field(record, name)) for name in PAIR}
    if kinds["chosen"] is not kinds["rejected"] or kinds["chosen"] not in (str, dict, list):
        shown = " and ".join(f"{kind_of(record[name])} in {name!r}" for name in PAIR)
        raise RowFault(f"has {shown}", "both are texts, turns, or lists of turns")
    if form_of(record) == _WHOLE_TEXTS:
        prompt, better, worse = _split_texts(text(record, "chosen"), text(record, "rejected"))
    elif form_of(record) == _WHOLE_LISTS:
        prompt, better, worse = _split_turns(*(read_turns(record, name, read_turn) for name in PAIR))
    else:
        prompt, better, worse = (read_opening(record), *(_ranked_answer(record, name) for name in PAIR))
    for name, answer in zip(PAIR, (better, worse), strict=True):
        if answer[0].role != "assistant":
            raise RowFault(f"turn 1 of {name!r} is {answer[0].role}, but assistant was expected")
        check_order([*prompt, *answer])
    return Ranked(tuple(prompt), tuple(better), tuple(worse), read_tools(record))


def form_of(record: Mapping[str, Any]) -> str:
    """How a preference record is written, in words for the audit."""
    chosen = record.get("chosen")
    if isinstance(chosen, list) and chosen and isinstance(chosen[0], dict):
        first = chosen[0].get("role", chosen[0].get("from"))
        if first in ("system", "developer", "user", "human"):
            return _WHOLE_LISTS
    if isinstance(chosen, str) and opening_field(record) is None and is_dialogue(chosen):
        return _WHOLE_TEXTS
    return f"the prompt is {opening_form(record)}"


def _split_texts(better: str, worse: str) -> tuple[Sequence[Turn], Sequence[Turn], Sequence[Turn]]:
    opening, chosen, rejected = split_last_answers(better, worse)
    prompt = read_dialogue_text(opening, "chosen")[:-1]
    count = len(prompt)
    answers = [
        read_dialogue_text(opening + rest, name)[count:] for name, rest in zip(PAIR, (chosen, rejected), strict=True)
    ]
    return prompt, answers[0], answers[1]


def _split_turns(
    better: Sequence[Turn], worse: Sequence[Turn]
) -> tuple[Sequence[Turn], Sequence[Turn], Sequence[Turn]]:
    shorter = min(len(better), len(worse))
    same = next((place for place in range(shorter) if better[place] != worse[place]), shorter - 1)
    if not better[same].role == worse[same].role == "assistant":
        what = f"'chosen' and 'rejected' differ in turn {same + 1} already, which is no answer in both"
        raise RowFault(what, "a pair is two answers to the same prompt")
    return better[:same], better[same:], worse[same:]


def _ranked_answer(record: Mapping[str, Any], name: str) -> list[Turn]:
    """A text may be empty: an answer that says nothing can be the worse one."""
    if isinstance(record[name], str):
        return [answer_turn(record, record[name])]
    if isinstance(record[name], dict):
        return read_turns({name: [record[name]]}, name, read_turn)
    return read_turns(record, name, read_turn)
