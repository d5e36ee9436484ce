"""Render a conversation by a row of the table of named templates.

All data (texts, tool definitions, arguments of calls) are separate segments marked as content, so that the characters
of a control token in them are tokenized as text. The model's part of a turn is its text, its calls and its end token.
Tool definitions belong to no turn (-1), so truncation of a long conversation removes them last.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from surefoot.data.chat.render import call_ids
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import Segment, require_turns
from surefoot.families.template_row import ALONE, Dialogue, Prompt, ToolLayout

_NO_TURN = -1


def lay_out_dialogue(row: Dialogue, conversation: Conversation) -> tuple[Segment, ...]:
    """Raise RowFault for what the template does not support: tools, a later system text, calls."""
    if row.takes_text and conversation.turns[0].role == "text":
        text = Segment(conversation.turns[0].text, 0, content=True, answer=True)
        return (text, _words(row.close, 0, answer=True))
    require_turns(conversation, row.name)
    _check(row, conversation)
    return tuple(_marked(_dialogue(row, conversation)))


def _marked(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Return segments that have text. {alone} in a row's words marks the text after it, and is removed."""
    alone = False
    for segment in segments:
        parts = [segment.text] if segment.content or ALONE not in segment.text else segment.text.split(ALONE)
        for number, text in enumerate(parts):
            alone = alone or number > 0
            if text:
                yield segment._replace(text=text, alone=alone) if alone or text != segment.text else segment
                alone = False


def lay_out_prompt(row: Prompt, conversation: Conversation, eos: str) -> tuple[Segment, ...]:
    """Raise RowFault unless the turns are one prompt and one answer, with a system text if the row allows one."""
    require_turns(conversation, row.name)
    *system, prompt = [turn for turn in conversation.turns if turn.role != "assistant"]
    answers = [turn for turn in conversation.turns if turn.role == "assistant"]
    if len(system) > 1 or len(answers) > 1 or any(turn.role != "system" for turn in system) or _has_tools(conversation):
        what = f"the {row.name} template supports only one prompt and one answer"
        raise RowFault(what, "choose data.template: vicuna, chatml or tokenizer")
    if system and not row.system_as_header:
        raise RowFault(f"the {row.name} template supports no system text", "choose alpaca or a chat template")
    return tuple(_marked(_prompt(row, system, prompt, answers, eos)))


def _prompt(row: Prompt, system: Sequence[Turn], prompt: Turn, answers: Sequence[Turn], eos: str) -> list[Segment]:
    place = len(system)
    head = _words(row.header_input if prompt.context else row.header, place)
    segments = [Segment(system[0].content, 0, content=True) if system else head]
    segments += _around(row.instruction, [Segment(prompt.content, place, content=True)], place)
    if prompt.context:
        segments += _around(row.input, [Segment(prompt.context, place, content=True)], place)
    segments.append(_words(row.after_input if prompt.context else row.response, place))
    for turn in answers:
        answer = Segment(_thought(turn) + turn.content, place + 1, content=True, answer=True)
        segments += [_words(row.lead, place + 1, answer=True), answer, _words(eos, place + 1, answer=True)]
    return segments


def _check(row: Dialogue, conversation: Conversation) -> None:
    for place, turn in enumerate(conversation.turns):
        if turn.role == "system" and place:
            raise RowFault(f"turn {place + 1}: the {row.name} template supports a system text only at the start")
    if not _has_tools(conversation):
        return
    tools = row.tools
    if tools is None:
        raise RowFault(f"the {row.name} template supports no tools", "choose chatml, qwen, llama3 or mistral")
    for place, turn in enumerate(conversation.turns):
        if tools.one_call and len(turn.calls) > 1:
            raise RowFault(
                f"turn {place + 1}: the {row.name} template supports one call per turn", "choose chatml or qwen"
            )
        if turn.calls and (turn.thought or turn.text.strip()) and not tools.text_and_calls:
            raise RowFault(
                f"turn {place + 1}: the {row.name} template supports text or calls in a turn, not both",
                "choose chatml or qwen",
            )


def _has_tools(conversation: Conversation) -> bool:
    return bool(conversation.tools) or any(turn.calls or turn.role == "tool" for turn in conversation.turns)


