"""Record formats of preference data: pairs, judged answers, and prompts.

    preference  `chosen` and `rejected`: texts, turn objects (LLaMA-Factory's sharegpt ranking), or lists of turns (TRL)
    judged      an answer with `label` (TRL's KTO format) or `kto_tag` (LLaMA-Factory): true or false
    token-pairs, token-judged    the same as token ids: records of the `tokens` format in place of the answers
    prompts     prompts for a policy: any record that has a prompt, without its last answer

The prompt is in `prompt`, `conversations`, `messages`, `instruction` or `query`. If both dialogues are given in full
instead, the prompt is their common beginning: turn by turn for lists, up to the last `Assistant:` for texts.

Dialogues written as one text, as in hh-rlhf and DeepSpeed-Chat's data sets, become turns:

    \\n\\nHuman: What is a fjord?\\n\\nAssistant: A long, narrow inlet of the sea.

Text before the first turn is a system text. Neighboring turns of the same speaker are joined by a blank line, because
they cannot be distinguished from one turn that contains the speaker's mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.formats.conversation import (
    JUDGED,
    Conversation,
    RowFault,
    Turn,
    check_order,
    field,
    filled,
    judgement_field,
    listed,
    optional,
    read_tools,
    read_turns,
    text,
)
from surefoot.data.formats.supervised import (
    TOKENS,
    read_instruction,
    read_message,
    read_query,
    read_sharegpt_turn,
    read_tokens,
)
from surefoot.data.sources.record_values import kind_of

# Fields of the prompt; the first present one is read.
OPENINGS = ("prompt", "conversations", "messages", "instruction", "query")
_OF_ONE_QUESTION = {"instruction": read_instruction, "query": read_query}  # with `history`
AS_TURNS = ", read as turns"  # in the form of a dialogue that is one text
BESIDES = ("input", "history", "system", "tools", "images")


def read_turn(item: Mapping[str, Any]) -> Turn:
    """Read a turn with `role` and `content`, or with `from` and `value`."""
    return read_sharegpt_turn(item) if "from" in item and "role" not in item else read_message(item)


def opening_field(record: Mapping[str, Any]) -> str | None:
    """Return the name of the prompt's field. Null counts as absent: tables can only leave a field out by null."""
    return next((name for name in OPENINGS if record.get(name) is not None), None)


def read_opening(record: Mapping[str, Any]) -> list[Turn]:
    """Read the turns of the prompt, after the text in `system`. A list may end with an answer. Raises RowFault without
    a prompt."""
    name = opening_field(record)
    if name is None:
        raise RowFault(f"has no prompt (it has {listed(record)})", f"the prompt is in {listed(OPENINGS)}")
    if name in _OF_ONE_QUESTION:
        return list(_OF_ONE_QUESTION[name](record))
    value = record[name]
    turns = read_opening_text(filled(record, name), name) if isinstance(value, str) else _listed(record, name)
    system = optional(record, "system")
    if turns[0].role == "system":
        if system and turns[0].content.strip():
            raise RowFault("has a 'system' field and a system turn", "keep one of them")
        system, turns = system or turns[0].content, turns[1:]
    return [*([Turn("system", system)] if system.strip() else []), *turns]


