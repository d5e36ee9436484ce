"""What the data turned out to be.

Everything is counted from the token ids themselves, after all cutting and caching, not from what the code before
meant to do. What is wrong is an error (see `proofs`); what is only odd is a caution.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from surefoot.data.dataset import CONTROL_TEXT, PROMPT_LOST, STOP_LOST, TRUNCATED, TokenisedDataset
from surefoot.data.encode import TrainOn
from surefoot.data.proofs import prove
from surefoot.data.text_encoder import TextEncoder

_SAMPLES = 3
_CUT_SHARE = 0.01  # of the examples: more than this is a caution


@dataclass(frozen=True)
class SourceFacts:
    """What was known before tokenising. rows: records of the file; used: the first so many of them. dropped: number
    and line of the records that have no label left. unused: fields that nothing reads."""

    file: str
    sha256: str
    layout: str
    layout_reason: str
    template: str
    rows: int
    used: int
    dropped: tuple[tuple[int, int], ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    part: str = ""  # where examples of the file went elsewhere


@dataclass(frozen=True)
class SamplePart:
    """Neighbouring tokens with one label state. control: control tokens, not text that looks like them."""

    text: str
    supervised: bool
    control: bool


@dataclass(frozen=True)
class Sample:
    """One example to look at. number, line: its record."""

    number: int
    line: int
    tokens: int
    parts: tuple[SamplePart, ...]


@dataclass(frozen=True)
class Audit:
    """Counts are of examples unless the name says otherwise; lengths are in tokens."""

    source: SourceFacts
    kept: int
    truncated: int
    prompt_lost: int
    stop_lost: int
    control_text: int
    duplicates: int
    overlap: int  # examples that the training set holds as well; only for evaluation data
    tokens: int
    supervised_tokens: int
    shortest: int
    median: int
    p95: int
    longest: int
    bos: str | None  # once at the start of every example; None: nowhere
    pad: str  # occurs in no text
    stops: tuple[str, ...]  # what may end an answer
    answers: int  # supervised stretches
    ended: int  # those whose last token is a supervised stop token
    samples: tuple[Sample, ...]

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens


def audit_dataset(
    dataset: TokenisedDataset,
    source: SourceFacts,
    encoder: TextEncoder,
    *,
    bos_id: int | None,
    pad_id: int,
    stop_ids: Collection[int],
    train_on: TrainOn,
    training: TokenisedDataset | None = None,
) -> Audit:
    """Count and prove. bos_id: None where no BOS is to be put. training: given for evaluation data, to find overlap.

    Raises InputError, naming the first record, when a proof fails.
    """
    proven = prove(dataset, source.file, encoder, bos_id=bos_id, pad_id=pad_id, stop_ids=stop_ids, train_on=train_on)
    flags, lengths = dataset.flags(), dataset.lengths
    prints = [dataset.fingerprint(index) for index in range(len(dataset))]
    known = set() if training is None else {training.fingerprint(index) for index in range(len(training))}
    return Audit(
        source,
        kept=len(dataset),
        truncated=int((flags & TRUNCATED > 0).sum()),
        prompt_lost=int((flags & PROMPT_LOST > 0).sum()),
        stop_lost=int((flags & STOP_LOST > 0).sum()),
        control_text=int((flags & CONTROL_TEXT > 0).sum()),
        duplicates=len(prints) - len(set(prints)),
        overlap=sum(one in known for one in prints),
        tokens=int(lengths.sum()),
        supervised_tokens=proven.supervised,
        shortest=int(lengths.min()),
        median=int(np.percentile(lengths, 50, method="lower")),
        p95=int(np.percentile(lengths, 95, method="lower")),
        longest=int(lengths.max()),
        bos=None if bos_id is None else _name(encoder, bos_id),
        pad=_name(encoder, pad_id),
        stops=tuple(_name(encoder, number) for number in stop_ids),
        answers=proven.answers,
        ended=proven.closed,
        samples=tuple(_sample(dataset, index, encoder) for index in _spread(len(dataset))),
    )


def cautions(audit: Audit) -> tuple[str, ...]:
    """Sentences that the user should read before believing the run."""
    source, found = audit.source, list(audit.source.notes)
    if source.unused:
        found.append(f"fields that nothing reads: {', '.join(source.unused)}")
    if source.dropped:
        lines = ", ".join(str(line) for _, line in source.dropped[:_SAMPLES])
        more = " …" if len(source.dropped) > _SAMPLES else ""
        found.append(
            f"rows dropped, because no label fits into max_length: {len(source.dropped)} (lines {lines}{more})"
        )
    if audit.truncated > _CUT_SHARE * audit.kept:
        found.append(
            f"examples cut to max_length: {audit.truncated} of {audit.kept}; all of the prompt's text was lost in "
            f"{audit.prompt_lost}, the end of the answer in {audit.stop_lost}"
        )
    if audit.control_text:
        found.append(f"examples that spell out control tokens, encoded as plain text: {audit.control_text}")
    if audit.duplicates:
        found.append(f"examples that are exact copies of others: {audit.duplicates}")
    if audit.overlap:
        found.append(f"evaluation examples that the training data hold as well: {audit.overlap} of {audit.kept}")
    return tuple(found)


def _spread(count: int) -> list[int]:
    """The first, the middle and the last."""
    return sorted({0, count // 2, count - 1})


def _sample(dataset: TokenisedDataset, index: int, encoder: TextEncoder) -> Sample:
    example = dataset[index]
    control = np.isin(example.ids, list(encoder.control))
    borders = np.flatnonzero(np.diff(example.supervised * 2 + control)) + 1
    parts = []
    for start, end in zip([0, *borders], [*borders, len(example.ids)], strict=True):
        text = str(encoder.tokenizer.decode(example.ids[start:end].tolist()))
        parts.append(SamplePart(text, bool(example.supervised[start]), bool(control[start])))
    return Sample(example.number, dataset.line(index), len(example.ids), tuple(parts))


def _name(encoder: TextEncoder, number: int) -> str:
    """A token's text; a spare embedding row has none."""
    return encoder.control.get(number) or f"row {number}"
