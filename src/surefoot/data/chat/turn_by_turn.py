"""Conversations that a chat template must render for real: with tools, calls, or texts that the template takes apart.

Calls are JSON which the template writes in its own way, so no placeholder can stand for them. The conversation is
rendered turn by turn; what is new in each rendering is what the turn adds. Where the data spells out a control token,
a mark from Unicode's private use area stands for it while the template runs, and becomes text again afterwards: so the
template's own control tokens and the data's characters are never mixed up.

A template that knows nothing of tools may leave them out without a word (Phi-3's does): a call would be learned as an
empty answer. Others leave the thoughts out of an answer, of the newest one too (DeepSeek's). So each of them is changed
once, and the text must change with it.

Some templates write an answer otherwise once more turns follow (Qwen3 drops thoughts). Then each answer is kept as it
was written when it was the newest, as elsewhere, and what follows it is taken from behind its stop token. Where the
next prompt has another end in that token's place (gpt-oss's), the answer is learned without it. gpt-oss's also drops
the thoughts of an answer that others follow, with nothing to tell where it ended: such an answer is laid out without.
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
    """The segments of a conversation, from renderings of its first turns.

    render: turns, tools, with the generation prompt? -> text.
    stop_spans: from where to where its stop tokens stand in a text.
    usual_end: what ends an answer before a question, for templates that write nothing behind the newest one.
    """
    # Before anything is laid out: a call that the template leaves out would be learned as an empty answer.
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
    """Whether an answer that a question follows cannot keep its thoughts. lay_out: see `lay_out_rendered`."""
    thought = "\ue002"
    question, answer = Turn("user", "\ue000"), Turn("assistant", "\ue001", thought=thought)
    try:
        segments = lay_out(Conversation((question, answer, question, answer)))
    except RowFault:  # it takes none, and a record that has some is refused when it comes
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
        except RowFault:  # it minds, so it looks at them
            continue
        if same:
            raise RowFault(f"turn {place + 1}: the chat template leaves out the {what}", _WRITES_TOOLS)


def _require_thoughts(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], render: Render) -> None:
    """turns: up to an answer with thoughts, which is then the newest."""
    *before, answer = turns
    if answer.thought:
        other = replace(answer, thought=f"{answer.thought}.")
    else:
        other = replace(answer, content=answer.content.replace(_THOUGHT_ENDS, "." + _THOUGHT_ENDS))
    if render(turns, tools, False) == render([*before, other], tools, False):
        raise RowFault(f"turn {len(turns)}: the chat template leaves out the thoughts", _KEEPS_THOUGHTS)


def _changes(turns: Sequence[Turn]) -> Iterator[tuple[int, str, Turn]]:
    """Place, what is changed, and the turn so changed."""
    for place, turn in enumerate(turns):
        if turn.calls:
            yield place, "calls", replace(turn, calls=())
            if turn.text.strip():
                yield place, "text beside the calls", replace(turn, content=f"{turn.content}.")
        elif turn.role == "tool":
            yield place, "answer of a tool", replace(turn, content=f"{turn.content}.")


def _turn_by_turn(
    conversation: Conversation, render: Render, stop_spans: StopSpans, usual_end: str
) -> Iterator[tuple[str, int, bool]]:
    """(text, turn, whether it is the model's), in order."""
    turns, tools = conversation.turns, conversation.tools
    written, stop, rest, done = "", "", "", 0  # up to the last answer's stop token; that token; what follows it
    for answer in [place for place, turn in enumerate(turns) if turn.role == "assistant"]:
        prompt, whole = render(turns[:answer], tools, True), render(turns[: answer + 1], tools, False)
        begins = prompt
        if not whole.startswith(prompt):  # gpt-oss drops what was thought before calls once their answer is there
            begins = render(_thoughtless(turns[:answer]), tools, True)
        # Else the answer could not be told from its prompt, and the mask would be a guess.
        if not whole.startswith(begins):
            raise RowFault("the chat template's generation prompt is not how its answers begin", _ONE_ANSWER)
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
    """The stop token that begins the turn behind this answer, a tool's result; "" where a question comes.

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
    """Whether the `done` turns before still end with their stop token, and what the prompt adds to them. Where it also
    changes them: what stands behind the last of them, which ends with the last stop token that does not depend on the
    turn after it. gpt-oss ends calls with one and earlier answers with none: there that token is not the last one's."""
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
    """Another answer, told from the first by its last words."""
    if not answer.calls:
        return replace(answer, content=f"{answer.content}\uf8ff")
    *calls, last = answer.calls
    return replace(answer, calls=(*calls, replace(last, arguments={**last.arguments, "\uf8ff": ""})))


@dataclass(frozen=True)
class _Masks:
    """mark, number, mark stands for names[number]."""

    mark: str
    names: tuple[str, ...]

    def cut(self, text: str, place: int, answer: bool) -> Iterator[Segment]:
        """The text, with each masked name as a piece of the data's text."""
        parts = re.split(f"{self.mark}(\\d+){self.mark}", text)
        for number, part in enumerate(parts):
            if number % 2:
                yield Segment(self.names[int(part)], place, content=True, answer=answer)
            else:
                yield Segment(part, place, answer=answer)


def _mask(conversation: Conversation, encoder: TextEncoder) -> tuple[Conversation, _Masks]:
    """The conversation with marks in place of the names of control tokens."""
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
    """Every text in it."""
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