def unsplit(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record with the text of its prompt as one user turn, so that a dialogue in it is not split into turns:
    a template without marks of its own would lose those in the text."""
    if isinstance(record.get("rejected"), str) and form_of(record) == _WHOLE_TEXTS:
        opening, *answers = split_last_answers(text(record, "chosen"), text(record, "rejected"))
        record = {**record, "prompt": opening, **dict(zip(PAIR, answers, strict=True))}
    prompt = record.get("prompt")
    return {**record, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else record


def answer_turn(record: Mapping[str, Any], words: str) -> Turn:
    """Return a text as the answer to the record's prompt. The space after `Assistant:` is not part of it."""
    prompt = record.get("prompt")
    return Turn("assistant", words.strip() if isinstance(prompt, str) and is_open_dialogue(prompt) else words)


def opening_form(record: Mapping[str, Any]) -> str:
    """Describe how the prompt is written, for the audit."""
    name = opening_field(record)
    if name is None or name in _OF_ONE_QUESTION or not isinstance(record[name], str):
        return {None: "no prompt", "instruction": "an instruction", "query": "a query"}.get(name, f"turns in {name!r}")
    return f"a Human/Assistant dialogue in 'prompt'{AS_TURNS}" if is_open_dialogue(record[name]) else "a text"


def _listed(record: Mapping[str, Any], name: str) -> Sequence[Turn]:
    return read_turns(record, name, read_turn)


PAIR = ("chosen", "rejected")
_WHOLE_TEXTS = f"Human/Assistant dialogues in 'chosen' and 'rejected'{AS_TURNS}: what both begin with is the prompt"
_WHOLE_LISTS = "whole dialogues in 'chosen' and 'rejected': the turns that both begin with are the prompt"


@dataclass(frozen=True)
class Ranked:
    """A prompt with its better and its worse answer, as turns.

    prompt: the turns before the answer.
    better, worse: the continuations; each begins and ends with an answer.
    """

    prompt: tuple[Turn, ...]
    better: tuple[Turn, ...]
    worse: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]


