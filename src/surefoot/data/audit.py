"""Audit the tokenized data: counts, checks and cautions.

Everything is counted from the final token ids, after truncation and caching, so the audit also covers bugs of the code
that made them. Violations are errors (see `check_examples`); suspicious properties are cautions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from surefoot.data.checks import NONE, PairFacts, check_examples, merge_pair_facts, pair_cautions, pair_facts
from surefoot.data.formats.conversation import Picture
from surefoot.data.sources.records import Kind, rows_per_item
from surefoot.data.tokenize.dataset import (
    CONTINUES,
    CONTROL_TEXT,
    PROMPT_CUT,
    PROMPT_LOST,
    STOP_LOST,
    TRUNCATED,
    Place,
    SourceFacts,
    TokenizedDataset,
    merge_facts,
)
from surefoot.data.tokenize.segments import Template, TextEncoder, TrainOn
from surefoot.method_facts.methods import COUNTED

_SAMPLES = 3
_MOST_PLACES = _SAMPLES + 1  # places kept of a long list: those shown, and one more to know that there are more
_CUT_SHARE = 0.01  # caution if more than this share of the examples was truncated


# Fields of `Audit` that are summed when audits are merged.
_COUNTS = (
    *("kept", "continued", "truncated", "prompt_cut", "prompt_lost", "stop_lost", "answers_lost", "control_text"),
    *("duplicates", "overlap", "tokens", "supervised_tokens", "answers", "ended", "good", "pictures", "picture_tokens"),
)


@dataclass(frozen=True)
class SamplePart:
    """Neighboring tokens that are all supervised or all not.

    control: they are control tokens, not text that looks like them.
    """

    text: str
    supervised: bool
    control: bool


@dataclass(frozen=True)
class Sample:
    """One example to show in the report.

    number, line: its record.
    tokens: its length.
    verdict: better or worse, good or bad; empty for other kinds of data.
    pictures: its pictures; for a pair, only on the better answer.
    """

    number: int
    line: int
    tokens: int
    parts: tuple[SamplePart, ...]
    file: str = ""
    verdict: str = ""
    pictures: tuple[Picture, ...] = ()

    @property
    def learned_as_good(self) -> bool:
        return self.verdict not in {bad for bad, _ in _VERDICTS.values()}


@dataclass(frozen=True)
class Audit:
    """The audit of a data set. Counts are of examples (for pairs: of pairs) unless the name says otherwise; lengths are
    tokens of single rows, and the median is rounded to an integer."""

    source: SourceFacts
    kept: int
    continued: int  # examples that continue the text of the one before
    truncated: int
    prompt_cut: int  # user text was removed, at least in part
    prompt_lost: int  # all user text was removed
    stop_lost: int
    answers_lost: int  # answers that were removed completely
    control_text: int
    duplicates: int  # copies of earlier examples
    overlap: int  # for evaluation data: examples that are also in the training data
    tokens: int
    supervised_tokens: int
    shortest: int
    median: int
    p95: int
    longest: int
    bos: str | None  # appears once, at the start of every example; None: nowhere
    pad: str  # does not occur in the data
    stops: tuple[str, ...]  # tokens that end an answer
    answers: int  # supervised stretches
    ended: int  # supervised stretches that end with a stop token
    samples: tuple[Sample, ...]
    kind: Kind = "answers"
    pairs: PairFacts | None = None  # for pairs only
    good: int = 0  # judged examples that are good
    pictures: int = 0  # the pictures of a pair count once
    picture_tokens: int = 0  # tokens that stand for features of the pictures
    duplicate_places: tuple[Place, ...] = ()  # the first few
    overlap_places: tuple[Place, ...] = ()

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens


def audit_dataset(
    dataset: TokenizedDataset,
    source: SourceFacts,
    encoder: TextEncoder,
    template: Template,
    *,
    bos_id: int | None,
    pad_id: int,
    train_on: TrainOn,
    duplicates: np.ndarray = NONE,
    overlap: np.ndarray = NONE,
    kind: Kind = "answers",
) -> Audit:
    """Check all examples of a file and count their properties.

    template: the template of the examples.
    bos_id: None if examples must have no BOS.
    duplicates, overlap: item indices found across all files by the caller; see `surefoot.data.checks`.

    Raises InputError, naming the first record, if a check fails.
    """
    counted = check_examples(dataset, encoder, template, bos_id=bos_id, pad_id=pad_id, train_on=train_on)
    flags = dataset.flags()
    size = rows_per_item(kind)
    pictures = [picture for index, own in dataset.pictures() if index % size == 0 for picture in own]

    def count(flag: int) -> int:
        return int((flags & flag > 0).reshape(-1, size).any(axis=1).sum())

    def first_places(items: np.ndarray) -> tuple[Place, ...]:
        return tuple(dataset.row(int(item) * size) for item in items[:_MOST_PLACES])

    return Audit(
        source,
        kept=len(dataset) // size,
        continued=count(CONTINUES),
        truncated=count(TRUNCATED),
        prompt_cut=count(PROMPT_CUT),
        prompt_lost=count(PROMPT_LOST),
        stop_lost=int((flags & STOP_LOST > 0).sum()),
        answers_lost=dataset.answers_lost(),
        control_text=count(CONTROL_TEXT),
        duplicates=len(duplicates),
        overlap=len(overlap),
        tokens=int(dataset.lengths.sum()),
        supervised_tokens=counted.supervised,
        **_lengths(dataset),
        bos=_name(encoder, bos_id) if bos_id is not None and counted.has_bos else None,
        pad=_name(encoder, pad_id),
        stops=tuple(_name(encoder, number) for number in template.stop_ids),
        answers=counted.answers,
        ended=counted.closed,
        samples=tuple(_sample(dataset, index, encoder, kind) for index in _shown(len(dataset), kind)),
        kind=kind,
        pairs=pair_facts(dataset) if kind == "pairs" else None,
        good=int(dataset.good.sum()) if kind == "judged" else 0,
        pictures=len(pictures),
        picture_tokens=sum(picture.tokens for picture in pictures),
        duplicate_places=first_places(duplicates),
        overlap_places=first_places(overlap),
    )


def merge_audits(audits: Sequence[Audit], dataset: TokenizedDataset, name: str | None = None) -> Audit:
    """Merge the audits of several files or sources.

    dataset: all of their examples.
    name: name of the whole; None: all file names.
    """
    if len(audits) == 1:
        return audits[0] if name is None else replace(audits[0], source=replace(audits[0].source, file=name))
    samples = [sample for one in audits for sample in one.samples]
    return replace(
        audits[0],
        source=merge_facts([one.source for one in audits], name),
        **{count: sum(getattr(one, count) for one in audits) for count in _COUNTS},
        **_lengths(dataset),
        stops=tuple(dict.fromkeys(stop for one in audits for stop in one.stops)),
        samples=tuple(samples[place] for place in _shown(len(samples), audits[0].kind)),
        pairs=merge_pair_facts([one.pairs for one in audits if one.pairs]) if audits[0].pairs else None,
        duplicate_places=tuple(place for one in audits for place in one.duplicate_places)[:_MOST_PLACES],
        overlap_places=tuple(place for one in audits for place in one.overlap_places)[:_MOST_PLACES],
    )


def cautions(audit: Audit) -> tuple[str, ...]:
    """Return warnings about the data that the user should read before trusting the run."""
    source, found, unit = audit.source, list(audit.source.notes), COUNTED[audit.kind]
    if source.unused:
        found.append(f"fields that are not read: {', '.join(source.unused)}")
    if source.placeholders:
        found.append(
            f"records with unfilled placeholders such as {source.placeholder}: {len(source.placeholders)} "
            f"({_places(source.placeholders)}); the model would learn to write them"
        )
    if source.dropped:
        why = "rows dropped, because no label fits into max_length"
        if audit.kind == "prompts":
            why = "prompts dropped, because max_length leaves no room for an answer"
        found.append(f"{why}: {len(source.dropped)} ({_places(source.dropped)})")
    if audit.truncated > _CUT_SHARE * audit.kept:
        ends = f"an answer lost its end in {audit.stop_lost}"
        if audit.kind == "pairs":
            ends = f"{audit.stop_lost} of {2 * audit.kept} answers lost their end"
        losses = (
            (audit.prompt_cut, f"the user's text lost its beginning in {audit.prompt_cut}"),
            (audit.prompt_lost, f"the user's text was removed completely in {audit.prompt_lost}"),
            (audit.stop_lost, ends),
            (audit.answers_lost, f"answers removed completely: {audit.answers_lost}"),
        )
        said = (text for count, text in losses if count)
        found.append("; ".join((f"{unit} truncated to max_length: {audit.truncated} of {audit.kept}", *said)))
    if source.unkept:
        found.append(f"tokenized data is not cached for the next start: {source.unkept}")
    if audit.control_text:
        found.append(f"examples that spell out control tokens (encoded as plain text): {audit.control_text}")
    if audit.duplicates:
        where = _places(audit.duplicate_places)
        found.append(f"{unit} that are exact copies of others: {audit.duplicates} ({where})")
    if audit.overlap:
        where = _places(audit.overlap_places)
        found.append(f"{unit} that are also in the training data: {audit.overlap} of {audit.kept} ({where})")
    if audit.pairs:
        found += pair_cautions(audit.pairs)
    if audit.kind == "judged" and audit.good in (0, audit.kept):
        found.append(f"all answers are judged {'good' if audit.good else 'bad'}: there is no contrast to learn from")
    return tuple(found)


def _places(records: Sequence[Place]) -> str:
    """List the first few places, with row and line (a JSON file may have all its rows on one line)."""
    several = len({file for file, _, _ in records}) > 1
    shown = [f"{f'{file} ' if several else ''}row {row}, line {line}" for file, row, line in records[:_SAMPLES]]
    return "; ".join([*shown, *(["…"] if len(records) > _SAMPLES else [])])


def _lengths(dataset: TokenizedDataset) -> dict[str, int]:
    """Compute length statistics. p95 is the smallest length that at least 95 % of the examples do not exceed."""
    lengths = dataset.lengths
    return {
        "shortest": int(lengths.min()),
        "median": round(float(np.median(lengths))),
        "p95": int(np.percentile(lengths, 95, method="inverted_cdf")),
        "longest": int(lengths.max()),
    }


def _spread(count: int) -> list[int]:
    """Return the first, the middle and the last index."""
    return sorted({0, count // 2, count - 1})


def _shown(rows: int, kind: Kind) -> list[int]:
    """Return the examples of the first, the middle and the last item."""
    size = rows_per_item(kind)
    return [size * item + row for item in _spread(rows // size) for row in range(size)]


_VERDICTS: dict[Kind, tuple[str, str]] = {"pairs": ("worse", "better"), "judged": ("bad", "good")}


def _sample(dataset: TokenizedDataset, index: int, encoder: TextEncoder, kind: Kind) -> Sample:
    example = dataset[index]
    control = np.isin(example.ids, list(encoder.control))
    if example.pictures and dataset.processor:
        control |= dataset.processor.within(example.ids, example.pictures)
    borders = np.flatnonzero(np.diff(example.supervised * 2 + control)) + 1
    parts: list[SamplePart] = []
    pictures = iter(example.pictures)
    for start, end in zip([0, *borders], [*borders, len(example.ids)], strict=True):
        text = str(encoder.tokenizer.decode(example.ids[start:end].tolist()))
        if example.pictures and dataset.processor and control[start]:
            text = dataset.processor.with_facts(text, pictures)
        parts.append(SamplePart(text, bool(example.supervised[start]), bool(control[start])))
    file, number, line = dataset.row(index)
    verdict = _VERDICTS[kind][bool(dataset.good[index])] if kind in _VERDICTS else ""
    shown = example.pictures if index % rows_per_item(kind) == 0 else ()
    return Sample(number, line, len(example.ids), tuple(parts), file, verdict, shown)


def _name(encoder: TextEncoder, number: int) -> str:
    """Return a control token's text, or "row N" for an unused embedding row."""
    return encoder.control.get(number) or f"row {number}"
