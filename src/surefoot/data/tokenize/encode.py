"""Encode conversations as token ids with a label mask, for each kind of data.

The mask comes from the marks that the template sets on its segments; the text is never searched for answers. An example
that is too long is truncated (see `truncate`) or, if plain texts are learned in full, split into several examples
(`in_chunks`). Every truncation, every stop token lost by it and every example without labels left is reported.

Pairs: both rows begin with the same prompt tokens. If a pair is too long, both rows lose the same part of the prompt,
until the longer answer fits or the prompt is down to a quarter of the room; then the ends of answers are cut. Tokens
that the template writes after an answer's stop token are dropped: they are not learned, and a reward model scores an
answer at its last token, which must be the one that a policy stops with. Prompts for rollouts are never truncated: the
policy would answer another question.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from surefoot.data.formats import Conversation, RowFault
from surefoot.data.formats.conversation import Picture
from surefoot.data.formats.reader import each_row
from surefoot.data.sources.records import Kind, rows_per_item
from surefoot.data.tokenize.picture_processor import PictureProcessor
from surefoot.data.tokenize.segments import (
    Run,
    Segment,
    Template,
    TextEncoder,
    TrainOn,
    encode_runs,
    learned_turns,
)
from surefoot.data.tokenize.truncate import Truncation, choose_tokens
from surefoot.data.tokenize.whole import encode_whole
from surefoot.system.errors import Fault, InputError

Encoding = Literal["parts", "whole"]
# Conversations per tokenizer call: enough for its threads, and small enough that results stay in the CPU caches (1,024
# take 4 to 8 % longer).
_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """How conversations become token ids with a label mask.

    bos_id: BOS, put first exactly once; None for no BOS.
    max_length: maximum tokens of an example.
    kind: what is learned from a record; train_on, chunks and encoding apply to "answers" only.
    train_on: which tokens get labels. responses = all answers, last = the last answer, completion = everything after
        the first prompt, everything = all tokens but the first. Answers that the data marks as not to be learned never
        count as answers.
    chunks: split a text that is too long into several examples.
    encoding: parts = tokenize an answer separately from its prompt; whole = tokenize prompt and answer as one text, and
        truncate at the end.
    processor: of a vision model's pictures; None for other models. Picture tokens get no labels, and a conversation
        with pictures that is too long is dropped, since part of a picture is meaningless.
    """

    encoder: TextEncoder
    bos_id: int | None
    max_length: int
    kind: Kind = "answers"
    train_on: TrainOn = "responses"
    chunks: bool = False
    encoding: Encoding = "parts"
    processor: PictureProcessor | None = None


class Encoded(NamedTuple):
    """One example as token ids with a label mask, and what truncation removed from it.

    ids[T], supervised[T]: as in `Example`.
    number, line: the record it comes from.
    prompt_cut: truncation removed at least the beginning of the user's text.
    prompt_lost: truncation removed all of the user's text.
    stop_lost: truncation removed an answer's stop token, or all answers.
    answers_lost: number of answers that truncation removed completely.
    control_texts: number of control-token names spelled out in the record's texts.
    continues, continued: it is not the first, or not the last, part of its text.
    good: it is the better answer of a pair, or was judged good.
    fits: for a prompt: it has at most max_length tokens.
    fields: for a prompt: its record as JSON.
    given: the record consisted of token ids.

    The caller drops examples without a supervised token.
    """

    ids: np.ndarray
    supervised: np.ndarray
    number: int
    line: int
    truncated: bool = False
    prompt_cut: bool = False
    prompt_lost: bool = False
    stop_lost: bool = False
    answers_lost: int = 0
    control_texts: int = 0
    continues: bool = False
    continued: bool = False
    good: bool = False
    fits: bool = True
    pictures: tuple[Picture, ...] = ()
    fields: bytes = b""
    given: bool = False

    @property
    def usable(self) -> bool:
        """Whether any token has a label."""
        return bool(self.supervised.any())


class Row(NamedTuple):
    """A conversation formatted and encoded in parts, before truncation.

    learned: indices of the turns whose answers are learned.
    whole: the untruncated example.
    """

    conversation: Conversation
    runs: Sequence[Run]
    learned: frozenset[int]
    whole: Encoded


def encode(
    conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str
) -> Iterator[Encoded]:
    """Iterate over the examples of these conversations, in order: one per conversation, or several for a text that is
    split into chunks.

    Pairs come as better, worse, better, worse …, both as input and as output. If truncation leaves one answer of a pair
    without labels, or a pair with pictures is too long, both examples have no labels. Prompts are what a model
    continues (`segments.prompt_ids`); one of more than max_length tokens is not truncated, and `fits` is False.

    name: the file, for InputErrors.
    """
    if any(one.tokens for one in conversations):
        found = each_row(conversations, lambda one: _given(one, how, template.stop_ids), name)
        size = rows_per_item(how.kind)
        for item in zip(*[iter(found)] * size, strict=True):
            yield from item if all(one.usable for one in item) else map(_nothing_learned, item)
        return
    if how.kind == "answers" and how.encoding == "whole":
        for start in range(0, len(conversations), _CHUNK):
            yield from _in_one_go(conversations[start : start + _CHUNK], template, how, name)
        return
    rows = _rows(conversations, template, how, name)
    if how.kind == "pairs":
        for better, worse in zip(rows, rows, strict=True):
            yield from _pair(better, worse, template, how, name)
        return
    of_row = {"answers": _answered, "judged": _judged, "prompts": _prompted}[how.kind]
    for row in rows:
        yield from of_row(row, template, how)


def _given(conversation: Conversation, how: EncodeSettings, stop_ids: Sequence[int]) -> Encoded:
    """Return the example of a record of token ids, truncated at its end."""
    if conversation.tokens is None:
        raise RowFault("has texts, but other records have token ids", "put them into another file")
    ids = np.array(conversation.tokens.ids, dtype=np.int64)
    if ids.min() < 0 or ids.max() >= how.encoder.size:
        number = next(number for number in conversation.tokens.ids if not 0 <= number < how.encoder.size)
        what = f"has the token id {number}, but the tokenizer has {how.encoder.size} ids"
        raise RowFault(what, "tokenize the data with the tokenizer of this model")
    learned = np.array(conversation.tokens.learned, dtype=bool)
    learned[0] = False  # nothing predicts the first token
    whole = Encoded(
        ids.astype(np.uint32),
        learned,
        conversation.number,
        conversation.line,
        good=bool(conversation.good),
        given=True,
    )
    return whole if len(ids) <= how.max_length else _without_end(whole, how.max_length, stop_ids)


def _rows(conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str) -> Iterator[Row]:
    train_on, processor = how.train_on if how.kind == "answers" else "responses", how.processor

    def lay_out(conversation: Conversation) -> Sequence[Segment]:
        segments = template.segments(conversation)
        return processor.spread(segments, conversation.pictures) if processor else segments

    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        layouts = each_row(chunk, lay_out, name)
        for conversation, runs in zip(chunk, encode_runs(layouts, how.encoder, how.bos_id), strict=True):
            learned = learned_turns(runs, conversation, train_on)
            whole = Encoded(
                _ids(runs),
                _mask(runs, learned, train_on),
                conversation.number,
                conversation.line,
                control_texts=sum([run.spelled_out for run in runs]),
                good=bool(conversation.good),
                pictures=conversation.pictures,
            )
            if processor and whole.pictures:
                whole = whole._replace(supervised=whole.supervised & ~processor.within(whole.ids, whole.pictures))
            yield Row(conversation, runs, learned, whole)


def _answered(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    if len(row.whole.ids) <= how.max_length:
        yield row.whole
    elif row.whole.pictures:
        yield _nothing_learned(row.whole)
    elif how.chunks:
        yield from in_chunks(row.whole, how.max_length)
    else:
        yield cut_to(row, _choose_tokens(row, how), template.stop_ids)


def _judged(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    if _end(row) <= how.max_length:
        yield _without_tail(row, _end(row))
    elif row.whole.pictures:
        yield _nothing_learned(row.whole)
    else:
        yield cut_to(row, _choose_tokens(row, how), template.stop_ids)


def _prompted(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    fields = json.dumps(row.conversation.record, ensure_ascii=False, default=str).encode()
    yield _nothing_learned(row.whole)._replace(fits=len(row.whole.ids) <= how.max_length, fields=fields)


def _nothing_learned(whole: Encoded) -> Encoded:
    return whole._replace(supervised=np.zeros_like(whole.supervised))


def _in_one_go(
    conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str
) -> Iterator[Encoded]:
    found = encode_whole(conversations, template, how.encoder, how.bos_id, how.train_on, name)
    for conversation, (ids, mask, spelled_out) in zip(conversations, found, strict=True):
        whole = Encoded(ids, mask, conversation.number, conversation.line, control_texts=spelled_out)
        yield whole if len(ids) <= how.max_length else _without_end(whole, how.max_length, template.stop_ids)


def _without_end(whole: Encoded, max_length: int, stop_ids: Sequence[int]) -> Encoded:
    kept = slice(max_length)
    stops = whole.supervised & np.isin(whole.ids, stop_ids)
    return whole._replace(
        ids=whole.ids[kept],
        supervised=whole.supervised[kept],
        truncated=True,
        stop_lost=bool(stops.sum() > stops[kept].sum()),
    )


def in_chunks(whole: Encoded, max_length: int) -> Iterator[Encoded]:
    """Split a text into parts of at most max_length tokens, such that every token is learned exactly once.

    The last token of a part is also the first of the next one, without a label there: it is the input from which the
    following token is predicted. Otherwise parts do not overlap, and only the first part has the BOS.
    """
    starts = range(0, len(whole.ids) - 1, max_length - 1)
    for start in starts:
        part = slice(start, start + max_length)
        supervised = whole.supervised[part].copy()
        supervised[0] = False
        yield whole._replace(
            ids=whole.ids[part],
            supervised=supervised,
            continues=start > 0,
            continued=start != starts[-1],
        )


def _ids(runs: Sequence[Run]) -> np.ndarray:
    ids = array("I")
    for run in runs:
        ids += run.ids
    return np.frombuffer(ids, dtype=np.uint32)


def _mask(runs: Sequence[Run], learned: Collection[int], train_on: TrainOn) -> np.ndarray:
    marks = [run.turn in learned if run.answer else train_on == "everything" for run in runs]
    if train_on == "completion":
        marks = list(itertools.accumulate(marks, max))
    mask = bytearray()  # eight times faster than NumPy for so few elements
    for run, mark in zip(runs, marks, strict=True):
        mask += bytes([mark]) * len(run.ids)
    mask[0] = False
    return np.frombuffer(mask, dtype=bool)


def _answers(runs: Sequence[Run], learned: Collection[int]) -> np.ndarray:
    """Return for each token the number (from 1) of the turn whose learned answer it belongs to, else 0: [tokens]."""
    turns = [run.turn + 1 if run.answer and run.turn in learned else 0 for run in runs]
    return np.repeat(turns, [len(run.ids) for run in runs])


def cut_to(row: Row, cut: Truncation, stop_ids: Sequence[int]) -> Encoded:
    """Truncate the row to the kept tokens, and record what was removed."""
    kept = cut.positions
    whole, answers = row.whole, _answers(row.runs, row.learned)
    before, after = (np.bincount(part, minlength=answers.max() + 1)[1:] > 0 for part in (answers, answers[kept]))
    # An answer that is removed completely counts as lost, not as one without its stop token.
    left = np.append(False, after)[answers]  # all tokens of the answers that are at least partly kept
    stops = left & whole.supervised & np.isin(whole.ids, stop_ids)
    return whole._replace(
        ids=whole.ids[kept],
        supervised=whole.supervised[kept],
        truncated=True,
        prompt_cut=cut.prompt_cut,
        prompt_lost=cut.prompt_lost,
        stop_lost=not left.any() or bool(stops.sum() > stops[kept].sum()),
        answers_lost=int(np.count_nonzero(before & ~after)),
    )


def _pair(better: Row, worse: Row, template: Template, how: EncodeSettings, name: str) -> list[Encoded]:
    """Encode a pair. Raises InputError if the template formats the prompt differently for the two answers."""
    prompt = _begin(better)
    if not np.array_equal(better.whole.ids[:prompt], worse.whole.ids[: _begin(worse)]):
        where = f"{name}:{better.conversation.line}"
        what = f"row {better.conversation.number}: the template writes different prompts before the two answers"
        raise InputError(Fault(where, what, "choose another data.template", code="SF-DATA-TEMPLATE"))
    found = cut_pair(better, worse, prompt, template, how)
    return found if all(one.usable for one in found) else list(map(_nothing_learned, found))


def cut_pair(better: Row, worse: Row, prompt: int, template: Template, how: EncodeSettings) -> list[Encoded]:
    """Truncate both rows of a pair to max_length, with the same prompt tokens left.

    prompt: number of prompt tokens, which are the same in both rows.
    """
    rows, ends, max_length = (better, worse), (_end(better), _end(worse)), how.max_length
    if max(ends) <= max_length:
        return [_without_tail(row, end) for row, end in zip(rows, ends, strict=True)]
    if any(row.whole.pictures for row in rows):
        return [_nothing_learned(row.whole) for row in rows]
    cut = _choose_tokens(rows[int(np.argmax(ends))], how)
    kept = cut.positions[cut.positions < prompt]
    found = []
    for row, end in zip(rows, ends, strict=True):
        answer = np.arange(prompt, end)[: max_length - len(kept)]
        whole = len(kept) == prompt and prompt + len(answer) == end
        own = cut._replace(positions=np.append(kept, answer))
        found.append(_without_tail(row, end) if whole else cut_to(row, own, template.stop_ids))
    return found


def _choose_tokens(row: Row, how: EncodeSettings) -> Truncation:
    return choose_tokens(row.runs, row.learned, row.conversation, row.whole.supervised, how.encoder, how.max_length)


def _begin(row: Row) -> int:
    """Return the position of the first learned token, or the length if there is none."""
    return int(np.argmax(row.whole.supervised)) if row.whole.usable else len(row.whole.ids)


def _end(row: Row) -> int:
    """Return the position after the last learned token, or the length if there is none."""
    places = np.flatnonzero(row.whole.supervised)
    return int(places[-1]) + 1 if len(places) else len(row.whole.ids)


def _without_tail(row: Row, end: int) -> Encoded:
    return row.whole._replace(ids=row.whole.ids[:end], supervised=row.whole.supervised[:end])