def read_preference(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Read a pair as the better and the worse conversation. Only the turns after the common prompt are learned."""
    ranked = read_ranked(record)
    prompt = tuple(replace(turn, learned=False) for turn in ranked.prompt)
    better = Conversation((*prompt, *ranked.better), tools=ranked.tools, good=True)
    return better, Conversation((*prompt, *ranked.worse), tools=ranked.tools, good=False)


def read_ranked(record: Mapping[str, Any]) -> Ranked:
    """Read prompt, better and worse answer of a preference record, and check the order of turns in both dialogues."""
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


def is_token_pair(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("chosen"), dict) and TOKENS in record["chosen"]


def read_token_pair(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Read a pair of token ids: in `chosen` and `rejected` a record of the `tokens` format, whose labels mark the
    answer."""
    better, worse = (_answer_tokens(record, name) for name in PAIR)
    return replace(better, good=True), replace(worse, good=False)


def _answer_tokens(record: Mapping[str, Any], name: str) -> Conversation:
    if not isinstance(field(record, name), dict):
        raise RowFault(f"has {kind_of(record[name])} in {name!r}, where a record of token ids is required")
    try:
        return read_tokens(record[name])
    except RowFault as fault:
        raise RowFault(f"{name!r} {fault.what}", fault.fix) from None


def form_of(record: Mapping[str, Any]) -> str:
    """Describe how a preference record is written, for the audit."""
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
        what = f"'chosen' and 'rejected' already differ in turn {same + 1}, which is not an answer in both"
        raise RowFault(what, "a pair is two answers to the same prompt")
    return better[:same], better[same:], worse[same:]


def _ranked_answer(record: Mapping[str, Any], name: str) -> list[Turn]:
    """Read an answer. A text may be empty: an empty answer can be the worse one."""
    if isinstance(record[name], str):
        return [answer_turn(record, record[name])]
    if isinstance(record[name], dict):
        return read_turns({name: [record[name]]}, name, read_turn)
    return read_turns(record, name, read_turn)


ANSWERS = ("completion", "output", "response")  # of the answer; without them it is the last turn of the prompt's list


def read_judged(record: Mapping[str, Any]) -> Conversation:
    """Read a judged answer: only the completion is learned, or the last answer if there is no completion."""
    good = _judgement(record)
    prompt, answer = read_opening(record), _judged_answer(record)
    if answer is None:
        if prompt[-1].role != "assistant":
            raise RowFault("has no answer", "end with an assistant turn, or add 'completion'")
        prompt, answer = prompt[:-1], prompt[-1:]
    if answer[0].role != "assistant":
        raise RowFault(f"turn 1 of the answer is {answer[0].role}, but assistant was expected")
    check_order([*prompt, *answer])
    turns = (*(replace(turn, learned=False) for turn in prompt), *(replace(turn, learned=True) for turn in answer))
    return Conversation(turns, tools=read_tools(record), good=good)


def read_judged_tokens(record: Mapping[str, Any]) -> Conversation:
    """Read a judged answer as token ids: a record of the `tokens` format whose labels mark the answer, with `label`."""
    return replace(read_tokens(record), good=_judgement(record))


def _judgement(record: Mapping[str, Any]) -> bool:
    mark = judgement_field(record)
    if mark is None:
        raise RowFault(f"has no {listed(JUDGED)} (it has {listed(record)})", "mark every answer with true or false")
    good = record[mark]
    if good not in (0, 1) or not isinstance(good, bool | int):
        raise RowFault(f"has {kind_of(good)} in {mark!r}, where true or false is required")
    return bool(good)


def judged_form(record: Mapping[str, Any]) -> str:
    return f"the prompt is {opening_form(record)}, {judgement_field(record)!r} judges"


def _judged_answer(record: Mapping[str, Any]) -> list[Turn] | None:
    """Read the answer's turns; None if the answer is the last turn of the prompt's list."""
    field = opening_field(record)
    name = next((name for name in ANSWERS if record.get(name) is not None), None)
    if field in ("conversations", "messages") or name is None:
        return None
    if isinstance(record[name], list):
        return read_turns(record, name, read_turn)
    return [answer_turn(record, text(record, name))]


def read_prompt(record: Mapping[str, Any]) -> Conversation:
    """Read a prompt: a conversation that ends where the model begins to write. For preference records it is the common
    prompt, for others the dialogue without its last answer."""
    if all(name in record for name in PAIR):
        ranked = read_ranked(record)
        return Conversation(ranked.prompt, tools=ranked.tools)
    turns = read_opening(record)
    check_order(turns, answered=False)
    if turns[-1].role == "assistant":
        turns = turns[:-1]
    if not turns or turns[-1].role not in ("user", "tool"):
        raise RowFault("has no question for the model to answer", "a prompt ends with a user turn")
    return Conversation(tuple(turns), tools=read_tools(record))


def prompt_form(record: Mapping[str, Any]) -> str:
    if all(name in record for name in PAIR):
        return f"preference records: {form_of(record)}"
    name = opening_field(record)
    listed = name is not None and isinstance(record[name], list)
    return f"the prompt is {opening_form(record)}" + (", without the last answer" if listed else "")


_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether the text contains the marks of both speakers."""
    return set(_MARK.findall(text)) == set(_SPEAKERS)


def is_open_dialogue(text: str) -> bool:
    """Whether the text is a dialogue that ends where the assistant begins to write."""
    return is_dialogue(text) and text.rstrip().endswith("\n\nAssistant:")


def read_dialogue_text(text: str, name: str) -> list[Turn]:
    """Split a dialogue into turns, stripped of white space; an answer may be empty.

    name: the field, for RowFaults.
    """
    parts = _MARK.split(text)
    turns = [Turn("system", parts[0].strip())] if parts[0].strip() else []
    for speaker, words in zip(parts[1::2], parts[2::2], strict=True):
        role, content = _SPEAKERS[speaker], words.strip()
        if turns and turns[-1].role == role:
            turns[-1] = Turn(role, "\n\n".join(part for part in (turns[-1].content, content) if part))
        else:
            turns.append(Turn(role, content))
    if not any(turn.role == "user" and turn.content for turn in turns):
        raise RowFault(f"{name!r} has no human turn with text")
    return turns


def read_opening_text(text: str, name: str) -> list[Turn]:
    """Read the turns of an open dialogue; any other text becomes one user turn."""
    if not is_open_dialogue(text):
        return [Turn("user", text)]
    return read_dialogue_text(text, name)[:-1]


def split_last_answers(better: str, worse: str) -> tuple[str, str, str]:
    """Split two dialogues into their common beginning, up to its last `\\n\\nAssistant:`, and the rest of each."""
    shared = _shared(better, worse)
    marks = [found for found in _MARK.finditer(better, 0, shared) if found[1] == "Assistant"]
    if not marks:
        raise RowFault(
            "the dialogues in 'chosen' and 'rejected' have no common beginning that ends before an answer",
            "a pair is two answers to the same prompt",
        )
    end = marks[-1].end()
    return better[:end], better[end:], worse[end:]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)
