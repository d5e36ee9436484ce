"""Examples whose prompt and answer are encoded in one go, as tools that tokenise a finished text do (TRL).

An answer that begins in the middle of a word then shares a token with the prompt, and a line end at its start may merge
with one before it; a model that writes the answer itself never sees such tokens. So this is asked for, never chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from surefoot.data.tokenize.segments import Segment, TextEncoder, encode_runs, pieces_of


def encode_whole(
    layouts: Sequence[Sequence[Segment]], encoder: TextEncoder, bos_id: int | None
) -> list[tuple[int, ...]]:
    """The ids of each layout; none for one without text."""
    filled = [[segment._replace(answer=False) for segment in layout if segment.text] for layout in layouts]
    runs = iter(encode_runs([layout for layout in filled if layout], encoder, bos_id))
    return [tuple(itertools.chain.from_iterable(run.ids for run in next(runs))) if layout else () for layout in filled]


def behind_prompt(ids: Sequence[int], prompt: Sequence[int]) -> np.ndarray:
    """True from where the ids leave those of the prompt alone, which is earlier than its end where a token reaches
    across: [tokens]."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False)))
    return np.arange(len(ids)) >= same


def within_answers(
    ids: Sequence[int], layout: Sequence[Segment], learned: Collection[int], encoder: TextEncoder
) -> np.ndarray:
    """True for every token with a character of an answer in `learned`: [tokens]."""
    filled = [segment for segment in layout if segment.text]
    marks: list[np.ndarray] = []
    for at, text in enumerate(_texts(filled)):
        pieces = pieces_of(text, encoder, opening=at == 0)
        groups = [text] if len(pieces) == 1 else [[segment] for segment in text]
        for piece, segments in zip(pieces, groups, strict=True):
            starts, ends = np.array(encoder.spans(piece)[1], dtype=np.int64).reshape(-1, 2).T
            mark, right = np.zeros(len(starts), dtype=bool), 0
            for segment in segments:
                left, right = right, right + len(segment.text)
                if segment.answer and segment.turn in learned:
                    mark |= (starts < right) & (ends > left) & (starts < ends)
            marks.append(mark)
    # BOS may have been added or taken away at the front, so the ends are aligned.
    return np.concatenate([np.zeros(len(ids), dtype=bool), *marks])[-len(ids) :]


def _texts(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Cut where a template says that a text of its own begins."""
    numbers = itertools.accumulate(segment.alone for segment in segments)
    for _, group in itertools.groupby(zip(numbers, segments, strict=True), key=lambda pair: pair[0]):
        yield [segment for _, segment in group]
