"""Choose which tokens of an example that is too long are kept.

Labels are worth keeping, but only with their prompt: an answer without its prompt teaches the model to make things up,
while an answer that is cut at the end still teaches its beginning correctly. So prompt text is removed first, until it
fills only a quarter of the room (max_length minus the template's own tokens); then the example is cut at the end.
Prompt text is removed oldest first, from the left; then the system text; the quarter next to the answer goes last. BOS
and the template's own tokens are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from surefoot.data.formats import Conversation
from surefoot.data.tokenize.segments import Run, Segment, TextEncoder, token_spans

_PROMPT_PART = 4  # prompt text keeps at least 1/4 of the room (if it is that long)


class Truncation(NamedTuple):
    """The tokens that truncation keeps.

    positions: positions of the kept tokens, ascending.
    prompt_cut: user text before the last kept answer was removed, at least in part.
    prompt_lost: all user text was removed.
    """

    positions: np.ndarray
    prompt_cut: bool
    prompt_lost: bool


def choose_tokens(
    runs: Sequence[Run],
    learned: Collection[int],
    conversation: Conversation,
    supervised: np.ndarray,
    encoder: TextEncoder,
    max_length: int,
) -> Truncation:
    """Choose at most max_length tokens to keep.

    learned: indices of the turns whose answers are learned.
    supervised: [tokens] bool, the label mask.
    """
    lengths, answers = [len(run.ids) for run in runs], [run.answer and run.turn in learned for run in runs]
    turn_of, answer = np.full(sum(lengths), -1), np.repeat(answers, lengths)
    if _may_give_way(len(answer) - int(np.count_nonzero(answer)), max_length):
        turn_of = np.concatenate([_owners(run, place == 0, learned, encoder) for place, run in enumerate(runs)])
    end, protected = _end(turn_of >= 0, answer, supervised, max_length)
    positions = np.arange(end)
    cuttable = positions[turn_of[:end] >= 0]
    roles = np.array([turn.role for turn in conversation.turns])
    is_system = roles[turn_of[cuttable]] == "system"
    spoken, system = cuttable[~is_system], cuttable[is_system]
    older = max(0, len(spoken) - protected)
    order = np.concatenate([spoken[:older], system, spoken[older:]])
    gone = order[: max(0, end - max_length)]
    stays = np.ones(end, dtype=bool)
    stays[gone] = False
    kept = np.flatnonzero(stays)[:max_length]
    requested = (turn_of >= 0) & (roles[turn_of] == "user")
    lost = bool(requested.any() and not requested[kept].any())
    return Truncation(kept, prompt_cut=lost or bool(requested[gone].any()), prompt_lost=lost)


def _may_give_way(prompt: int, max_length: int) -> bool:
    """Whether a prompt of this many tokens (template included) can be longer than the protected quarter. Most examples
    that are too long have a short prompt, and then the tokens need not be assigned to turns."""
    return _PROMPT_PART * prompt > max_length


def _end(cuttable: np.ndarray, answer: np.ndarray, supervised: np.ndarray, max_length: int) -> tuple[int, int]:
    """Return the length of the longest beginning that ends with a label and fits after its prompt text was cut to the
    minimum, and the number of prompt tokens left in it. Tokens after the last label are not needed. If no beginning
    fits: (max_length, 0)."""
    prompts, answers = np.cumsum(cuttable), np.cumsum(answer)
    room = max_length - (np.arange(1, len(answer) + 1) - prompts - answers)
    protected = np.minimum(prompts, np.maximum(room, 0) // _PROMPT_PART)
    ends = np.flatnonzero((answers + protected <= room) & supervised)
    return (int(ends[-1]) + 1, int(protected[ends[-1]])) if len(ends) else (max_length, 0)


def _owners(run: Run, opening: bool, learned: Collection[int], encoder: TextEncoder) -> np.ndarray:
    """Return for each token of a run the turn whose prompt text it belongs to, or -1 if it must be kept: [tokens]."""
    count = len(run.ids)
    if not any(_is_prompt_text(segment, learned) for segment in run.segments):
        return np.full(count, -1)
    owners = [np.full(count, -1)]
    for starts, ends, placed in token_spans(run.segments, encoder, opening):
        owner = np.full(len(starts), -1)
        for segment, left, right in placed:
            if _is_prompt_text(segment, learned):
                owner[(starts >= left) & (ends <= right) & (starts < ends)] = segment.turn
        owners.append(owner)
    # BOS may have been added or removed at the front of the first run, so align at the end.
    return np.concatenate(owners)[-count:]


def _is_prompt_text(segment: Segment, learned: Collection[int]) -> bool:
    return segment.content and not (segment.answer and segment.turn in learned)
