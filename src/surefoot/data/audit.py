"""What the data turned out to be.

Everything is counted from the token ids themselves, after all cutting and caching, not from what the code before
meant to do. What is wrong is an error (see `proofs`); what is only odd is a caution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from surefoot.data.dataset import CONTINUES, CONTROL_TEXT, PROMPT_LOST, STOP_LOST, TRUNCATED, TokenisedDataset
from surefoot.data.encode import TrainOn
from surefoot.data.facts import SourceFacts, together
from surefoot.data.proofs import prove
from surefoot.data.text_encoder import TextEncoder

_SAMPLES = 3
_CUT_SHARE = 0.01  # of the examples: more than this is a caution


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
    file: str = ""


@dataclass(frozen=True)
class Audit:
    """Counts are of examples unless the name says otherwise; lengths are in tokens, the median rounded to one."""

    source: SourceFacts
    kept: int
    continued: int  # examples that go on with the text of the one before
    truncated: int
    prompt_lost: int  # nothing that the user says is left
    stop_lost: int
    answers_lost: int  # answers of which nothing is left
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
    seen: set[bytes],
    training: Collection[bytes] = (),
    repeats_bos: bool = False,
    learns_behind_stop: bool = False,
) -> Audit:
    """Count and prove. bos_id: None where no BOS is to be put. seen: fingerprints of the examples audited before, which
    these are added to: copies of them are duplicates. training: those of the training set, for evaluation data.
    repeats_bos: the template writes BOS before later turns as well. learns_behind_stop: what it writes behind a stop
    token is part of the answer.

    Raises InputError, naming the first record, when a proof fails.
    """
    proven = prove(
        dataset,
        encoder,
        bos_id=bos_id,
        pad_id=pad_id,
        stop_ids=stop_ids,
        train_on=train_on,
        repeats_bos=repeats_bos,
        learns_behind_stop=learns_behind_stop,
    )
    flags, prints = dataset.flags(), [dataset.fingerprint(index) for index in range(len(dataset))]
    known = len(seen)
    seen.update(prints)
    return Audit(
        source,
        kept=len(dataset),
        continued=int((flags & CONTINUES > 0).sum()),
        truncated=int((flags & TRUNCATED > 0).sum()),
        prompt_lost=int((flags & PROMPT_LOST > 0).sum()),
        stop_lost=int((flags & STOP_LOST > 0).sum()),
        answers_lost=dataset.answers_lost(),
        control_text=int((flags & CONTROL_TEXT > 0).sum()),
        duplicates=len(prints) - (len(seen) - known),
        overlap=sum(one in training for one in prints),
        tokens=int(dataset.lengths.sum()),
        supervised_tokens=proven.supervised,
        **_lengths(dataset),
        bos=None if bos_id is None else _name(encoder, bos_id),
        pad=_name(encoder, pad_id),
        stops=tuple(_name(encoder, number) for number in stop_ids),
        answers=proven.answers,
        ended=proven.closed,
        samples=tuple(_sample(dataset, index, encoder) for index in _spread(len(dataset))),
    )


def audit_together(audits: Sequence[Audit], dataset: TokenisedDataset, name: str | None = None) -> Audit:
    """The audit of several files, or of several sources, as one. dataset: all of their examples. name: of the whole,
    for facts; None: all their names."""
    if len(audits) == 1:
        return audits[0] if name is None else replace(audits[0], source=replace(audits[0].source, file=name))

    def total(count: Callable[[Audit], int]) -> int:
        return sum(map(count, audits))

    samples = [sample for one in audits for sample in one.samples]
    return replace(
        audits[0],
        source=together([one.source for one in audits], name),
        kept=total(lambda one: one.kept),
        continued=total(lambda one: one.continued),
        truncated=total(lambda one: one.truncated),
        prompt_lost=total(lambda one: one.prompt_lost),
        stop_lost=total(lambda one: one.stop_lost),
        answers_lost=total(lambda one: one.answers_lost),
        control_text=total(lambda one: one.control_text),
        duplicates=total(lambda one: one.duplicates),
        overlap=total(lambda one: one.overlap),
        tokens=total(lambda one: one.tokens),
        supervised_tokens=total(lambda one: one.supervised_tokens),
        answers=total(lambda one: one.answers),
        ended=total(lambda one: one.ended),
        **_lengths(dataset),
        stops=tuple(dict.fromkeys(stop for one in audits for stop in one.stops)),
        samples=tuple(samples[place] for place in _spread(len(samples))),
    )


def cautions(audit: Audit) -> tuple[str, ...]:
    """Sentences that the user should read before believing the run."""
    source, found = audit.source, list(audit.source.notes)
    if source.unused:
        found.append(f"fields that nothing reads: {', '.join(source.unused)}")
    if source.placeholders:
        found.append(
            f"records with placeholders that nobody filled in: {len(source.placeholders)} "
            f"({_places(source.placeholders)}), such as {source.placeholder}; the model would learn to say them"
        )
    if source.dropped:
        found.append(
            f"rows dropped, because no label fits into max_length: {len(source.dropped)} ({_places(source.dropped)})"
        )
    if audit.truncated > _CUT_SHARE * audit.kept:
        found.append(
            f"examples cut to max_length: {audit.truncated} of {audit.kept}; all that the user says was lost in "
            f"{audit.prompt_lost}, the end of an answer in {audit.stop_lost}; whole answers lost: {audit.answers_lost}"
        )
    if audit.control_text:
        found.append(f"examples that spell out control tokens, encoded as plain text: {audit.control_text}")
    if audit.duplicates:
        found.append(f"examples that are exact copies of others: {audit.duplicates}")
    if audit.overlap:
        found.append(f"evaluation examples that the training data hold as well: {audit.overlap} of {audit.kept}")
    return tuple(found)


def fingerprints(dataset: TokenisedDataset) -> set[bytes]:
    """Of all examples; see `TokenisedDataset.fingerprint`."""
    return {dataset.fingerprint(index) for index in range(len(dataset))}


def _places(records: Sequence[tuple[str, int, int]]) -> str:
    """Where the first of them are: lines of one file, or file:line."""
    several = len({file for file, _, _ in records}) > 1
    shown = ", ".join(f"{file}:{line}" if several else str(line) for file, _, line in records[:_SAMPLES])
    return f"{'' if several else 'lines '}{shown}{' …' if len(records) > _SAMPLES else ''}"


def _lengths(dataset: TokenisedDataset) -> dict[str, int]:
    """p95: the smallest length that at least 95 of 100 examples do not exceed."""
    lengths = dataset.lengths
    return {
        "shortest": int(lengths.min()),
        "median": round(float(np.median(lengths))),
        "p95": int(np.percentile(lengths, 95, method="inverted_cdf")),
        "longest": int(lengths.max()),
    }


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
    file, number, line = dataset.row(index)
    return Sample(number, line, len(example.ids), tuple(parts), file)


def _name(encoder: TextEncoder, number: int) -> str:
    """A token's text; a spare embedding row has none."""
    return encoder.control.get(number) or f"row {number}"
