"""Check every example of a data set, using only its token ids and labels.

`check_examples` checks BOS, PAD and the end of every answer. Any violation would silently spoil a run: a doubled BOS
shifts the distribution that the model expects, a PAD inside a text hides or invents tokens, and an answer without a
supervised stop token gives a model that never stops. So each raises an InputError that names the record.

`copies_in` finds exact duplicates within a file, across files, and between training and evaluation data. `pair_facts`
computes statistics of preference pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

import numpy as np

from surefoot.data.sources.records import Kind, rows_per_item
from surefoot.data.tokenize.dataset import CONTINUED, CONTINUES, GIVEN, STOP_LOST, TokenizedDataset
from surefoot.data.tokenize.segments import Template, TextEncoder, TrainOn
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class LabelCounts:
    """Counts made while checking all examples.

    supervised: tokens with a label.
    answers: contiguous stretches of labels.
    closed: stretches that end with a stop token.
    has_bos: every example begins with BOS and has no other at its start.
    """

    supervised: int
    answers: int
    closed: int
    has_bos: bool


def check_examples(
    dataset: TokenizedDataset,
    encoder: TextEncoder,
    template: Template,
    *,
    bos_id: int | None,
    pad_id: int,
    train_on: TrainOn,
) -> LabelCounts:
    """Check BOS, PAD and the ends of answers in every example against the template.

    An answer truncated by max_length may lack its stop token; a text split into several examples has BOS in the first
    one and the stop token in the last one. Records of token ids are trained as they are: their BOS, PAD and stop tokens
    are only counted.

    bos_id: None if examples must have no BOS.
    """
    supervised = answers = closed = 0
    has_bos = bos_id is not None
    for part in _parts(dataset):
        has_bos = _check_bos(part, encoder, template, bos_id) and has_bos
        _check_pad(part, encoder, pad_id, template.stop_ids)
        ends = _check_ends(part, template, train_on)
        supervised += int(np.count_nonzero(part.mask))
        answers += len(ends)
        closed += int(ends.sum())
    return LabelCounts(supervised, answers, closed, has_bos)


@dataclass(frozen=True)
class _Part:
    """A chunk of examples, concatenated. No other array is per token: building one would take most of the time.

    start: index of the first example in the data set.
    ids, mask: [tokens].
    begins: position of each example's first token.
    flags: flags of each example.
    """

    dataset: TokenizedDataset
    start: int
    ids: np.ndarray
    mask: np.ndarray
    begins: np.ndarray
    flags: np.ndarray

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        """Return the example index in this chunk for each of these token positions."""
        return np.searchsorted(self.begins, tokens, side="right") - 1

    def fail(self, token: int, what: str, fix: str, code: str = "SF-DATA-TEMPLATE") -> NoReturn:
        file, number, line = self.dataset.row(self.start + int(self.owner(np.asarray(token))))
        raise InputError(Fault(f"{file}:{line}", f"row {number}: {what}", fix, code))


def _parts(dataset: TokenizedDataset) -> Iterator[_Part]:
    flags = dataset.flags()
    for chunk in dataset.chunks():
        begins = chunk.ends - chunk.lengths
        own = flags[chunk.start : chunk.start + len(begins)]
        yield _Part(dataset, chunk.start, chunk.ids, chunk.mask, begins, own)


def _among(ids: np.ndarray, wanted: Collection[int]) -> np.ndarray:
    """Mark the tokens that are in `wanted`: [tokens] bool. Faster than `np.isin` for a few ids."""
    found = np.zeros(len(ids), dtype=bool)
    for number in wanted:
        found |= ids == number
    return found


def _check_bos(part: _Part, encoder: TextEncoder, template: Template, bos_id: int | None) -> bool:
    """Check BOS, and return whether every example begins with it."""
    token = encoder.bos_id if bos_id is None else bos_id
    if token is None:
        return False
    found = np.flatnonzero(part.ids == token)
    wanted = part.begins[part.flags & CONTINUES == 0]
    if template.repeats_bos or token in template.stop_ids:
        # BOS is legitimate later on, too: it begins turns (Llama 2) or ends answers (GPT-2). Check only the start.
        first_two = part.begins if bos_id is None else np.union1d(part.begins, part.begins + 1)
        found = np.intersect1d(found, first_two, assume_unique=True)
    if bos_id is None:
        wanted = wanted[:0]
    # BOS in wrong positions, and examples without BOS.
    wrong = np.setxor1d(found, wanted, assume_unique=True)
    given = part.flags[part.owner(wrong)] & GIVEN > 0
    if not given.all():
        wrong = wrong[~given]
        should = "exactly once, at the start" if bos_id is not None else "nowhere"
        part.fail(wrong[0], f"BOS must appear {should}, but here it does not", "choose another data.template")
    return not len(wrong)


def _check_pad(part: _Part, encoder: TextEncoder, pad_id: int, stop_ids: Collection[int]) -> None:
    """Check that PAD does not occur in texts, unless it is a stop token (padding is masked by position)."""
    if pad_id in stop_ids:
        return
    found = np.flatnonzero(part.ids == pad_id)
    found = found[part.flags[part.owner(found)] & GIVEN == 0]
    if len(found):
        what = f"PAD is {encoder.tokenizer.convert_ids_to_tokens(pad_id)!r} (id {pad_id}), which the data contains"
        part.fail(found[0], what, "choose another tokenizer.pad", "SF-LABEL-PAD")


def _check_ends(part: _Part, template: Template, train_on: TrainOn) -> np.ndarray:
    """Return for each supervised stretch whether a stop token ends it: [stretches] bool."""
    stops = np.flatnonzero(_among(part.ids, template.stop_ids) & part.mask)
    ends = np.flatnonzero(part.mask & ~np.append(part.mask[1:], False))
    owner = part.owner(ends)
    if train_on in ("completion", "everything"):
        # Templates may write a newline after the stop token, which is learned as well. A truncated example may still
        # contain earlier stop tokens.
        closed = np.isin(owner, part.owner(stops)) & (part.flags[owner] & STOP_LOST == 0)
    elif template.learns_behind_stop:
        closed = np.isin(np.arange(len(ends)), np.searchsorted(ends, stops))
    else:
        closed = np.isin(ends, stops, assume_unique=True)
    cut = part.flags[owner] & (STOP_LOST | CONTINUED | GIVEN) > 0
    excused = np.append(owner[1:] == owner[:-1], False)[: len(owner)] & template.last_stops
    wrong = ends[~closed & ~cut & ~excused]
    if len(wrong):
        fix = "the model would never learn to stop; choose another data.template"
        part.fail(wrong[0], "an answer does not end with a supervised stop token", fix, "SF-LABEL-STOP")
    return closed


_LENGTH_BIAS = 0.8  # share of pairs in which one side is longer, from which length predicts the label
_MIN_PAIRS = 20  # with fewer pairs the share means little


@dataclass(frozen=True)
class PairFacts:
    """Statistics of preference pairs.

    count: number of pairs.
    identical: pairs whose answers have the same tokens.
    at_start: pairs whose rows differ in the first token, so that they have no common prompt.
    empty: pairs in which one answer has at most its stop token.
    better_longer, worse_longer: pairs in which this answer has more tokens.
    better_tokens, worse_tokens: total tokens of these answers.
    """

    count: int
    identical: int
    at_start: int
    empty: int
    better_longer: int
    worse_longer: int
    better_tokens: int
    worse_tokens: int


def pair_facts(dataset: TokenizedDataset) -> PairFacts:
    """Compute statistics of all pairs.

    dataset: examples 2i (better) and 2i + 1 (worse) are a pair.
    """
    answers = dataset.supervised_counts.reshape(-1, 2)
    identical = at_start = 0
    for chunk in dataset.chunks():  # each has an even number of examples
        rows = np.split(chunk.ids, chunk.ends[:-1])
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        identical += sum(np.array_equal(better, worse) for better, worse in pairs)
        at_start += sum(int(better[0]) != int(worse[0]) for better, worse in pairs)
    return PairFacts(
        count=len(answers),
        identical=identical,
        at_start=at_start,
        empty=int((answers <= 1).any(axis=1).sum()),
        better_longer=int((answers[:, 0] > answers[:, 1]).sum()),
        worse_longer=int((answers[:, 1] > answers[:, 0]).sum()),
        better_tokens=int(answers[:, 0].sum()),
        worse_tokens=int(answers[:, 1].sum()),
    )


def merge_pair_facts(facts: Sequence[PairFacts]) -> PairFacts:
    """Add up the statistics of several data sets."""
    return PairFacts(*(sum(column) for column in zip(*map(astuple, facts), strict=True)))


def pair_cautions(facts: PairFacts) -> Iterator[str]:
    if facts.identical:
        yield (
            f"pairs of two identical answers: {facts.identical} of {facts.count}; they are kept but teach nothing: the "
            "loss of such a pair is always ln 2"
        )
    if facts.at_start:
        yield f"pairs without a common prompt (they differ in their first token): {facts.at_start}"
    if facts.empty:
        yield f"pairs with an empty answer: {facts.empty}"
    longer = max(facts.better_longer, facts.worse_longer)
    if facts.count >= _MIN_PAIRS and longer >= _LENGTH_BIAS * facts.count:
        side = "better" if facts.better_longer == longer else "worse"
        yield (
            f"the {side} answer is the longer one in {longer / facts.count:.0%} of the pairs: the model could learn "
            "length instead of quality"
        )


NONE = np.zeros(0, dtype=np.int64)  # an empty list of item indices


def item_fingerprints(dataset: TokenizedDataset, kind: Kind) -> np.ndarray:
    """Return one hash per item, as raw bytes: [items]. See `TokenizedDataset.fingerprints`; a pair has one for both
    answers, and that of a judged answer includes the label."""
    fingerprints = dataset.fingerprints()
    columns = fingerprints.view(np.uint8).reshape(len(fingerprints) // rows_per_item(kind), -1)
    if kind == "judged":
        columns = np.column_stack([columns, dataset.good])
    return np.ascontiguousarray(columns).view(f"V{columns.shape[1]}").ravel()


def copies_in(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Find duplicates: for each part, the indices of the items that occur earlier in it or in a part before it."""
    lengths = [len(part) for part in parts]
    again = np.ones(sum(lengths), dtype=bool)
    if len(again):
        # `return_index` gives the first of equal items: only later ones count as copies.
        again[np.unique(np.concatenate(parts), return_index=True)[1]] = False
    return [np.flatnonzero(part) for part in np.split(again, np.cumsum(lengths)[:-1])]
