"""Templates as lists of text segments, and their encoding as token ids.

A template returns segments in order: its own text and the data's text, each marked as part of an answer or not. The
label mask follows from the marks; the text is never searched for the start of an answer.

`<|eot_id|>` written by the template is a control token; the same characters in a user's text are plain text. The
tokenizers library treats a whole string one way or the other, so `TextEncoder` takes text in pieces, each marked.
Nothing is added to a piece: no BOS, and no space before a piece that continues a sequence (SentencePiece-like
tokenizers add one to every text).

The text is split for the tokenizer only at the borders between prompt and answer. A prompt is encoded as one string, so
its ids are those of every program that renders and tokenizes the same prompt, and those that `prompt_ids` returns for
generation. The answer is encoded separately, because a model that generates it starts with a new token as well. There
are two exceptions: if the data spells out a control token, each content is a piece of its own, so that those characters
stay text; and a template may ask for a split, because the tool it reproduces encodes every slot separately.
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
from typing import Literal, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.data.formats import Conversation, RowFault
from surefoot.system.errors import Fault, InputError, is_panic

TrainOn = Literal["responses", "last", "completion", "everything"]
_LEAD = "\n"  # never merges with what follows; stands in for the text before a piece


class Piece(NamedTuple):
    """Text that is encoded as one string.

    literal: names of control tokens in it are plain text.
    opening: it is the start of a sequence.
    """

    text: str
    literal: bool
    opening: bool


@contextmanager
def tokenizer_errors(folder: str | Path) -> Iterator[None]:
    """Turn a panic of the tokenizers library into an InputError that names the tokenizer.json of `folder`."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        what = f"makes the tokenizers library crash: {' '.join(str(error).split())}"
        raise InputError(
            Fault(str(Path(folder) / "tokenizer.json"), what, "use the model's original file", code="SF-TOKENIZER")
        ) from None


class TextEncoder:
    """A tokenizer, reduced to what the data layer needs.

    control: id -> text of the special tokens, which only templates write.
    swallows_blanks: texts of the special tokens that strip the white space after them.
    puts_blank: whether the tokenizer adds a space to the start of a text (SentencePiece).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InputError(
                Fault(
                    "tokenizer",
                    "is not a fast tokenizer",
                    "add a tokenizer.json to the model's folder",
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
        # tokenizer.json may enable both, which would silently truncate or pad examples.
        self._backend.no_truncation()
        self._backend.no_padding()
        longest_first = sorted(self.control.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # `control_places` of the template's own text, which is the same in every example
        self.words_places = functools.lru_cache(maxsize=256)(self.control_places)
        self._lead_ids = self._encode([_LEAD], literal=False)[0]
        alone, after_lead = self._encode(["a", _LEAD + "a"], literal=False)
        self.puts_blank = after_lead != self._lead_ids + alone

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Return the ids of each piece. Do not modify them: equal pieces share one list. All literal and all other
        pieces are each encoded in one call, and each distinct text once (both answers of a pair have one prompt)."""
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
        """Return the ids of one piece, and the (start, end) characters of each."""
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
        """Return the names of control tokens that the text spells out."""
        return self._control_text.findall(text)

    def control_places(self, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) of each control-token name in the text."""
        return [found.span() for found in self._control_text.finditer(text)]

    def digest(self) -> str:
        """Return the SHA-256 of everything that decides which ids a text gets."""
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
        """Yield the backend; with `literal`, it treats names of control tokens as plain text inside the block."""
        self._backend.encode_special_tokens = literal
        try:
            # The switch is state of the backend: left on, the next template would lose its control tokens.
            with tokenizer_errors(self.tokenizer.name_or_path):
                yield self._backend
        finally:
            self._backend.encode_special_tokens = False


class Segment(NamedTuple):
    """A stretch of formatted text. A named tuple, because a frozen dataclass takes three times as long to create.

    turn: index of the turn it belongs to; -1 for none (tool definitions), which is never truncated.
    content: it comes from the data, not from the template.
    answer: it is part of an answer.
    alone: the tokenizer starts a new text here.
    """

    text: str
    turn: int
    content: bool = False
    answer: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Template:
    """A chat template, bound to one tokenizer.

    identity: everything that its output depends on besides the conversation.
    stop_ids: tokens that end an answer.
    segments: format a conversation; raises RowFault if the template cannot. A conversation that does not end with an
        answer is formatted up to where the model begins to write.
    jinja: return the equivalent Jinja chat template for other programs; the argument is the BOS text to put at the
        start, or "".
    notes, dialogue_notes: remarks for the audit: always, and for conversations with several answers.
    repeats_bos: BOS also appears before later turns.
    learns_behind_stop: text after a stop token is learned as well.
    last_stops: only the last of several answers ends with a stop token.
    at_once: format a conversation in a single rendering, with the generation prompt if True; None if this cannot differ
        from formatting it answer by answer.
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
    """Neighboring segments that are all prompt or all one answer.

    ids: [T].
    spelled_out: number of control-token names that the data spells out in them.
    """

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
    """Split each layout into runs and encode them. BOS appears once at the start, or nowhere if bos_id is None."""
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
    """Build a run. `encoded` iterates over the ids of all pieces, starting with those of these segments."""
    ids = array("I", next(encoded))
    for _ in pieces[1:]:
        ids.extend(next(encoded))
    return Run(segments, ids, sum([len(encoder.control_text(piece.text)) for piece in pieces if piece.literal]))


