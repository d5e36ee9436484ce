"""The tokenizer's own chat template, taken apart so that the label mask needs no search.

The template is rendered once per sequence of roles with a placeholder in place of each content. Splitting that text at
the placeholders gives the frame: what the template itself writes before, between and after the contents. A
conversation is then the frame with its contents filled in, and one real rendering checks that this is the same text
(contents may come out trimmed, as Llama's template does).

The answer is what follows the generation prompt, up to and including the token that ends the turn. Each answer is laid
out as the newest turn. For most templates that is the text of the whole conversation. Some change earlier turns once
later ones follow (Qwen3 drops an empty thinking block): there the prompt of the second answer keeps the first as it was
written, which is noted in the audit.

A template that rewrites contents (splits a reasoning part off, say) has no frame. Such a conversation is rendered for
real turn by turn; every rendering must then begin with the one before it, and contents must not spell out control
tokens, because nothing tells them from the template's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from surefoot.data import chat_jinja
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.segments import Segment, Template, require_turns
from surefoot.data.text_encoder import Piece, TextEncoder
from surefoot.errors import Fault, InputError

_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")  # private-use characters: no template looks for them
_UNSTABLE = "the chat template changes earlier answers once later turns follow; each is kept as it was written"
_PROBE = ("user", "assistant", "user", "assistant")


def make_chat_template(encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    """The tokenizer's template as a value. InputError when it has none, or none that can be trained with."""
    tokenizer = encoder.tokenizer
    if tokenizer.chat_template is None:
        raise InputError(Fault("data.template", "the tokenizer has no chat template", "choose llama3, alpaca or plain"))
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, none of them the default
        raise InputError(Fault("data.template", f"tokenizer: {error}")) from None
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    chat = _Chat(source, tokens, encoder, tuple(stop_ids))
    try:
        chat.frame(_PROBE[:2])
    except RowFault as fault:
        raise InputError(Fault("data.template", f"tokenizer: {fault.what}", fault.fix)) from None
    dated = chat_jinja.PRINTS_DATE in source
    return Template(
        "tokenizer",
        identity=repr((source, sorted(tokens.items()))),
        stop_ids=chat.stop_ids,
        segments=chat.segments,
        notes=(f"the chat template prints today's date; it is always {chat_jinja.TODAY:%d %b %Y} here",) * dated,
        dialogue_notes=() if chat.is_stable() else (_UNSTABLE,),
    )


@dataclass(frozen=True)
class _Check:
    """A rendering of the first `turns` turns, taken apart: pieces[i] stands before content i. since: the first turn
    whose content is read from it."""

    turns: int
    generation_prompt: bool
    pieces: tuple[str, ...]
    since: int


@dataclass(frozen=True)
class _Frame:
    """Segments in order, contents still empty, and the renderings that tell how the contents come out."""

    segments: tuple[Segment, ...]
    checks: tuple[_Check, ...]
    stable: bool


