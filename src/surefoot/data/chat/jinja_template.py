"""Jinja chat templates, of the tokenizer or a file: split so that the label mask needs no text search.

The template is rendered once per sequence of roles with a placeholder for each content. Splitting the result at the
placeholders gives the frame: the template's own text before, between and after the contents. A conversation is the
frame with its contents filled in; one real rendering checks that the text is the same (contents may be stripped, as by
Llama's template).

An answer begins after the generation prompt and includes the token that ends the turn. Each answer is rendered as the
last turn. For most templates this equals the rendering of the whole conversation. Some change earlier turns when later
ones follow (Qwen3 removes an empty thinking block): then the prompt of the second answer keeps the first one as it was
rendered before, with a note in the audit.

Two templates end answers differently. GLM's writes nothing after an answer: the model stops with the token that begins
the next turn, so that token is learned with every answer. gpt-oss's writes <|return|> after the last answer and <|end|>
after earlier ones; the latter are not learned.

A template that changes contents (removes reasoning, for example) has no frame, and neither has a conversation with
tools or pictures: those are rendered as a whole, see `surefoot.data.chat.turn_by_turn`. A content with pictures is then
a list of parts. Some templates require lists of parts for all contents (LLaVA's, SmolVLM's); those that take only texts
get U+FDD0 for a picture, as named templates do.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from surefoot.data.chat import render as chat_jinja
from surefoot.data.chat.render import contents_between
from surefoot.data.chat.turn_by_turn import drops_thoughts, lay_out_rendered
from surefoot.data.formats import IMAGE, Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import Piece, Segment, Template, TextEncoder, require_turns
from surefoot.families.templates import ANYWHERE, OWN, row_like
from surefoot.system.errors import Fault, InputError

_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # private-use characters: no template looks for them
_UNSTABLE = "the chat template changes earlier answers when later turns follow; they are kept unchanged"
_ENDS_OTHERWISE = (
    "the chat template ends answers before the last one with another token: only the last answer's end is learned"
)
_DROPS_THOUGHTS = "the chat template removes the reasoning of an answer that another follows: it is learned without it"
_PROBE = ("user", "assistant", "user", "assistant")
_MOST = 1000  # values of variables whose frames are kept


def make_chat_template(encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    """Return the tokenizer's template. Raises InputError if it has none, or none that is supported."""
    tokenizer = encoder.tokenizer
    if tokenizer.chat_template is None:
        fix = f"choose data.template: {ANYWHERE}, or a .jinja file"
        raise InputError(Fault("data.template", "the tokenizer has no chat template", fix, code="SF-DATA-TEMPLATE"))
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, none of them the default
        raise InputError(Fault("data.template", f"tokenizer: {error}", code="SF-DATA-TEMPLATE")) from None
    try:
        return _template(OWN, source, encoder, stop_ids)
    except RowFault as fault:
        named = row_like(source)
        fix = f"set data.template: {named}, which has the same format" if named else fault.fix
        raise InputError(Fault("data.template", f"tokenizer: {fault.what}", fix, code="SF-DATA-TEMPLATE")) from None


