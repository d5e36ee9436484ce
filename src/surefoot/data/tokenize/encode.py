"""From conversations to token ids with a label mask, for each kind of data.

The mask comes from the template's marks, never from a search for the answer. What is too long is truncated (see
`truncate`), or, where texts are learned in full, split into several examples (`in_chunks`). Every truncation, every
stop token lost by it and every example with nothing left to learn is reported.

Pairs: both rows begin with the same tokens. Where a pair is too long, both lose the same part of the prompt, so far
that the longer answer fits or a quarter of the room is left; then answers lose their ends. What a template writes
behind an answer's stop token is left out: nothing learns it, and a reward model scores an answer at its last token,
which is the one that a policy ends with. Prompts are never truncated: a policy would answer a question nobody asked.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from surefoot.data.formats import Conversation, each_row
from surefoot.data.formats.conversation import Picture
from surefoot.data.sources.records import Kind
from surefoot.data.tokenize.segments import Run, Segment, Template, TextEncoder, encode_runs, token_spans
from surefoot.data.tokenize.sight import Sight
from surefoot.data.tokenize.truncate import Kept, keep
from surefoot.system.errors import Fault, InputError

TrainOn = Literal["responses", "last", "completion", "everything"]
Encoding = Literal["parts", "whole"]
# Conversations per call of the tokenizer: enough for its threads, and what it hands back stays in the processor's
# caches: 1,024 take 4 to 8 % longer.
_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """How conversations become token ids with a label mask.

    bos_id: put first, exactly once; None for no BOS.
    max_length: tokens of an example at most.
    kind: what is learned from a record; for other kinds than answers, train_on, chunks and encoding have no meaning.
    train_on: responses = all answers, last = the last answer, completion = all that follows the prompt of the first
        answer, everything = all tokens but the first, which nothing predicts; an answer that the data marks as not to
        be learned is none of these.
    chunks: a text that is too long becomes several examples.
    encoding: parts = an answer is a text of its own for the tokenizer; whole = prompt and answer are encoded in one go,
        and what is too long loses its end.
    sight: of a model that learns pictures, None for others. None of a picture's tokens is learned, and a conversation
        with pictures that is too long is left out whole, since part of a picture means nothing.
    """

    encoder: TextEncoder
    bos_id: int | None
    max_length: int
    kind: Kind = "answers"
    train_on: TrainOn = "responses"
    chunks: bool = False
    encoding: Encoding = "parts"
    sight: Sight | None = None


class Encoded(NamedTuple):
    """One example as token ids with a label mask, and what cutting took from it.

    ids[T], supervised[T]: what `Example` holds.
    number, line: its row.
    prompt_cut: cutting took the beginning of what the user says, or more.
    prompt_lost: cutting took all that the user says.
    stop_lost: cutting took the stop token of an answer, or left no answer.
    answers_lost: answers that cutting took whole.
    control_texts: names of control tokens that the row's texts spell out.
    continues, continued: it is not the first, not the last part of its text.

    An example without a supervised token is to be dropped.
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
    good: bool = False  # the better of a pair, or judged good
    fits: bool = True  # of a prompt: it has no more tokens than it may have
    pictures: tuple[Picture, ...] = ()
    fields: bytes = b""  # of a prompt: its record, as JSON

    @property
    def usable(self) -> bool:
        """Whether there is something to learn."""
        return bool(self.supervised.any())


class Row(NamedTuple):
    """A conversation laid out and encoded in parts, before anything is cut.

    learned: turns whose answers are.
    """

    conversation: Conversation
    runs: Sequence[Run]
    learned: frozenset[int]
    whole: Encoded


def encode(
    conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str
) -> Iterator[Encoded]:
    """The examples of these conversations, in order: one each, of a text in chunks several.

    Pairs come better, worse, better, worse …, as the conversations do; a pair of which one answer is lost whole has
    lost both, and so has one with pictures that is too long. Prompts are what a model continues
    (`segments.prompt_ids`); one that has more than max_length tokens is whole and does not fit.

    name: the file, for InputErrors.
    """
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


def _rows(conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str) -> Iterator[Row]:
    train_on, sight = how.train_on if how.kind == "answers" else "responses", how.sight

    def lay_out(conversation: Conversation) -> Sequence[Segment]:
        segments = template.segments(conversation)
        return sight.spread(segments, conversation.pictures) if sight else segments

    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        layouts = each_row(chunk, lay_out, name)
        for conversation, runs in zip(chunk, encode_runs(layouts, how.encoder, how.bos_id), strict=True):
            learned = _learned_turns(runs, conversation, train_on)
            whole = Encoded(
                _ids(runs),
                _mask(runs, learned, train_on),
                conversation.number,
                conversation.line,
                control_texts=sum([run.spelled_out for run in runs]),
                good=bool(conversation.good),
                pictures=conversation.pictures,
            )
            if sight and whole.pictures:
                whole = whole._replace(supervised=whole.supervised & ~sight.within(whole.ids, whole.pictures))
            yield Row(conversation, runs, learned, whole)