@dataclass
class _Chat:
    source: str
    tokens: dict[str, str]
    encoder: TextEncoder
    stop_ids: tuple[int, ...]
    _frames: dict[tuple[str, ...], _Frame] = field(default_factory=dict)

    def is_stable(self) -> bool:
        """Whether later turns leave earlier ones as they were."""
        try:
            return self.frame(_PROBE).stable
        except RowFault:
            return True  # it takes no second answer; a conversation that has one is refused when it comes

    def render(self, turns: Sequence[Turn], generation_prompt: bool) -> str:
        return chat_jinja.render(self.source, turns, self.tokens, generation_prompt)

    def segments(self, conversation: Conversation) -> tuple[Segment, ...]:
        require_turns(conversation, "tokenizer")
        turns = conversation.turns
        frame = self.frame(tuple(turn.role for turn in turns))
        contents: list[str] = []
        for check in frame.checks:
            rendered = self.render(turns[: check.turns], check.generation_prompt)
            found = _contents(check.pieces, [turn.text for turn in turns[: check.turns]], rendered)
            if found is None:
                return tuple(self._as_rendered(turns))
            contents += found[check.since :]
        return tuple(
            Segment(contents[segment.turn], segment.turn, content=True, answer=segment.answer)
            if segment.content
            else segment
            for segment in frame.segments
        )

    def frame(self, roles: tuple[str, ...]) -> _Frame:
        if roles not in self._frames:
            self._frames[roles] = self._make_frame(roles)
        return self._frames[roles]

    def _make_frame(self, roles: tuple[str, ...]) -> _Frame:
        """Answer by answer: the prompt before it (from the end of the previous answer on), itself, what ends it."""
        turns = [Turn(role, f"\ue000{place}\ue001") for place, role in enumerate(roles)]
        segments: list[Segment] = []
        checks: list[_Check] = []
        done, closing, rest = 0, "", ""  # turns laid out; what ended the last of them; what the template adds then
        for answer in [place for place, role in enumerate(roles) if role == "assistant"]:
            prompt, whole = self._around_answer(turns[: answer + 1])
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
            segments += _prompt_segments(prompt, done, closing)
            checks.append(_Check(len(roles), True, prompt, done))
        else:
            segments.append(Segment(rest, done - 1))
        laid_out = "".join(turns[segment.turn].content if segment.content else segment.text for segment in segments)
        stable = laid_out == self.render(turns, generation_prompt=is_open)
        if stable:
            checks = [_Check(len(roles), is_open, checks[-1].pieces, 0)]
        return _Frame(tuple(segments), tuple(checks), stable)

    def _around_answer(self, turns: Sequence[Turn]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the template writes for all turns but the last, which is an answer, and for all of them."""
        answer = len(turns) - 1
        prompt = self._split(turns[:answer], generation_prompt=True)
        whole = self._split(turns, generation_prompt=False)
        if whole[:answer] != prompt[:answer] or not whole[answer].startswith(prompt[answer]):
            raise RowFault("the chat template's generation prompt is not how its answers begin", _OTHER_TEMPLATE)
        return prompt, whole

    def _split(self, turns: Sequence[Turn], generation_prompt: bool) -> tuple[str, ...]:
        """What the template writes around the contents: len(turns) + 1 texts."""
        parts = _PLACEHOLDER.split(self.render(turns, generation_prompt))
        if parts[1::2] != [str(place) for place in range(len(turns))]:
            roles = ", ".join(turn.role for turn in turns)
            raise RowFault(
                f"the chat template does not print every turn of ({roles}) once and in order", _OTHER_TEMPLATE
            )
        return tuple(parts[::2])

    def _closing(self, turns: Sequence[Turn], text: str) -> tuple[str, str]:
        """What follows the last content, cut behind the token that ends the turn.

        Some templates write more after the very last turn (Phi-3: <|end|>, then EOS once), so what counts is what also
        stands there when another turn follows: a known stop token in it, or else the template's own control token.
        """
        try:
            following = self._split([*turns, Turn("user", f"\ue000{len(turns)}\ue001")], generation_prompt=False)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, following[len(turns)], strict=False))
            common = "".join(one for one, _ in same)
        except RowFault:  # it takes no further turn
            common = text
        for scope, wanted in ((common, self.stop_ids), (common, self.encoder.control), (text, self.stop_ids)):
            found = self._first(scope, wanted)
            if found is not None:
                end, number = found
                self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, number)))
                return text[:end], text[end:]
        raise RowFault(f"the chat template ends an answer with {text!r}, which holds no token that stops a model")

    def _first(self, text: str, wanted: Collection[int]) -> tuple[int, int] | None:
        """Where the first of these tokens ends in the text, and which it is."""
        ids, spans = self.encoder.spans(Piece(text, literal=False, opening=False))
        return next(((end, number) for number, (_, end) in zip(ids, spans, strict=True) if number in wanted), None)

    def _as_rendered(self, turns: Sequence[Turn]) -> Iterator[Segment]:
        """Without a frame: texts as the template renders them, contents not told apart."""
        spelled = [name for turn in turns for name in self.encoder.control_text(turn.text)]
        if spelled:
            raise RowFault(
                f"the text holds {spelled[0]!r} and the chat template rewrites texts", "remove it from the text"
            )
        written, rest = "", ""
        for answer in [place for place, turn in enumerate(turns) if turn.role == "assistant"]:
            prompt = self.render(turns[:answer], generation_prompt=True)
            whole = self.render(turns[: answer + 1], generation_prompt=False)
            if not prompt.startswith(written) or not whole.startswith(prompt):
                raise RowFault(f"the chat template rewrites what comes before turn {answer + 1}", _ONE_ANSWER)
            tail = whole.removeprefix(prompt)
            stop = self._first(tail, self.stop_ids)
            text, rest = (tail[: stop[0]], tail[stop[0] :]) if stop else (tail, "")
            yield Segment(prompt.removeprefix(written), answer)
            yield Segment(text, answer, answer=True)
            written = prompt + text
        if turns[-1].role != "assistant":
            prompt = self.render(turns, generation_prompt=True)
            if not prompt.startswith(written):
                raise RowFault("the chat template rewrites what was said before", _ONE_ANSWER)
            rest = prompt.removeprefix(written)
        yield Segment(rest, len(turns) - 1)


_OTHER_TEMPLATE = "choose another data.template (llama3, alpaca, plain)"
_ONE_ANSWER = "shorten the conversation to one answer"


def _prompt_segments(pieces: Sequence[str], done: int, closing: str) -> list[Segment]:
    """The segments from turn `done` on to where the answer begins. closing: what has already been laid out of it."""
    if not pieces[done].startswith(closing):
        raise RowFault(f"the chat template ends turn {done} differently once others follow", _OTHER_TEMPLATE)
    segments = [Segment(pieces[done].removeprefix(closing), done)]
    for place in range(done, len(pieces) - 1):
        segments += [Segment("", place, content=True), Segment(pieces[place + 1], place)]
    return segments


def _contents(pieces: Sequence[str], texts: Sequence[str], rendered: str) -> list[str] | None:
    """Each text as it stands in the rendering between the pieces: as it is, or trimmed. None when it is neither."""
    found: list[str] = []
    position = len(pieces[0]) if rendered.startswith(pieces[0]) else -1
    for text, after in zip(texts, pieces[1:], strict=True):
        forms = (text, text.strip(), text.lstrip(), text.rstrip())
        form = next((form for form in forms if position >= 0 and rendered.startswith(form + after, position)), None)
        if form is None:
            return None
        found.append(form)
        position += len(form) + len(after)
    return found if position == len(rendered) else None
