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

from surefoot.data.dataset import CONTINUED, CONTINUES, STOP_LOST, TokenisedDataset
from surefoot.data.encode import TrainOn
from surefoot.data.text_encoder import TextEncoder
from surefoot.errors import Fault, InputError


@dataclass(frozen=True)
class Proven:
    """supervised: tokens that carry a label. answers: stretches of them. closed: those that end with a stop token."""

    supervised: int
    answers: int
    closed: int


def prove(
    dataset: TokenisedDataset,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    pad_id: int,
    stop_ids: Collection[int],
    train_on: TrainOn,
    repeats_bos: bool = False,
    learns_behind_stop: bool = False,
) -> Proven:
    """bos_id: None where no BOS is to be put. An answer cut by max_length may lack its stop, and a text in several
    examples has BOS in the first and its stop in the last. repeats_bos: the template writes BOS before later turns.
    learns_behind_stop: what it writes behind a stop token is part of the answer."""
    supervised = answers = closed = 0
    for part in _parts(dataset):
        _prove_bos(part, encoder, bos_id, repeats_bos or (bos_id if bos_id is not None else encoder.bos_id) in stop_ids)
        _prove_pad(part, encoder, pad_id, stop_ids)
        ends = _prove_ends(part, stop_ids, train_on, learns_behind_stop)
        supervised += int(part.mask.sum())
        answers += len(ends)
        closed += int(ends.sum())
    return Proven(supervised, answers, closed)


@dataclass(frozen=True)
class _Part:
    """Some examples end to end. All [tokens]; owner: the example's index in the data set; flags: its flags; first:
    whether the token is its example's first."""

    dataset: TokenisedDataset
    ids: np.ndarray
    mask: np.ndarray
    owner: np.ndarray
    flags: np.ndarray
    first: np.ndarray

    def fail(self, token: int, what: str, fix: str) -> NoReturn:
        file, number, line = self.dataset.row(int(self.owner[token]))
        raise InputError(Fault(f"{file}:{line}", f"row {number}: {what}", fix))


def _parts(dataset: TokenisedDataset) -> Iterator[_Part]:
    flags = dataset.flags()
    for chunk in dataset.chunks():
        owner = np.repeat(np.arange(chunk.start, chunk.start + len(chunk.lengths)), chunk.lengths)
        first = np.diff(owner, prepend=-1) != 0
        yield _Part(dataset, chunk.ids, chunk.mask, owner, flags[owner], first)


def _prove_bos(part: _Part, encoder: TextEncoder, bos_id: int | None, elsewhere: bool) -> None:
    """elsewhere: BOS has its place further on as well, since it also ends answers (GPT-2) or begins turns (Llama 2);
    then only the start is looked at."""
    token = encoder.bos_id if bos_id is None else bos_id
    if token is None:
        return
    begins = part.first & (part.flags & CONTINUES == 0)
    wanted, looked_at = begins, np.ones_like(part.first)
    if elsewhere:
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


def _prove_ends(part: _Part, stop_ids: Collection[int], train_on: TrainOn, learns_behind_stop: bool) -> np.ndarray:
    """For each supervised stretch whether a stop token closes it: [stretches] bool."""
    is_stop = np.isin(part.ids, list(stop_ids)) & part.mask
    ends = np.flatnonzero(part.mask & ~np.append(part.mask[1:], False))
    owner = part.owner - part.owner[0]
    if train_on in (
        "completion",
        "everything",
    ):  # templates may write a line end after the stop token, and it is learned as well
        closed = np.bincount(owner, weights=is_stop)[owner[ends]] > 0
    elif learns_behind_stop:
        stretch = np.searchsorted(ends, np.arange(len(part.mask)))
        closed = np.bincount(stretch, weights=is_stop, minlength=len(ends))[: len(ends)] > 0
    else:
        closed = is_stop[ends]
    cut = part.flags[ends] & (STOP_LOST | CONTINUED) > 0
    wrong = ends[~closed & ~cut]
    if len(wrong):
        fix = "the model would never learn to stop; choose another data.template"
        part.fail(wrong[0], "an answer does not end with a supervised stop token", fix)
    return closed
