"""Encode prompt and answer as one text, as tools that tokenize a finished text do (TRL).

An answer that begins in the middle of a word then shares a token with the prompt, and a newline at its start may merge
with one before it. A model that generates the answer never sees such tokens, so this is used only if the user asks for
it (`data.encoding: whole`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from surefoot.data.formats import Conversation
from surefoot.data.formats.reader import each_row
from surefoot.data.tokenize.segments import (
    Segment,
    Template,
    TextEncoder,
    TrainOn,
    encode_runs,
    learned_turns,
    token_spans,
)


def encode_whole(
    conversations: Sequence[Conversation],
    template: Template,
    encoder: TextEncoder,
    bos_id: int | None,
    train_on: TrainOn,
    name: str,
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Iterate over ids[T], labels[T] (bool) and the number of spelled-out control tokens of each conversation.

    name: the file, for InputErrors.
    """
    together = None if train_on in ("responses", "last") else template.at_once  # has no marks at the ends of answers
    layouts = each_row(conversations, lambda one: together(one, False) if together else template.segments(one), name)
    prompt_ids: list[tuple[int, ...]] = []
    if train_on == "completion":
        prompts = [_prompt(*pair, together) for pair in zip(layouts, conversations, strict=True)]
        prompt_ids = _encode_whole(prompts, encoder, bos_id)
    for at, (layout, ids) in enumerate(zip(layouts, _encode_whole(layouts, encoder, bos_id), strict=True)):
        if train_on == "everything":
            mask = np.ones(len(ids), dtype=bool)
        elif train_on == "completion":
            mask = _behind_prompt(ids, prompt_ids[at])
        else:
            mask = _within_answers(ids, layout, learned_turns(layout, conversations[at], train_on), encoder)
        mask[0] = False
        spelled_out = sum(len(encoder.control_text(segment.text)) for segment in layout if segment.content)
        yield np.array(ids, dtype=np.uint32), mask, spelled_out


def _prompt(
    layout: Sequence[Segment],
    conversation: Conversation,
    together: Callable[[Conversation, bool], tuple[Segment, ...]] | None,
) -> Sequence[Segment]:
    """Return the segments before the first learned answer; all of them if none is learned."""
    learned = learned_turns(layout, conversation, "completion")
    if together and learned and min(learned) > 0:
        return together(replace(conversation, turns=conversation.turns[: min(learned)]), True)
    return list(itertools.takewhile(lambda one: not (one.answer and one.turn in learned), layout))


def _encode_whole(
    layouts: Sequence[Sequence[Segment]], encoder: TextEncoder, bos_id: int | None
) -> list[tuple[int, ...]]:
    """Return the ids of each layout; () for one without text."""
    filled = [[segment._replace(answer=False) for segment in layout if segment.text] for layout in layouts]
    runs = iter(encode_runs([layout for layout in filled if layout], encoder, bos_id))
    return [tuple(itertools.chain.from_iterable(run.ids for run in next(runs))) if layout else () for layout in filled]


def _behind_prompt(ids: Sequence[int], prompt: Sequence[int]) -> np.ndarray:
    """Mark the tokens from the first one that differs from the prompt's own ids: [tokens] bool. If a token spans the
    border, it is the first one marked."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False)))
    return np.arange(len(ids)) >= same


def _within_answers(
    ids: Sequence[int], layout: Sequence[Segment], learned: Collection[int], encoder: TextEncoder
) -> np.ndarray:
    """Mark every token that contains a character of an answer in `learned`: [tokens] bool."""
    filled = [segment for segment in layout if segment.text]
    numbers = itertools.accumulate(segment.alone for segment in filled)  # number of the tokenizer text of each segment
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
    # BOS may have been added or removed at the front, so align at the end.
    return np.concatenate([np.zeros(len(ids), dtype=bool), *marks])[-len(ids) :]