def _answered(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    if len(row.whole.ids) <= how.max_length:
        yield row.whole
    elif row.whole.pictures:
        yield _nothing_learned(row.whole)
    elif how.chunks:
        yield from in_chunks(row.whole, how.max_length)
    else:
        yield cut_to(row, _keep(row, how), template.stop_ids)


def _judged(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    fits = _end(row) <= how.max_length
    yield _first(row, _end(row)) if fits else cut_to(row, _keep(row, how), template.stop_ids)


def _prompted(row: Row, template: Template, how: EncodeSettings) -> Iterator[Encoded]:
    fields = json.dumps(row.conversation.record, ensure_ascii=False, default=str).encode()
    yield _nothing_learned(row.whole)._replace(fits=len(row.whole.ids) <= how.max_length, fields=fields)


def _nothing_learned(whole: Encoded) -> Encoded:
    return whole._replace(supervised=np.zeros_like(whole.supervised))


def _in_one_go(
    conversations: Sequence[Conversation], template: Template, how: EncodeSettings, name: str
) -> Iterator[Encoded]:
    """Examples whose prompt and answer are encoded in one go, as tools that tokenise a finished text do (TRL).

    An answer that begins in the middle of a word then shares a token with the prompt, and a line end at its start may
    merge with one before it; a model that writes the answer itself never sees such tokens. So this is asked for, never
    chosen.
    """
    encoder, bos_id, train_on = how.encoder, how.bos_id, how.train_on
    together = None if train_on in ("responses", "last") else template.at_once  # which marks no ends of answers
    layouts = each_row(conversations, lambda one: together(one, False) if together else template.segments(one), name)
    begun: list[tuple[int, ...]] = []
    if train_on == "completion":
        prompts = [_prompt(*pair, together) for pair in zip(layouts, conversations, strict=True)]
        begun = _encode_whole(prompts, encoder, bos_id)
    for at, (layout, ids) in enumerate(zip(layouts, _encode_whole(layouts, encoder, bos_id), strict=True)):
        if train_on == "everything":
            mask = np.ones(len(ids), dtype=bool)
        elif train_on == "completion":
            mask = _behind_prompt(ids, begun[at])
        else:
            mask = _within_answers(ids, layout, _learned_turns(layout, conversations[at], train_on), encoder)
        mask[0] = False
        whole = Encoded(
            np.array(ids, dtype=np.uint32),
            mask,
            conversations[at].number,
            conversations[at].line,
            control_texts=sum(len(encoder.control_text(segment.text)) for segment in layout if segment.content),
        )
        yield whole if len(ids) <= how.max_length else _without_end(whole, how.max_length, template.stop_ids)


def _prompt(
    layout: Sequence[Segment],
    conversation: Conversation,
    together: Callable[[Conversation, bool], tuple[Segment, ...]] | None,
) -> Sequence[Segment]:
    """What stands before the first answer that is learned: all of it, where none is."""
    learned = _learned_turns(layout, conversation, "completion")
    if together and learned and min(learned) > 0:
        return together(replace(conversation, turns=conversation.turns[: min(learned)]), True)
    return list(itertools.takewhile(lambda one: not (one.answer and one.turn in learned), layout))


def _encode_whole(
    layouts: Sequence[Sequence[Segment]], encoder: TextEncoder, bos_id: int | None
) -> list[tuple[int, ...]]:
    """The ids of each layout; none for one without text."""
    filled = [[segment._replace(answer=False) for segment in layout if segment.text] for layout in layouts]
    runs = iter(encode_runs([layout for layout in filled if layout], encoder, bos_id))
    return [tuple(itertools.chain.from_iterable(run.ids for run in next(runs))) if layout else () for layout in filled]


def _behind_prompt(ids: Sequence[int], prompt: Sequence[int]) -> np.ndarray:
    """True from where the ids leave those of the prompt alone, which is earlier than its end where a token reaches
    across: [tokens]."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False)))
    return np.arange(len(ids)) >= same


def _within_answers(
    ids: Sequence[int], layout: Sequence[Segment], learned: Collection[int], encoder: TextEncoder
) -> np.ndarray:
    """True for every token with a character of an answer in `learned`: [tokens]."""
    filled = [segment for segment in layout if segment.text]
    numbers = itertools.accumulate(segment.alone for segment in filled)  # of the texts, cut where a template says so
    texts = itertools.groupby(zip(numbers, filled, strict=True), key=lambda pair: pair[0])
    marks: list[np.ndarray] = []
    for number, text in texts:
        segments = [segment for _, segment in text]
        for starts, ends, placed in token_spans(segments, encoder, opening=number == filled[0].alone):
            mark = np.zeros(len(starts), dtype=bool)
            for segment, left, right in placed:
                if segment.answer and segment.turn in learned:
                    mark |= (starts < right) & (ends > left) & (starts < ends)
            marks.append(mark)
    # BOS may have been added or taken away at the front, so the ends are aligned.
    return np.concatenate([np.zeros(len(ids), dtype=bool), *marks])[-len(ids) :]


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
    """A text in parts of at most max_length tokens, which together teach what it teaches and nothing twice.

    The last token of a part is the first of the next, where it is not learned: it is there for the token after it to be
    predicted from. Apart from it parts do not overlap, and only the first one has the BOS.
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


def _learned_turns(
    parts: Sequence[Run] | Sequence[Segment], conversation: Conversation, train_on: TrainOn
) -> frozenset[int]:
    """The turns whose answers are learned: with `last`, earlier answers are prompt."""
    turns = [part.turn for part in parts if part.answer and conversation.turns[part.turn].learned]
    return frozenset(turns[-1:] if train_on == "last" else turns)


def _ids(runs: Sequence[Run]) -> np.ndarray:
    """uint32."""
    ids = array("I")
    for run in runs:
        ids += run.ids
    return np.frombuffer(ids, dtype=np.uint32)


def _mask(runs: Sequence[Run], learned: Collection[int], train_on: TrainOn) -> np.ndarray:
    marks = [run.turn in learned if run.answer else train_on == "everything" for run in runs]
    if train_on == "completion":
        marks = list(itertools.accumulate(marks, max))
    mask = bytearray()  # an eighth of the time that NumPy takes for so few numbers
    for run, mark in zip(runs, marks, strict=True):
        mask += bytes([mark]) * len(run.ids)
    mask[0] = False
    return np.frombuffer(mask, dtype=bool)


def _answers(runs: Sequence[Run], learned: Collection[int]) -> np.ndarray:
    """For each token the turn, from 1, whose learned answer it belongs to, 0 for none: [tokens]."""
    turns = [run.turn + 1 if run.answer and run.turn in learned else 0 for run in runs]
    return np.repeat(turns, [len(run.ids) for run in runs])


def cut_to(row: Row, cut: Kept, stop_ids: Sequence[int]) -> Encoded:
    """The row with what is kept alone, and what that took from it."""
    kept = cut.positions
    whole, answers = row.whole, _answers(row.runs, row.learned)
    before, after = (np.bincount(part, minlength=answers.max() + 1)[1:] > 0 for part in (answers, answers[kept]))
    # An answer that is gone whole is counted as lost, not as one that lacks its stop.
    left = np.append(False, after)[answers]  # of the answers of which something is left, all tokens
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
    """Raises InputError where the template lays the prompt out differently before the two answers."""
    prompt = _begin(better)
    if not np.array_equal(better.whole.ids[:prompt], worse.whole.ids[: _begin(worse)]):
        where = f"{name}:{better.conversation.line}"
        what = f"row {better.conversation.number}: the template writes another prompt before the worse answer"
        raise InputError(Fault(where, what, "choose another data.template", code="SF-DATA-TEMPLATE"))
    found = cut_pair(better, worse, prompt, template, how)
    return found if all(one.usable for one in found) else list(map(_nothing_learned, found))


def cut_pair(better: Row, worse: Row, prompt: int, template: Template, how: EncodeSettings) -> list[Encoded]:
    """prompt: tokens of it, the same in both."""
    rows, ends, max_length = (better, worse), (_end(better), _end(worse)), how.max_length
    if max(ends) <= max_length:
        return [_first(row, end) for row, end in zip(rows, ends, strict=True)]
    if any(row.whole.pictures for row in rows):
        return [_nothing_learned(row.whole) for row in rows]
    cut = _keep(rows[int(np.argmax(ends))], how)
    kept = cut.positions[cut.positions < prompt]
    found = []
    for row, end in zip(rows, ends, strict=True):
        answer = np.arange(prompt, end)[: max_length - len(kept)]
        whole = len(kept) == prompt and prompt + len(answer) == end
        own = cut._replace(positions=np.append(kept, answer))
        found.append(_first(row, end) if whole else cut_to(row, own, template.stop_ids))
    return found


def _keep(row: Row, how: EncodeSettings) -> Kept:
    return keep(row.runs, row.learned, row.conversation, row.whole.supervised, how.encoder, how.max_length)


def _begin(row: Row) -> int:
    """Where the first token stands that is learned: at the end, where there is none."""
    return int(np.argmax(row.whole.supervised)) if row.whole.usable else len(row.whole.ids)


def _end(row: Row) -> int:
    """Behind the last token that is learned."""
    places = np.flatnonzero(row.whole.supervised)
    return int(places[-1]) + 1 if len(places) else len(row.whole.ids)


def _first(row: Row, end: int) -> Encoded:
    return row.whole._replace(ids=row.whole.ids[:end], supervised=row.whole.supervised[:end])
