"""What a template makes of a conversation, and how that becomes token ids.

A template returns segments in order: its own text and the data's text, each marked as the model's or not. The label
mask follows from the marks; no text is ever searched for where an answer begins.

A template's `<|eot_id|>` is a control token; the same characters in a user's text are text. tokenizers can read a
string either way as a whole, so `TextEncoder` takes text in pieces, each marked. Nothing is added to a piece: no BOS,
and no blank before a piece that continues a sequence (SentencePiece-like tokenizers put one before every text).

Text is cut for the tokenizer at the borders between prompt and answer, and nowhere else. A prompt is encoded in one go,
so its ids are what every program gets that renders the same prompt and tokenises it, and they are the ids that
`prompt_ids` gives for generation. The answer starts afresh, as it does when a model writes it. Only where the data
spells out a control token is the run cut further, around each content, so that those characters stay text; and where a
template says so itself, because the tool whose layout it is encodes every slot alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.data.formats import Conversation, RowFault
from surefoot.system.errors import Fault, InputError, is_panic

_LEAD = "\n"  # never merges with what follows; takes the place of the text before a piece


class Piece(NamedTuple):
    """Text that is encoded at once.

    literal: names of control tokens in it are text.
    opening: nothing comes before.
    """

    text: str
    literal: bool
    opening: bool


@contextmanager
def tokenizer_errors(folder: str | Path) -> Iterator[None]:
    """InputError that names the tokenizer.json of `folder` where the library breaks off on what it says."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        what = f"makes the tokenizers library break off: {' '.join(str(error).split())}"
        raise InputError(
            Fault(str(Path(folder) / "tokenizer.json"), what, "take the model's own file", code="SF-TOKENIZER")
        ) from None