def prompt_ids(conversation: Conversation, template: Template, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    """Return the ids that a model continues for a conversation that ends before an answer, as in training."""
    (runs,) = encode_runs([template.segments(conversation)], encoder, bos_id)
    return [number for run in runs for number in run.ids]


def text_ids(text: str, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    """Encode a plain text for continuation, with exactly one BOS at the start (none if bos_id is None), even if the
    text spells out BOS. Control tokens that the text spells out are encoded as such."""
    (ids,) = encoder.encode([Piece(text, literal=False, opening=True)])
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def require_turns(conversation: Conversation, name: str) -> None:
    if conversation.turns[0].role == "text":
        raise RowFault(f"the {name} template needs turns, but a text record has none", "choose data.template: plain")


def pieces_of(segments: Sequence[Segment], encoder: TextEncoder, opening: bool) -> list[Piece]:
    """Join the segments into one piece, or make one piece per segment if the data spells out a control token.

    segments: the non-empty segments of one run.
    opening: the run is the start of the sequence.
    """
    opening = opening or segments[0].alone
    text = "".join([segment.text for segment in segments])
    found = encoder.control_places(text)
    if not found or found == _own_places(segments, encoder):  # also none across the border of two segments
        return [Piece(text, literal=False, opening=opening)]
    return [
        Piece(segment.text, literal=segment.content, opening=opening and place == 0)
        for place, segment in enumerate(segments)
    ]


def token_spans(
    segments: Sequence[Segment], encoder: TextEncoder, opening: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[Segment, int, int]]]]:
    """Iterate over the pieces of a run: the first character [T] and the end [T] of each token, and each segment with
    its (start, end) in the same text."""
    pieces = pieces_of(segments, encoder, opening)
    groups = [segments] if len(pieces) == 1 else [[segment] for segment in segments]
    for piece, group in zip(pieces, groups, strict=True):
        starts, ends = np.array(encoder.spans(piece)[1], dtype=np.int64).reshape(-1, 2).T
        borders = itertools.pairwise(itertools.accumulate((len(one.text) for one in group), initial=0))
        yield starts, ends, [(one, *border) for one, border in zip(group, borders, strict=True)]


def _own_places(segments: Sequence[Segment], encoder: TextEncoder) -> list[tuple[int, int]]:
    """Return the (start, end) of the control tokens that the template itself writes in the joined text."""
    places: list[tuple[int, int]] = []
    at = 0
    for segment in segments:
        if not segment.content:
            places += [(at + start, at + end) for start, end in encoder.words_places(segment.text)]
        at += len(segment.text)
    return places


def _texts(segments: Sequence[Segment], encoder: TextEncoder) -> Iterator[list[Segment]]:
    """Yield the segments of each run, with the white space removed that a special token before them strips."""
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
    """Group the non-empty segments: neighbors that are all prompt or all one answer, split at `alone`."""
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
    """Remove a BOS at the start before encoding: some tokenizers encode the text after it differently."""
    first, bos = segments[0], str(encoder.tokenizer.bos_token or "")
    if first.content or not bos:
        return segments
    return [first._replace(text=first.text.removeprefix(bos)), *segments[1:]]


def _begin(runs: list[Run], encoder: TextEncoder, bos_id: int | None) -> list[Run]:
    """Put exactly one BOS at the start (or none), however many the template wrote."""
    first, own = runs[0], array("I", () if bos_id is None else (bos_id,))
    written = itertools.takewhile(lambda number: number in (encoder.bos_id, bos_id), first.ids)
    return [first._replace(ids=own + first.ids[len(list(written)) :]), *runs[1:]]


def learned_turns(
    parts: Sequence[Run] | Sequence[Segment], conversation: Conversation, train_on: TrainOn
) -> frozenset[int]:
    """Return the turns whose answers are learned. With "last", earlier answers are part of the prompt."""
    turns = [part.turn for part in parts if part.answer and conversation.turns[part.turn].learned]
    return frozenset(turns[-1:] if train_on == "last" else turns)