def _dialogue(row: Dialogue, conversation: Conversation) -> Iterator[Segment]:
    turns, tools = conversation.turns, row.tools if conversation.tools else None
    head = _system(row, turns, conversation.tools)
    yield _words(row.prefix, 0)
    if not row.merged:
        yield from head
        head = []
    before: list[Segment] = []
    if tools is not None and tools.place != "system":
        before = _definitions(tools, conversation.tools)
    ids = call_ids(turns)
    first = int(turns[0].role == "system")
    for place, turn in enumerate(turns):
        last = place == len(turns) - 1
        if turn.role == "user":
            yield _words(row.between if place > first else "", place)
            inside = [*head, _text(row, turn, place)]
            if tools is not None and tools.place == "before user":
                yield from before
            else:
                inside = [*before, *inside]
            yield from _around(row.user, inside, place)
            head, before = [], []
        elif turn.role == "assistant":
            if row.own_lead not in row.opening or not _has_own_lead(row, _text(row, turn, place, answer=True)):
                yield _words(row.opening, place)
            yield from _answer(row, turn, ids[place], place)
            yield _words(row.close, place, answer=True)
            yield _words(row.after, place)
            yield _words(row.finish if last else "", place)
        elif turn.role == "tool":
            assert row.tools is not None
            yield from _result(row, row.tools, turns, place, ids[place][0])
    if turns[-1].role != "assistant":
        yield _words(row.opening, len(turns))


def _system(row: Dialogue, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    inside = []
    if turns[0].role == "system":
        inside.append(_text(row, turns[0], 0))
    elif row.default_system:
        inside.append(_words(row.default_system, 0))
    if tools and row.tools is not None and row.tools.place == "system":
        inside += [*([_words("\n\n", 0)] if inside else []), *_definitions(row.tools, tools)]
    return _around(row.system, inside, 0) if inside else []


def _definitions(layout: ToolLayout, tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    segments = [_words(layout.intro, _NO_TURN)]
    for number, tool in enumerate(tools):
        text = json.dumps(tool, ensure_ascii=False, indent=layout.indent)
        left, right = layout.definition.split("{json}")
        segments += [_words(layout.separator if number else "", _NO_TURN), _words(left, _NO_TURN)]
        segments += [Segment(text, _NO_TURN, content=True), Segment(right, _NO_TURN)]
    return [*segments, _words(layout.outro, _NO_TURN)]


def _answer(row: Dialogue, turn: Turn, ids: Sequence[str], place: int) -> Iterator[Segment]:
    text = _text(row, turn, place, answer=True)
    if not _has_own_lead(row, text) and (not turn.calls or row.tools is None or row.tools.keeps_lead):
        yield _words(row.lead, place, answer=True)
    yield text
    if not turn.calls:
        return
    layout = row.tools
    assert layout is not None
    yield _words(layout.opening, place, answer=True)
    for number, (call, own) in enumerate(zip(turn.calls, ids, strict=True)):
        yield _words(layout.between if number or text.text else "", place, answer=True)
        name, rest = layout.call.split("{name}")
        middle, end = rest.split("{arguments}")
        yield _words(name, place, answer=True)
        yield Segment(call.name, place, content=True, answer=True)
        yield _words(middle, place, answer=True)
        yield Segment(json.dumps(dict(call.arguments), ensure_ascii=False), place, content=True, answer=True)
        yield _words(end.replace("{id}", own), place, answer=True)
    yield _words(layout.closing, place, answer=True)


def _has_own_lead(row: Dialogue, answer: Segment) -> bool:
    return bool(row.own_lead) and row.own_lead in answer.text


def _result(row: Dialogue, layout: ToolLayout, turns: Sequence[Turn], place: int, own: str) -> Iterator[Segment]:
    text = turns[place].text
    content = json.dumps(text, ensure_ascii=False) if layout.result_json else text
    inside = _around(layout.result.replace("{id}", own), [Segment(content, place, content=True)], place)
    if not layout.in_user_turn:
        yield from inside
        return
    left, right = row.user.split("{content}")
    neighbors = [turns[other].role == "tool" if 0 <= other < len(turns) else False for other in (place - 1, place + 1)]
    yield _words("\n" if neighbors[0] else row.between + left, place)
    yield from inside
    yield _words("" if neighbors[1] else right, place)


def _thought(turn: Turn) -> str:
    """Format reasoning as Qwen, DeepSeek and many data sets do."""
    return f"<think>\n{turn.thought}\n</think>\n\n" if turn.thought else ""


def _text(row: Dialogue, turn: Turn, place: int, answer: bool = False) -> Segment:
    text = turn.text.strip() if turn.role in row.trimmed else turn.text
    return Segment(_thought(turn) + text, place, content=True, answer=answer)


@functools.lru_cache(maxsize=4096)
def _words(text: str, turn: int, answer: bool = False) -> Segment:
    """Make a segment of the template's own text; cached, because all conversations share them."""
    return Segment(text, turn, answer=answer)


def _around(slot: str, inside: Sequence[Segment], place: int) -> list[Segment]:
    left, right = slot.split("{content}")
    return [_words(left, place), *inside, _words(right, place)]
