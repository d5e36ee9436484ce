"""Which tokens of a too long example remain.

A label is worth keeping, but only with what it answers: an answer to a prompt that was cut away teaches the model to
make things up, while an answer that ends early teaches what is left of it correctly. So the prompt's texts give way
first, down to a quarter of the room (what the template's own words leave); then the end of the example goes. Of the
prompt's texts the oldest go first, from the left; then the system text; last that quarter, which is nearest to the
answer. BOS and the template's words stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from surefoot.data.formats import Conversation
from surefoot.data.tokenize.segments import Run, Segment, TextEncoder, token_spans

_PROMPT_PART = 4  # the prompt's texts keep at least one of so many parts of the room, if they are as long


class Kept(NamedTuple):
    """Which tokens of a too long example remain.

    positions: of the tokens that remain, in order.
    prompt_cut: what the user says before the last answer that is left has lost its beginning or more.
    prompt_lost: the user says something, and all of it is gone.
    """

    positions: np.ndarray
    prompt_cut: bool
    prompt_lost: bool


def keep(
    runs: Sequence[Run],
    learned: Collection[int],
    conversation: Conversation,
    supervised: np.ndarray,
    encoder: TextEncoder,
    max_length: int,
) -> Kept:
    """At most max_length tokens.

    learned: turns whose answers are.
    supervised: [tokens].
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
    return Kept(kept, prompt_cut=lost or bool(requested[gone].any()), prompt_lost=lost)


def _may_give_way(prompt: int, max_length: int) -> bool:
    """Whether texts among so many tokens of prompts, the template's words included, are more than those that are
    protected. Most too long examples have a short prompt, and then nobody needs to know which text a token is of."""
    return _PROMPT_PART * prompt > max_length


def _end(cuttable: np.ndarray, answer: np.ndarray, supervised: np.ndarray, max_length: int) -> tuple[int, int]:
    """Length of the longest beginning that ends with a label and fits once its prompt texts are cut as far as they may
    be, and how many of their tokens stay then; what follows the last label teaches nothing. Where none fits:
    max_length, and no label that counts."""
    prompts, answers = np.cumsum(cuttable), np.cumsum(answer)
    room = max_length - (np.arange(1, len(answer) + 1) - prompts - answers)
    protected = np.minimum(prompts, np.maximum(room, 0) // _PROMPT_PART)
    ends = np.flatnonzero((answers + protected <= room) & supervised)
    return (int(ends[-1]) + 1, int(protected[ends[-1]])) if len(ends) else (max_length, 0)


def _owners(run: Run, opening: bool, learned: Collection[int], encoder: TextEncoder) -> np.ndarray:
    """For each token of a run the turn whose prompt text it lies in, -1 where it must stay."""
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
    # BOS may have been added or taken away at the front of the first run, so the ends are aligned.
    return np.concatenate(owners)[-count:]


def _is_prompt_text(segment: Segment, learned: Collection[int]) -> bool:
    return segment.content and not (segment.answer and segment.turn in learned)
