"""From conversations to token ids with a label mask, cut to length so that answers survive.

The mask comes from the template's marks, so it is right by construction. What is too long loses the data's prompt
tokens first, from the left of the first user text on (the system text last of these), while BOS and the template's own
words stay; only when no such token is left, the answer's end goes. Nothing disappears without a word: every cut, every
stop token lost by it and every example that has nothing left to learn is reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from surefoot.data.formats import Conversation, each_row
from surefoot.data.segments import Run, Segment, Template, encode_runs, pieces_of
from surefoot.data.text_encoder import TextEncoder

TrainOn = Literal["responses", "last", "everything"]
_CHUNK = 1024  # conversations per call of the tokenizer: enough for its threads, little memory


@dataclass(frozen=True)
class Encoded:
    """ids[T], supervised[T]: what `Example` holds. number, line: its row. prompt_lost, stop_lost: cutting left nothing
    of the prompt's texts; took a stop token that was to be learned. control_texts: names of control tokens that the
    row's texts spell out. An example without a supervised token is to be dropped."""

    ids: np.ndarray
    supervised: np.ndarray
    number: int
    line: int
    truncated: bool
    prompt_lost: bool
    stop_lost: bool
    control_texts: int


def encode(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    max_length: int,
    train_on: TrainOn,
    name: str,
) -> Iterator[Encoded]:
    """One `Encoded` per conversation, in order, at most max_length tokens each.

    bos_id: put first, exactly once; None for no BOS. train_on: responses = all answers, last = the last answer,
    everything = all tokens but the first, which nothing predicts. name: the file, for InputErrors.
    """
    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        layouts = each_row(chunk, lambda conversation: template.segments(conversation), name)
        for conversation, layout, runs in zip(chunk, layouts, encode_runs(layouts, encoder, bos_id), strict=True):
            ids = np.fromiter(itertools.chain.from_iterable(run.ids for run in runs), dtype=np.uint32)
            supervised = _mask(runs, train_on)
            truncated, prompt_lost, stop_lost = len(ids) > max_length, False, False
            if truncated:
                kept, prompt_lost = _kept(runs, supervised, train_on, conversation, encoder, max_length)
                stops = supervised & np.isin(ids, template.stop_ids)
                stop_lost = bool(stops.sum() > stops[kept].sum())
                ids, supervised = ids[kept], supervised[kept]
            yield Encoded(
                ids,
                supervised,
                conversation.number,
                conversation.line,
                truncated,
                prompt_lost,
                stop_lost,
                sum(len(encoder.control_text(segment.text)) for segment in layout if segment.content),
            )


def _mask(runs: Sequence[Run], train_on: TrainOn) -> np.ndarray:
    last = _last_answer(runs)
    learned = [train_on == "everything" or _is_learned(run, train_on, last) for run in runs]
    mask = np.repeat(learned, [len(run.ids) for run in runs])
    mask[0] = False
    return mask


def _is_learned(part: Run | Segment, train_on: TrainOn, last: int) -> bool:
    """Whether it is an answer that counts as one: with `last`, earlier answers are prompt."""
    return part.answer and (train_on != "last" or part.turn == last)


def _last_answer(runs: Sequence[Run]) -> int:
    return max((run.turn for run in runs if run.answer), default=-1)


def _kept(
    runs: Sequence[Run],
    supervised: np.ndarray,
    train_on: TrainOn,
    conversation: Conversation,
    encoder: TextEncoder,
    max_length: int,
) -> tuple[np.ndarray, bool]:
    """Positions that remain, in order, at most max_length, and whether no prompt text is left among them. See the
    module's text for what goes first."""
    last = _last_answer(runs)
    turn_of = np.concatenate([_owners(run, place == 0, train_on, last, encoder) for place, run in enumerate(runs)])
    positions = np.arange(len(turn_of))
    kept = positions <= np.flatnonzero(supervised)[-1]  # what follows the last label teaches nothing
    is_system = np.array([turn.role == "system" for turn in conversation.turns])
    cuttable = positions[kept & (turn_of >= 0)]
    order = cuttable[np.argsort(is_system[turn_of[cuttable]], kind="stable")]
    kept[order[: max(0, kept.sum() - max_length)]] = False
    prompt_lost = len(cuttable) > 0 and not kept[cuttable].any()
    return positions[kept][:max_length], prompt_lost


def _owners(run: Run, opening: bool, train_on: TrainOn, last: int, encoder: TextEncoder) -> np.ndarray:
    """For each token of a run the turn whose prompt text it lies in, -1 where it must stay."""
    count = len(run.ids)
    if not any(_is_prompt_text(segment, train_on, last) for segment in run.segments):
        return np.full(count, -1)
    pieces = pieces_of(run, encoder, opening)
    groups = [run.segments] if len(pieces) == 1 else [(segment,) for segment in run.segments]
    owners = [np.full(count, -1)]
    for piece, segments in zip(pieces, groups, strict=True):
        starts, ends = np.array(encoder.spans(piece)[1], dtype=np.int64).reshape(-1, 2).T
        owner, position = np.full(len(starts), -1), 0
        for segment in segments:
            left, position = position, position + len(segment.text)
            if _is_prompt_text(segment, train_on, last):
                owner[(starts >= left) & (ends <= position) & (starts < ends)] = segment.turn
        owners.append(owner)
    # BOS may have been added or taken away at the front of the first run, so the ends are aligned.
    return np.concatenate(owners)[-count:]


def _is_prompt_text(segment: Segment, train_on: TrainOn, last: int) -> bool:
    return segment.content and not _is_learned(segment, train_on, last)
