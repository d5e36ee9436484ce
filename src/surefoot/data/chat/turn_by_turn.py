"""Render conversations without placeholders: with tools, calls, pictures, or texts that the template changes.

Templates write calls as JSON in their own format, so no placeholder can be used. The conversation is rendered turn by
turn; the new text of each rendering belongs to the turn. If the data contains the characters of a control token, they
are replaced by a mark from Unicode's private use area while the template runs and restored afterwards, so they are
never confused with the template's own control tokens.

A template without tool support may silently leave tools out (Phi-3's): a call would be learned as an empty answer.
Others leave out the reasoning of an answer, also of the last one (DeepSeek's). To detect this, each part is changed
once, and the text must change too.

Some templates render an answer differently when more turns follow (Qwen3 removes reasoning). Then each answer is kept
as it was rendered as the last turn, and the text after it is taken from after its stop token. If the next prompt has
another token in place of that stop token (gpt-oss), the stop token is not learned. gpt-oss also removes the reasoning
of an answer that others follow, without a mark of its end: such an answer is rendered without reasoning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.formats import Conversation, RowFault, ToolCall, Turn
from surefoot.data.tokenize.segments import Segment, TextEncoder

Render = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]], bool], str]
StopSpans = Callable[[str], Sequence[tuple[int, int]]]
_PRIVATE = range(0xE000, 0xF900)
_ONE_ANSWER = "shorten the conversation to one answer"
_THOUGHT_ENDS = "</think>"
_KEEPS_THOUGHTS = "choose a data.template that keeps them: the named one of the model's family, or chatml"
_WRITES_TOOLS = "choose a data.template that writes tools: the named one of the model's family, chatml or vicuna"


def lay_out_rendered(
    conversation: Conversation, render: Render, stop_spans: StopSpans, usual_end: str, encoder: TextEncoder
) -> tuple[Segment, ...]:
    """Return the segments of a conversation, from renderings of its first turns.

    render: (turns, tools, with generation prompt) -> text.
    stop_spans: start and end of the stop tokens in a text.
    usual_end: the end of an answer before a question, for templates that write nothing after the last answer.
    """
    # Checked first: a call that the template leaves out would be learned as an empty answer.
    _require_written(conversation, render)
    masked, masks = _mask(conversation, encoder)
    try:
        texts = list(_turn_by_turn(masked, render, stop_spans, usual_end))
    except RowFault:
        bare, is_open = _without_earlier_thoughts(masked), masked.turns[-1].role != "assistant"
        whole, without = (render(one.turns, one.tools, is_open) for one in (masked, bare))
        if bare == masked or whole != without:
            raise
        texts = list(_turn_by_turn(bare, render, stop_spans, usual_end))
    segments = [segment for text, place, answer in texts for segment in masks.cut(text, place, answer)]
    return tuple(segment for segment in segments if segment.text)


def _without_earlier_thoughts(conversation: Conversation) -> Conversation:
    """Of the turns before the last question."""
    turns = conversation.turns
    last = max((place for place, turn in enumerate(turns) if turn.role == "user"), default=0)
    return replace(conversation, turns=(*_thoughtless(turns[:last]), *turns[last:]))


def _thoughtless(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    return tuple(replace(turn, thought="") for turn in turns)


def drops_thoughts(lay_out: Callable[[Conversation], Sequence[Segment]]) -> bool:
    """Whether an answer before a question loses its reasoning. lay_out: see `lay_out_rendered`."""
    thought = "\ue002"
    question, answer = Turn("user", "\ue000"), Turn("assistant", "\ue001", thought=thought)
    try:
        segments = lay_out(Conversation((question, answer, question, answer)))
    except RowFault:  # reasoning is not supported; such a record is refused when it is read
        return False
    return not any(thought in segment.text for segment in segments if segment.turn == 1)


def _require_written(conversation: Conversation, render: Render) -> None:
    turns, tools = conversation.turns, conversation.tools
    text = render(turns, tools, False)
    if tools and render(turns, (), False) == text:
        raise RowFault("the chat template leaves out the definitions of tools", _WRITES_TOOLS)
    for place, turn in enumerate(turns):
        if turn.role == "assistant" and (turn.thought or _THOUGHT_ENDS in turn.content):
            _require_thoughts(turns[: place + 1], tools, render)
    for place, what, other in _changes(turns):
        try:
            same = render([*turns[:place], other, *turns[place + 1 :]], tools, False) == text
        except RowFault:  # it raises, so it reads them
            continue
        if same:
            raise RowFault(f"turn {place + 1}: the chat template leaves out the {what}", _WRITES_TOOLS)


def _require_thoughts(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], render: Render) -> None:
    """turns: up to and including an answer with reasoning."""
    *before, answer = turns
    if answer.thought:
        other = replace(answer, thought=f"{answer.thought}.")
    else:
        other = replace(answer, content=answer.content.replace(_THOUGHT_ENDS, "." + _THOUGHT_ENDS))
    if render(turns, tools, False) == render([*before, other], tools, False):
        raise RowFault(f"turn {len(turns)}: the chat template leaves out the reasoning", _KEEPS_THOUGHTS)


def _changes(turns: Sequence[Turn]) -> Iterator[tuple[int, str, Turn]]:
    """Yield place, description of the change, and the changed turn."""
    for place, turn in enumerate(turns):
        if turn.calls:
            yield place, "calls", replace(turn, calls=())
            if turn.text.strip():
                yield place, "text next to the calls", replace(turn, content=f"{turn.content}.")
        elif turn.role == "tool":
            yield place, "tool result", replace(turn, content=f"{turn.content}.")


def _turn_by_turn(
    conversation: Conversation, render: Render, stop_spans: StopSpans, usual_end: str
) -> Iterator[tuple[str, int, bool]]:
    """(text, turn, whether it is the model's), in order."""
    turns, tools = conversation.turns, conversation.tools
    written, stop, rest, done = "", "", "", 0  # up to the last answer's stop token; that token; what follows it
    for answer in [place for place, turn in enumerate(turns) if turn.role == "assistant"]:
        prompt, whole = render(turns[:answer], tools, True), render(turns[: answer + 1], tools, False)
        begins = prompt
        if not whole.startswith(prompt):  # gpt-oss removes the reasoning before calls when their results follow
            begins = render(_thoughtless(turns[:answer]), tools, True)
        # Otherwise the beginning of the answer would be unknown.
        if not whole.startswith(begins):
            raise RowFault("the chat template's answers do not begin with its generation prompt", _ONE_ANSWER)
        stops, new = _new(turns[:answer], tools, done, prompt, written, stop, render, stop_spans)
        yield stop if stops else "", done - 1, True
        yield new, answer, False
        tail = whole.removeprefix(begins)
        if spans := stop_spans(tail):
            (start, end), *_ = spans
            text, stop, rest = tail[:start], tail[start:end], tail[end:]
        else:
            text, stop, rest = tail, _next_begins(turns, answer, tools, whole, render, stop_spans) or usual_end, ""
        yield text, answer, True
        written, done = prompt + text, answer + 1
    if done < len(turns):
        prompt = render(turns, tools, True)
        stops, new = _new(turns, tools, done, prompt, written, stop, render, stop_spans)
        yield stop if stops else "", done - 1, True
        yield new, len(turns) - 1, False
    else:
        yield stop, done - 1, True
        yield rest, done - 1, False


def _next_begins(
    turns: Sequence[Turn],
    answer: int,
    tools: Sequence[Mapping[str, Any]],
    whole: str,
    render: Render,
    stop_spans: StopSpans,
) -> str:
    """Return the stop token that begins the tool result after this answer; "" if a question follows.

    whole: up to the answer.
    """
    if not turns[answer].calls:
        return ""
    after = render([*turns[: answer + 1], *(turns[answer + 1 : answer + 2] or [Turn("tool", "\uf8ff")])], tools, False)
    spans = stop_spans(after.removeprefix(whole)) if after.startswith(whole) else ()
    return after.removeprefix(whole)[: spans[0][1]] if spans and spans[0][0] == 0 else ""


def _new(
    turns: Sequence[Turn],
    tools: Sequence[Mapping[str, Any]],
    done: int,
    prompt: str,
    written: str,
    stop: str,
    render: Render,
    stop_spans: StopSpans,
) -> tuple[bool, str]:
    """Return whether the first `done` turns still end with their stop token, and the text that the prompt adds to them.

    If the prompt changes them, the added text begins after the last stop token that does not depend on the next turn.
    gpt-oss ends calls with a stop token and earlier answers with none, so that token may belong to an earlier turn."""
    for end in (written + stop, written):
        if prompt.startswith(end):
            return end == written + stop, prompt.removeprefix(end)
    other = replace(turns[done], content="\uf8ff" + turns[done].content)
    probe = render([*turns[:done], other, *turns[done + 1 :]], tools, True)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, probe, strict=False)))
    spans = stop_spans(prompt[:same])
    behind = prompt[spans[-1][1] :] if spans else ""
    if not behind or not render([*turns[: done - 1], _changed(turns[done - 1]), *turns[done:]], tools, True).endswith(
        behind
    ):
        raise RowFault(f"the chat template rewrites what comes before turn {done + 1}", _ONE_ANSWER)
    return True, behind


