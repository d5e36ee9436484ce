"""Three proofs about every example, from the token ids alone: BOS, PAD and the end of every answer.

Each failed proof would let a run go wrong without a word: a doubled BOS shifts what the model expects, a PAD that
stands in a text hides or invents tokens, and an answer without a learned stop token gives a model that never stops. So
each is an InputError that names the record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from surefoot.data.dataset import STOP_LOST, TokenisedDataset
from surefoot.data.encode import TrainOn
from surefoot.data.text_encoder import TextEncoder
from surefoot.errors import Fault, InputError

_CHUNK = 4096  # examples looked at together


@dataclass(frozen=True)
class Proven:
    """supervised: tokens that carry a label. answers: stretches of them. closed: those that end with a stop token."""

    supervised: int
    answers: int
    closed: int


def prove(
    dataset: TokenisedDataset,
    file: str,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    pad_id: int,
    stop_ids: Collection[int],
    train_on: TrainOn,
) -> Proven:
    """bos_id: None where no BOS is to be put. file: for the fault. An answer cut by max_length may lack its stop."""
    supervised = answers = closed = 0
    for part in _parts(dataset, file):
        _prove_bos(part, encoder, bos_id, stop_ids)
        _prove_pad(part, encoder, pad_id, stop_ids)
        ends = _prove_ends(part, stop_ids, train_on)
        supervised += int(part.mask.sum())
        answers += len(ends)
        closed += int(ends.sum())
    return Proven(supervised, answers, closed)


@dataclass(frozen=True)
class _Part:
    """Some examples end to end. ids, mask, owner: [tokens]; owner: the example's index in the data set; first: whether
    the token is its example's first."""

    dataset: TokenisedDataset
    file: str
    ids: np.ndarray
    mask: np.ndarray
    owner: np.ndarray
    first: np.ndarray

    def fail(self, token: int, what: str, fix: str) -> NoReturn:
        index = int(self.owner[token])
        number, line = self.dataset[index].number, self.dataset.line(index)
        raise InputError(Fault(f"{self.file}:{line}", f"row {number}: {what}", fix))


def _parts(dataset: TokenisedDataset, file: str) -> Iterator[_Part]:
    for start in range(0, len(dataset), _CHUNK):
        examples = [dataset[index] for index in range(start, min(start + _CHUNK, len(dataset)))]
        lengths = [len(example.ids) for example in examples]
        owner = np.repeat(np.arange(start, start + len(examples)), lengths)
        first = np.diff(owner, prepend=-1) != 0
        ids = np.concatenate([example.ids for example in examples])
        yield _Part(dataset, file, ids, np.concatenate([example.supervised for example in examples]), owner, first)


def _prove_bos(part: _Part, encoder: TextEncoder, bos_id: int | None, stop_ids: Collection[int]) -> None:
    """A BOS that also ends answers (GPT-2) cannot be counted; then only the start is looked at."""
    token = encoder.bos_id if bos_id is None else bos_id
    if token is None:
        return
    wanted, looked_at = part.first, np.ones_like(part.first)
    if token in stop_ids:
        looked_at = part.first if bos_id is None else part.first | np.roll(part.first, 1)  # and the token after it
    if bos_id is None:
        wanted = np.zeros_like(part.first)
    wrong = np.flatnonzero(((part.ids == token) != wanted) & looked_at)
    if len(wrong):
        should = "exactly once, at the start" if bos_id is not None else "nowhere"
        part.fail(wrong[0], f"BOS must stand {should}, and here it does not", "choose another data.template")


def _prove_pad(part: _Part, encoder: TextEncoder, pad_id: int, stop_ids: Collection[int]) -> None:
    """PAD may equal a stop token (padding is masked by position), but nothing else that occurs."""
    found = np.flatnonzero(part.ids == pad_id)
    if len(found) and pad_id not in stop_ids:
        what = f"PAD is {encoder.tokenizer.convert_ids_to_tokens(pad_id)!r} (id {pad_id}), which the data contains"
        part.fail(found[0], what, "choose another tokenizer.pad")


def _prove_ends(part: _Part, stop_ids: Collection[int], train_on: TrainOn) -> np.ndarray:
    """For each supervised stretch whether a stop token closes it: [stretches] bool."""
    is_stop = np.isin(part.ids, list(stop_ids)) & part.mask
    ends = np.flatnonzero(part.mask & ~np.append(part.mask[1:], False))
    owner = part.owner - part.owner[0]
    if train_on == "everything":  # templates may write a line end after the stop token, and it is learned as well
        closed = np.bincount(owner, weights=is_stop)[owner[ends]] > 0
    else:
        closed = is_stop[ends]
    cut = part.dataset.flags()[part.owner[ends]] & STOP_LOST > 0
    wrong = ends[~closed & ~cut]
    if len(wrong):
        fix = "the model would never learn to stop; choose another data.template"
        part.fail(wrong[0], "an answer does not end with a supervised stop token", fix)
    return closed