class TextEncoder:
    """A tokenizer reduced to what the data layer needs.

    control: id and text of the tokens that only templates use.
    swallows_blanks: those of them that take the white space behind them away.
    puts_blank: a text of its own begins with a blank that is not there (SentencePiece).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InputError(
                Fault(
                    "tokenizer",
                    "has no fast form",
                    "a tokenizer.json must stand beside the weights",
                    code="SF-TOKENIZER",
                )
            )
        self.tokenizer = tokenizer
        self.control = {
            number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.swallows_blanks = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.rstrip
        )
        self.bos_id = cast("int | None", tokenizer.bos_token_id)
        self.size = len(tokenizer)  # every id is below this
        self._backend = tokenizer.backend_tokenizer
        # tokenizer.json may switch both on: examples would be cut or filled with PAD in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        longest_first = sorted(self.control.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # `control_places` of a template's own words, which stand in every example
        self.words_places = functools.lru_cache(maxsize=256)(self.control_places)
        self._lead_ids = self._encode([_LEAD], literal=False)[0]
        alone, after_lead = self._encode(["a", _LEAD + "a"], literal=False)
        self.puts_blank = after_lead != self._lead_ids + alone

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Ids of each piece, not to be changed: equal pieces share theirs. All pieces of one kind go to the tokenizer
        in one call, and each text once: both answers of a pair follow the same prompt."""
        ids: list[list[int]] = [[] for _ in pieces]
        for literal in (False, True):
            places = [place for place, piece in enumerate(pieces) if piece.literal == literal]
            texts = [self._with_lead(pieces[place]) for place in places]
            distinct = list(dict.fromkeys(texts))
            known = dict(zip(distinct, self._encode(distinct, literal) if distinct else [], strict=True))
            for place, text in zip(places, texts, strict=True):
                ids[place] = self._without_lead(pieces[place], known[text])
        return ids

    def spans(self, piece: Piece) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of one piece, and the characters (start, end) that each stands for."""
        text = self._with_lead(piece)
        with self._backend_for(piece.literal) as backend:
            found = backend.encode(text, add_special_tokens=False)
        ids = self._without_lead(piece, found.ids)
        if len(text) == len(piece.text):
            return ids, found.offsets
        if len(ids) == len(found.ids) - len(self._lead_ids):
            return ids, [(start - len(_LEAD), end - len(_LEAD)) for start, end in found.offsets[len(self._lead_ids) :]]
        return self.spans(Piece(piece.text, piece.literal, opening=True))

    def control_text(self, text: str) -> list[str]:
        """The names of control tokens that the text spells out."""
        return self._control_text.findall(text)

    def control_places(self, text: str) -> list[tuple[int, int]]:
        """From where to where in the text the names of control tokens stand."""
        return [found.span() for found in self._control_text.finditer(text)]

    def digest(self) -> str:
        """SHA-256 of everything that decides which ids a text gets."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def _with_lead(self, piece: Piece) -> str:
        return _LEAD + piece.text if self.puts_blank and not piece.opening else piece.text

    def _without_lead(self, piece: Piece, ids: list[int]) -> list[int]:
        if piece.opening or not self.puts_blank:
            return ids
        count = len(self._lead_ids)
        if ids[:count] == self._lead_ids:
            return ids[count:]
        return self._encode([piece.text], piece.literal)[0]

    def _encode(self, texts: Sequence[str], literal: bool) -> list[list[int]]:
        with self._backend_for(literal) as backend:
            return [found.ids for found in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @contextmanager
    def _backend_for(self, literal: bool) -> Iterator[Tokenizer]:
        """The backend, for which names of control tokens are text while the block runs where `literal` says so."""
        self._backend.encode_special_tokens = literal
        try:
            # The switch is the backend's, not the call's: left on, the next template would lose its control tokens.
            with tokenizer_errors(self.tokenizer.name_or_path):
                yield self._backend
        finally:
            self._backend.encode_special_tokens = False


class Segment(NamedTuple):
    """A named tuple, like all that is made for every text: a frozen dataclass takes three times as long to make.

    turn: index of the turn it belongs to; -1 for none (definitions of tools), which is never cut.
    content: written in the data, not by the template.
    answer: the model's.
    alone: a text of its own begins here for the tokenizer.
    """

    text: str
    turn: int
    content: bool = False
    answer: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Template:
    """A template, made for one tokenizer.

    segments: raises RowFault for a conversation that it cannot lay out. A conversation that does not end with an answer
        is laid out up to where the model begins to write.
    identity: all that its output depends on besides the conversation.
    stop_ids: tokens that end an answer.
    jinja: the chat template that makes other programs write the same; takes BOS, which it puts at the start, or "".
    notes, dialogue_notes: what a reader of the audit should know, always and where there are several answers.
    repeats_bos: BOS stands before later turns as well.
    learns_behind_stop: what follows a stop token is learned, too.
    last_stops: of several answers the last alone ends with a stop token.
    at_once: a conversation as it is rendered in one go, with the generation prompt or not, where that may differ from
        laying it out answer by answer.
    """

    name: str
    identity: str
    stop_ids: tuple[int, ...]
    segments: Callable[[Conversation], tuple[Segment, ...]]
    jinja: Callable[[str], str]
    notes: tuple[str, ...] = ()
    dialogue_notes: tuple[str, ...] = ()
    repeats_bos: bool = False
    learns_behind_stop: bool = False
    last_stops: bool = False
    at_once: Callable[[Conversation, bool], tuple[Segment, ...]] | None = None


class Run(NamedTuple):
    """Neighbouring segments that are all prompt, or all one answer; their ids[T], and how many names of control tokens
    the data spells out in them."""

    segments: Sequence[Segment]
    ids: array[int]
    spelled_out: int

    @property
    def answer(self) -> bool:
        return self.segments[0].answer

    @property
    def turn(self) -> int:
        return self.segments[0].turn


def encode_runs(layouts: Sequence[Sequence[Segment]], encoder: TextEncoder, bos_id: int | None) -> list[list[Run]]:
    """The runs of each layout with their ids. BOS stands once at the start, or not at all where bos_id is None."""
    if bos_id is None:
        layouts = [_without_bos(segments, encoder) for segments in layouts]
    texts = [list(_texts(segments, encoder)) for segments in layouts]
    cut = [[pieces_of(text, encoder, opening=place == 0) for place, text in enumerate(layout)] for layout in texts]
    encoded = iter(encoder.encode([piece for layout in cut for pieces in layout for piece in pieces]))
    return [
        _begin(
            [_encoded(text, pieces, encoded, encoder) for text, pieces in zip(layout, layout_pieces, strict=True)],
            encoder,
            bos_id,
        )
        for layout, layout_pieces in zip(texts, cut, strict=True)
    ]


def _encoded(
    segments: Sequence[Segment], pieces: Sequence[Piece], encoded: Iterator[list[int]], encoder: TextEncoder
) -> Run:
    """encoded: ids of all pieces from these segments' on."""
    ids = array("I", next(encoded))
    for _ in pieces[1:]:
        ids.extend(next(encoded))
    return Run(segments, ids, sum([len(encoder.control_text(piece.text)) for piece in pieces if piece.literal]))


def prompt_ids(conversation: Conversation, template: Template, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    """What the model is given to continue a conversation that ends before an answer: the ids it was trained on."""
    (runs,) = encode_runs([template.segments(conversation)], encoder, bos_id)
    return [number for run in runs for number in run.ids]


def text_ids(text: str, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    """A text to be continued as it is, behind one BOS, whether or not it spells BOS out; None puts none. Other control
    tokens may be spelled out, too."""
    (ids,) = encoder.encode([Piece(text, literal=False, opening=True)])
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def require_turns(conversation: Conversation, name: str) -> None:
    if conversation.turns[0].role == "text":
        raise RowFault(f"the {name} template lays out turns, and a text record has none", "choose data.template plain")


def pieces_of(segments: Sequence[Segment], encoder: TextEncoder, opening: bool) -> list[Piece]:
    """One piece, or one per segment where the data spells out a control token.

    segments: of one run, with text.
    opening: nothing comes before.
    """
    opening = opening or segments[0].alone
    text = "".join([segment.text for segment in segments])
    found = encoder.control_places(text)
    if not found or found == _own_places(segments, encoder):  # so none arises where two segments meet, either
        return [Piece(text, literal=False, opening=opening)]
    return [
        Piece(segment.text, literal=segment.content, opening=opening and place == 0)
        for place, segment in enumerate(segments)
    ]


def token_spans(
    segments: Sequence[Segment], encoder: TextEncoder, opening: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[Segment, int, int]]]]:
    """For each piece of a run: from which character [T] to which [T] each of its tokens reaches, and from where to
    where each of its segments does."""
    pieces = pieces_of(segments, encoder, opening)
    groups = [segments] if len(pieces) == 1 else [[segment] for segment in segments]
    for piece, group in zip(pieces, groups, strict=True):
        starts, ends = np.array(encoder.spans(piece)[1], dtype=np.int64).reshape(-1, 2).T
        borders = itertools.pairwise(itertools.accumulate((len(one.text) for one in group), initial=0))
        yield starts, ends, [(one, *border) for one, border in zip(group, borders, strict=True)]


def _own_places(segments: Sequence[Segment], encoder: TextEncoder) -> list[tuple[int, int]]:
    """From where to where in their text the template itself writes control tokens."""
    places: list[tuple[int, int]] = []
    at = 0
    for segment in segments:
        if not segment.content:
            places += [(at + start, at + end) for start, end in encoder.words_places(segment.text)]
        at += len(segment.text)
    return places


def _texts(segments: Sequence[Segment], encoder: TextEncoder) -> Iterator[list[Segment]]:
    """The segments of each run."""
    before = ""
    for group in _groups(segments):
        first = group[0]
        if before.endswith(encoder.swallows_blanks) and not (first.content or first.alone):  # as if encoded in one go
            stripped = first.text.lstrip()
            group[:1] = [first._replace(text=stripped)] if stripped else []
        if group:
            yield group
        before = group[-1].text if group else ""


def _groups(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Those with text: neighbours in one text of the tokenizer's that are all prompt, or all one answer."""
    group: list[Segment] = []
    whose = None
    for segment in segments:
        if not segment.text:
            continue
        own = segment.turn if segment.answer else None
        if group and (segment.alone or own != whose):
            yield group
            group = []
        group.append(segment)
        whose = own
    if group:
        yield group


def _without_bos(segments: Sequence[Segment], encoder: TextEncoder) -> Sequence[Segment]:
    """BOS at the very start goes before the text is encoded: some tokenizers read what follows otherwise behind it."""
    first, bos = segments[0], str(encoder.tokenizer.bos_token or "")
    if first.content or not bos:
        return segments
    return [first._replace(text=first.text.removeprefix(bos)), *segments[1:]]


def _begin(runs: list[Run], encoder: TextEncoder, bos_id: int | None) -> list[Run]:
    """A template may have written BOS already, or not, or a data file's template twice: exactly one remains."""
    first, own = runs[0], array("I", () if bos_id is None else (bos_id,))
    written = itertools.takewhile(lambda number: number in (encoder.bos_id, bos_id), first.ids)
    return [first._replace(ids=own + first.ids[len(list(written)) :]), *runs[1:]]