def _changed(answer: Turn) -> Turn:
    """Return another answer that differs in its last words."""
    if not answer.calls:
        return replace(answer, content=f"{answer.content}\uf8ff")
    *calls, last = answer.calls
    return replace(answer, calls=(*calls, replace(last, arguments={**last.arguments, "\uf8ff": ""})))


@dataclass(frozen=True)
class _Masks:
    """Replacement of control tokens in data: mark, number, mark for names[number]."""

    mark: str
    names: tuple[str, ...]

    def cut(self, text: str, place: int, answer: bool) -> Iterator[Segment]:
        """Return the text with each masked name as a piece of data text."""
        parts = re.split(f"{self.mark}(\\d+){self.mark}", text)
        for number, part in enumerate(parts):
            if number % 2:
                yield Segment(self.names[int(part)], place, content=True, answer=answer)
            else:
                yield Segment(part, place, answer=answer)


def _mask(conversation: Conversation, encoder: TextEncoder) -> tuple[Conversation, _Masks]:
    """Return the conversation with marks in place of control tokens."""
    names = tuple(sorted(encoder.control.values(), key=len, reverse=True))
    everything = repr((conversation.turns, conversation.tools))
    mark = next(chr(number) for number in _PRIVATE if ascii(chr(number))[1:-1] not in ascii(everything))
    masks = _Masks(mark, names)
    if not encoder.control_text("".join(_strings(conversation))):
        return conversation, masks
    numbers = {name: f"{mark}{number}{mark}" for number, name in enumerate(names)}
    pattern = re.compile("|".join(map(re.escape, names)))

    def masked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: numbers[found[0]], value)
        if isinstance(value, Mapping):
            return {masked(key): masked(item) for key, item in value.items()}
        return [masked(item) for item in value] if isinstance(value, list | tuple) else value

    turns = tuple(
        replace(
            turn,
            content=masked(turn.content),
            thought=masked(turn.thought),
            context=masked(turn.context),
            calls=tuple(replace(call, name=masked(call.name), arguments=masked(call.arguments)) for call in turn.calls),
        )
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns, tools=tuple(masked(tool) for tool in conversation.tools)), masks


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in the value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Conversation):
        yield from _strings([value.turns, value.tools])
    elif isinstance(value, Turn):
        yield from _strings([value.content, value.thought, value.context, value.calls])
    elif isinstance(value, ToolCall):
        yield from _strings([value.name, value.arguments])
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