def make_file_template(path: str, source: str, encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    """Make a template from a user's file.

    source: the content of the file at `path`.

    Raises InputError with the file's line.
    """
    try:
        return _template(path, source, encoder, stop_ids)
    except chat_jinja.TemplateFault as fault:
        raise InputError(Fault(f"{path}:{fault.line}", fault.problem, code="SF-DATA-TEMPLATE")) from None
    except RowFault as fault:
        raise InputError(Fault(path, fault.what, fault.fix, code="SF-DATA-TEMPLATE")) from None


def _template(name: str, source: str, encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    special = encoder.tokenizer.special_tokens_map
    tokens = {role: str(token) for role, token in special.items() if isinstance(token, str)}
    chat = _Chat(source, tokens, encoder, tuple(stop_ids))
    chat.frame(_PROBE[:2])
    dated = chat_jinja.PRINTS_DATE in source
    parts = ("lists of parts",) * (chat.parts == "always")
    return Template(
        name,
        identity=repr((source, sorted(tokens.items()), *parts)),
        stop_ids=chat.stop_ids,
        segments=lambda one: chat.of(one).segments(one),
        jinja=chat.with_bos,
        notes=(f"the chat template prints today's date; {chat_jinja.TODAY:%d %b %Y} is always used instead",) * dated,
        dialogue_notes=(notes := chat.dialogue_notes()),
        last_stops=_ENDS_OTHERWISE in notes,
        repeats_bos=chat.repeats_bos(),
        at_once=lambda one, prompt: chat.of(one).at_once(one, prompt),
    )


@dataclass(frozen=True)
class _Check:
    """A rendering of the first `turns` turns, split at the contents: pieces[i] comes before content i.

    since: the first turn whose content is taken from it.
    """

    turns: int
    generation_prompt: bool
    pieces: tuple[str, ...]
    since: int


@dataclass(frozen=True)
class _Frame:
    """Segments in order with empty contents, and the renderings from which the contents are taken."""

    segments: tuple[Segment, ...]
    checks: tuple[_Check, ...]
    stable: bool
    same_ends: bool  # answers end the same way whether others follow or not


class _Found(NamedTuple):
    """A token in a text: its first and last character, and its id."""

    start: int
    end: int
    id: int


@dataclass
class _Chat:
    source: str
    tokens: dict[str, Any]
    encoder: TextEncoder
    stop_ids: tuple[int, ...]
    _frames: dict[tuple[str, ...], _Frame] = field(default_factory=dict)
    _others: dict[str, _Chat] = field(default_factory=dict)

    def of(self, conversation: Conversation) -> _Chat:
        """Return the template with the values that the record gives its variables."""
        if not (arguments := conversation.arguments):
            return self
        if arguments not in self._others:
            if len(self._others) >= _MOST:
                self._others.clear()
            variables = self.tokens | json.loads(arguments)
            self._others[arguments] = _Chat(self.source, variables, self.encoder, self.stop_ids)
        return self._others[arguments]

    @cached_property
    def parts(self) -> chat_jinja.Parts:
        """Which contents must be lists of parts: all, if the template ignores plain texts; those with pictures, if it
        renders lists itself and does not print them as Python would; or none."""
        if not self._writes(_placeholders(_PROBE[:2]), "never") and self._writes(_placeholders(_PROBE[:2]), "always"):
            return "always"
        return "pictures" if self._writes([Turn("user", f"\ue000{IMAGE}")], "pictures") else "never"

    def _writes(self, turns: Sequence[Turn], parts: chat_jinja.Parts) -> bool:
        try:
            text, without = (
                chat_jinja.render(self.source, given, self.tokens, False, parts=parts)
                for given in (turns, [replace(turn, content=turn.content.replace(IMAGE, "")) for turn in turns])
            )
        except RowFault:
            return False
        plain = [turn.content.replace(IMAGE, "") for turn in turns]
        has_picture = any(IMAGE in turn.content for turn in turns)
        return all(one in text for one in plain) and "'type'" not in text and has_picture == (text != without)

    def dialogue_notes(self) -> tuple[str, ...]:
        """Return a note if the template changes earlier answers when later turns follow, else ""."""
        try:
            frame = self.frame(_PROBE)
        except RowFault:
            return ()  # no second answer is supported; such conversations are refused when they are read
        notes = (_UNSTABLE,) * (not frame.stable) + (_ENDS_OTHERWISE,) * (not frame.same_ends)
        return notes + (_DROPS_THOUGHTS,) * drops_thoughts(self._rendered)

    def repeats_bos(self) -> bool:
        """Whether BOS also comes before later turns, as in Llama 2's template."""
        bos = self.tokens.get("bos_token", "")
        try:
            return bool(bos) and "".join(segment.text for segment in self.frame(_PROBE).segments).count(bos) > 1
        except RowFault:
            return False

    def with_bos(self, bos: str) -> str:
        """Return the source, changed to write BOS at the start as in training (`bos`, "" for none)."""
        own = bos or self.tokens.get("bos_token", "")
        beginnings = [segments[0].text for segments in self._short_layouts()]
        without = [text for text in beginnings if not (own and text.startswith(own))]
        if without == ([] if bos else beginnings):
            return self.source
        begin = _quote(self._before(bos, without[0])) if without else ""
        if without == beginnings:
            return f"{{{{ {begin} }}}}{{# BOS, as in training #}}\n{self.source}"
        with_own, without_own = ("whole", f"{begin} ~ whole") if bos else (f"whole[{len(own)}:]", "whole")
        body = self.source.removesuffix("\n")  # jinja drops it too
        begun = f"{with_own} if whole.startswith({_quote(own)}) else {without_own}"
        return f"{{%- set whole %}}\n{body}{{%+ endset -%}}\n{{{{- {begun} -}}}}"

    def _short_layouts(self) -> list[tuple[Segment, ...]]:
        layouts: list[tuple[Segment, ...]] = []
        for roles in (_PROBE[:2], ("system", *_PROBE[:2]), _PROBE[:1], ("system", *_PROBE[:1])):
            try:
                layouts.append(self.frame(roles).segments)
            except RowFault:  # such a conversation is not supported
                continue
        return layouts

    def _before(self, bos: str, beginning: str) -> str:
        """Return BOS, followed by a space if the tokenizer adds one before a text but not after BOS."""
        bare = Piece(beginning, literal=False, opening=True)
        pieces = [bare, *(bare._replace(text=bos + gap + beginning) for gap in ("", " "))]
        alone, joined, apart = self.encoder.encode(pieces)
        return f"{bos} " if apart[1:] == alone != joined[1:] else bos

    def render(self, turns: Sequence[Turn], generation_prompt: bool) -> str:
        return self._render_tools(turns, (), generation_prompt)

    def _render_tools(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
        return chat_jinja.render(self.source, turns, self.tokens, generation_prompt, tools, self.parts)

    def segments(self, conversation: Conversation) -> tuple[Segment, ...]:
        require_turns(conversation, OWN)
        turns = conversation.turns
        if self._takes_rendering(conversation):
            return self._rendered(conversation)
        frame = self.frame(tuple(turn.role for turn in turns))
        contents: list[str] = []
        for check in frame.checks:
            rendered = self.render(turns[: check.turns], check.generation_prompt)
            # Templates may treat a text differently from a placeholder (remove its reasoning), so each is compared.
            found = contents_between(check.pieces, [turn.text for turn in turns[: check.turns]], rendered)
            if found is None:
                return self._rendered(conversation)
            contents += found[check.since :]
        return tuple(
            Segment(contents[segment.turn], segment.turn, content=True, answer=segment.answer)
            if segment.content
            else segment
            for segment in frame.segments
        )

    def at_once(self, conversation: Conversation, generation_prompt: bool) -> tuple[Segment, ...]:
        """Render all turns together, with contents marked; conversations without a frame as in `lay_out`."""
        require_turns(conversation, OWN)
        turns = conversation.turns
        if self._takes_rendering(conversation):
            return self._rendered(conversation)
        pieces = self._split(_placeholders(turn.role for turn in turns), generation_prompt)
        contents = contents_between(pieces, [turn.text for turn in turns], self.render(turns, generation_prompt))
        if contents is None:
            return self._rendered(conversation)
        segments = [Segment(pieces[0], 0)]
        for place, (content, after) in enumerate(zip(contents, pieces[1:], strict=True)):
            answer = turns[place].role == "assistant"
            segments += [Segment(content, place, content=True, answer=answer), Segment(after, place)]
        return tuple(segments)

    def _takes_rendering(self, conversation: Conversation) -> bool:
        """Whether the conversation has more than texts, for which there is no placeholder."""
        turns = conversation.turns
        beside = any(turn.calls or turn.thought or turn.role == "tool" for turn in turns)
        pictures = self.parts != "never" and any(IMAGE in turn.text for turn in turns)
        return bool(conversation.tools) or beside or pictures

    def frame(self, roles: tuple[str, ...]) -> _Frame:
        if roles not in self._frames:
            self._frames[roles] = self._make_frame(roles)
        return self._frames[roles]

    def _make_frame(self, roles: tuple[str, ...]) -> _Frame:
        """For each answer: the prompt since the previous answer, the answer, its end."""
        turns = _placeholders(roles)
        segments: list[Segment] = []
        checks: list[_Check] = []
        done, closing, rest = 0, "", ""  # turns rendered; the end of the last of them; what the template adds then
        same_ends = True
        for answer in [place for place, role in enumerate(roles) if role == "assistant"]:
            prompt, whole = self._around_answer(turns[: answer + 1])
            if not prompt[done].startswith(closing):
                segments[-1], closing, same_ends = Segment("", done - 1), "", False
            segments += _prompt_segments(prompt, done, closing)
            closing, rest = self._closing(turns[: answer + 1], whole[answer + 1])
            segments += [
                Segment(whole[answer].removeprefix(prompt[answer]), answer, answer=True),
                Segment("", answer, content=True, answer=True),
                Segment(closing, answer, answer=True),
            ]
            checks.append(_Check(answer + 1, False, whole, done))
            done = answer + 1
        is_open = done < len(roles)
        if is_open:
            prompt = self._split(turns, generation_prompt=True)
            if not prompt[done].startswith(closing):
                segments[-1], closing, same_ends = Segment("", done - 1), "", False
            segments += _prompt_segments(prompt, done, closing)
            checks.append(_Check(len(roles), True, prompt, done))
        else:
            segments.append(Segment(rest, done - 1))
        laid_out = "".join(turns[segment.turn].content if segment.content else segment.text for segment in segments)
        written = self.render(turns, generation_prompt=is_open)
        stable = laid_out in (written, written + closing)
        if stable:
            checks = [_Check(len(roles), is_open, checks[-1].pieces, 0)]
        return _Frame(tuple(segments), tuple(checks), stable, same_ends)

    def _around_answer(self, turns: Sequence[Turn]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Render all turns but the last, which is an answer, and all turns."""
        answer = len(turns) - 1
        prompt = self._split(turns[:answer], generation_prompt=True)
        whole = self._split(turns, generation_prompt=False)
        if whole[:answer] != prompt[:answer] or not whole[answer].startswith(prompt[answer]):
            raise RowFault("the chat template's answers do not begin with its generation prompt", _OTHER_TEMPLATE)
        return prompt, whole

    def _split(self, turns: Sequence[Turn], generation_prompt: bool) -> tuple[str, ...]:
        """Return the template's text around the contents: len(turns) + 1 texts."""
        parts = _PLACEHOLDER.split(self.render(turns, generation_prompt))
        if parts[1::2] != [str(place) for place in range(len(turns))]:
            roles = ", ".join(turn.role for turn in turns)
            raise RowFault(
                f"the chat template does not print every turn of ({roles}) once and in order", _OTHER_TEMPLATE
            )
        return tuple(parts[::2])

    def _closing(self, turns: Sequence[Turn], text: str) -> tuple[str, str]:
        """Return the text after the last content, up to and including the token that ends the turn.

        Some templates write more after the very last turn (Phi-3: <|end|>, then EOS once), so only the text counts that
        is also there when another turn follows: a known stop token in it, or else the template's own control token.
        If there is none, it is the stop token that begins the next turn.
        """
        try:
            split = self._split([*turns, Turn("user", f"\ue000{len(turns)}\ue001")], generation_prompt=False)
            following = split[len(turns)]
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, following, strict=False))
            common = "".join(one for one, _ in same)
        except RowFault:  # no further turn is supported
            common = following = text
        for scope, wanted in ((common, self.stop_ids), (common, self.encoder.control), (text, self.stop_ids)):
            found = self._first(scope, wanted)
            if found is not None:
                self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, found.id)))
                return text[: found.end], text[found.end :]
        if following.startswith(text) and (begins := self._begins(following.removeprefix(text))):
            return text + begins, ""
        raise RowFault(f"the chat template ends an answer with {text!r}, which contains no stop token")

    def _begins(self, text: str) -> str:
        """Return the stop token at the start of the text, or "" if there is none."""
        found = self._first(text, self.stop_ids)
        return text[: found.end] if found and found.start == 0 else ""

    def _first(self, text: str, wanted: Collection[int]) -> _Found | None:
        """Return the position of the first of these tokens in the text."""
        return next(iter(self._found(text, wanted)), None)

    def _found(self, text: str, wanted: Collection[int]) -> list[_Found]:
        """Return the positions of these tokens in the text."""
        ids, spans = self.encoder.spans(Piece(text, literal=False, opening=False))
        return [_Found(start, end, number) for number, (start, end) in zip(ids, spans, strict=True) if number in wanted]

    def _rendered(self, conversation: Conversation) -> tuple[Segment, ...]:
        def stop_spans(text: str) -> list[tuple[int, int]]:
            return [(found.start, found.end) for found in self._found(text, self.stop_ids)]

        usual = next(one.text for one in reversed(self.frame(_PROBE[:2]).segments) if one.answer)
        return lay_out_rendered(conversation, self._render_tools, stop_spans, usual, self.encoder)


_OTHER_TEMPLATE = "choose another data.template, such as the named one of the model's family, chatml or vicuna"


def _placeholders(roles: Iterable[str]) -> list[Turn]:
    return [Turn(role, f"\ue000{place}\ue001") for place, role in enumerate(roles)]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _prompt_segments(pieces: Sequence[str], done: int, closing: str) -> list[Segment]:
    """Return the segments from turn `done` to the beginning of the answer.

    closing: the part of them that has already been added.
    """
    if not pieces[done].startswith(closing):
        raise RowFault(f"the chat template ends turn {done} differently when others follow", _OTHER_TEMPLATE)
    segments = [Segment(pieces[done].removeprefix(closing), done)]
    for place in range(done, len(pieces) - 1):
        segments += [Segment("", place, content=True), Segment(pieces[place + 1], place)]
    return segments
