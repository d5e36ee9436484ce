"""What the pairs of a data set have in common and what tells their answers apart, counted from the token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from surefoot.data.dataset import TokenisedDataset

_TELLING = 0.8  # share of the pairs in which one side is longer: from here on length alone is a fair guess
_ENOUGH = 20  # pairs below which such a share means little


@dataclass(frozen=True)
class PairFacts:
    """All of pairs. identical: both answers are the same tokens. at_start: the rows differ in their first token, so
    there is no prompt. empty: one answer says nothing but its stop token. better_longer, worse_longer: by tokens.
    better_tokens, worse_tokens: of all answers together."""

    count: int
    identical: int
    at_start: int
    empty: int
    better_longer: int
    worse_longer: int
    better_tokens: int
    worse_tokens: int


def pair_facts(dataset: TokenisedDataset) -> PairFacts:
    """dataset: examples 2i and 2i + 1 are a pair."""
    answers = dataset.supervised_counts.reshape(-1, 2)
    identical = at_start = 0
    for chunk in dataset.chunks():  # which hold an even number of examples
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


def pairs_together(facts: Sequence[PairFacts]) -> PairFacts:
    """Of several data sets as one."""
    return PairFacts(*(sum(column) for column in zip(*map(astuple, facts), strict=True)))


def pair_cautions(facts: PairFacts) -> Iterator[str]:
    if facts.identical:
        yield (
            f"pairs of two equal answers: {facts.identical} of {facts.count}; they stay, and say nothing: neither is "
            "better, and the loss of such a pair is ln 2 whatever the model does"
        )
    if facts.at_start:
        yield f"pairs that differ in their first token, so that no prompt tells what is answered: {facts.at_start}"
    if facts.empty:
        yield f"pairs in which an answer says nothing: {facts.empty}"
    longer = max(facts.better_longer, facts.worse_longer)
    if facts.count >= _ENOUGH and longer >= _TELLING * facts.count:
        side = "better" if facts.better_longer == longer else "worse"
        yield (
            f"the {side} answer is the longer one in {longer / facts.count:.0%} of the pairs: a model could learn "
            "length in place of quality"
        )
