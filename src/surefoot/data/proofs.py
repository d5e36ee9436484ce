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
from surefoot.system.errors import Fault, InputError


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
        supervised += int(np.count_nonzero(part.mask))
        answers += len(ends)
        closed += int(ends.sum())
    return Proven(supervised, answers, closed)


@dataclass(frozen=True)
class _Part:
    """Some examples end to end. ids, mask: [tokens]; begins: place of each example's first token; flags: its flags.
    start: index of the first example in the data set. Nothing but ids and mask is as long as the text: whole numbers
    beside every token would take most of the time."""

    dataset: TokenisedDataset
    start: int
    ids: np.ndarray
    mask: np.ndarray
    begins: np.ndarray
    flags: np.ndarray

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        """Which of these examples the tokens at these places belong to."""
        return np.searchsorted(self.begins, tokens, side="right") - 1

    def fail(self, token: int, what: str, fix: str, code: str = "SF-DATA-TEMPLATE") -> NoReturn:
        file, number, line = self.dataset.row(self.start + int(self.owner(np.asarray(token))))
        raise InputError(Fault(f"{file}:{line}", f"row {number}: {what}", fix, code))


def _parts(dataset: TokenisedDataset) -> Iterator[_Part]:
    flags = dataset.flags()
    for chunk in dataset.chunks():
        begins = chunk.ends - chunk.lengths
        own = flags[chunk.start : chunk.start + len(begins)]
        yield _Part(dataset, chunk.start, chunk.ids, chunk.mask, begins, own)


def _among(ids: np.ndarray, wanted: Collection[int]) -> np.ndarray:
    """[tokens] bool. The few stop tokens there are, compared one by one, are found faster than by `np.isin`."""
    found = np.zeros(len(ids), dtype=bool)
    for number in wanted:
        found |= ids == number
    return found


def _prove_bos(part: _Part, encoder: TextEncoder, bos_id: int | None, elsewhere: bool) -> None:
    """elsewhere: BOS has its place further on as well, since it also ends answers (GPT-2) or begins turns (Llama 2);
    then only the start is looked at."""
    token = encoder.bos_id if bos_id is None else bos_id
    if token is None:
        return
    found = np.flatnonzero(part.ids == token)
    wanted = part.begins[part.flags & CONTINUES == 0]
    if elsewhere:
        first_two = part.begins if bos_id is None else np.union1d(part.begins, part.begins + 1)
        found = np.intersect1d(found, first_two, assume_unique=True)
    if bos_id is None:
        wanted = wanted[:0]
    wrong = np.setxor1d(found, wanted, assume_unique=True)
    if len(wrong):
        should = "exactly once, at the start" if bos_id is not None else "nowhere"
        part.fail(wrong[0], f"BOS must stand {should}, and here it does not", "choose another data.template")


def _prove_pad(part: _Part, encoder: TextEncoder, pad_id: int, stop_ids: Collection[int]) -> None:
    """PAD may equal a stop token (padding is masked by position), but nothing else that occurs."""
    if pad_id in stop_ids:
        return
    found = np.flatnonzero(part.ids == pad_id)
    if len(found):
        what = f"PAD is {encoder.tokenizer.convert_ids_to_tokens(pad_id)!r} (id {pad_id}), which the data contains"
        part.fail(found[0], what, "choose another tokenizer.pad", "SF-LABEL-PAD")


def _prove_ends(part: _Part, stop_ids: Collection[int], train_on: TrainOn, learns_behind_stop: bool) -> np.ndarray:
    """For each supervised stretch whether a stop token closes it: [stretches] bool."""
    stops = np.flatnonzero(_among(part.ids, stop_ids) & part.mask)
    ends = np.flatnonzero(part.mask & ~np.append(part.mask[1:], False))
    owner = part.owner(ends)
    if train_on in (
        "completion",
        "everything",
    ):  # templates may write a line end after the stop token, and it is learned as well; what was cut has earlier ones
        closed = np.isin(owner, part.owner(stops)) & (part.flags[owner] & STOP_LOST == 0)
    elif learns_behind_stop:
        closed = np.isin(np.arange(len(ends)), np.searchsorted(ends, stops))
    else:
        closed = np.isin(ends, stops, assume_unique=True)
    cut = part.flags[owner] & (STOP_LOST | CONTINUED) > 0
    wrong = ends[~closed & ~cut]
    if len(wrong):
        fix = "the model would never learn to stop; choose another data.template"
        part.fail(wrong[0], "an answer does not end with a supervised stop token", fix, "SF-LABEL-STOP")
    return closed
