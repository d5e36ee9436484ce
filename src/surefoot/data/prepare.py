"""Prepare a run's training and evaluation data, and audit both.

Steps: resolve the sources, tokenize each file (or load it from the cache), select shares and held-out records, mix,
audit. Files stay separate on disk and in memory; a data set is a list of indices into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.data.audit import Audit, audit_dataset, merge_audits
from surefoot.data.batching.order import Mixture, Part, mix, part_of, split
from surefoot.data.checks import NONE, copies_in, item_fingerprints
from surefoot.data.sources.records import Kind, rows_per_item
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.data.tokenize.dataset import SourceFacts, TokenizedDataset, TokenizedFile, joined, of_files
from surefoot.data.tokenize.encode import Encoding
from surefoot.data.tokenize.picture_processor import read_processor
from surefoot.data.tokenize.segments import Template, TextEncoder, TrainOn
from surefoot.data.tokenize.tokenize_file import ReadRecord, TokenizeSettings, tokenize
from surefoot.families.templates import OWN
from surefoot.method_facts.methods import WITHOUT_TURNS
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

_NAMED = 3  # unread files that a note names


@dataclass(frozen=True)
class PreparedData:
    """A run's training and evaluation data, tokenized and audited.

    train: the examples of all sources, concatenated in the order of `mixture.counts`.
    audit, sources: audit of the whole training data, and one audit per source.
    template: the template of the examples; generation formats prompts with it and stops at its stop_ids.
    template_reason: why the planned template was replaced; empty if it was used.
    eval_template: the template of the evaluation data.
    tokenizer_sha256: hash of everything that decides which ids a text gets.
    rows_per_item: number of neighboring examples that `mixture` counts as one item: 2 for pairs (better answer
        first), else 1.
    """

    train: TokenizedDataset
    eval: TokenizedDataset | None
    mixture: Mixture
    audit: Audit
    eval_audit: Audit | None
    sources: tuple[Audit, ...]
    eval_sources: tuple[Audit, ...]
    template: Template
    eval_template: Template | None
    template_reason: str
    tokenizer_sha256: str
    rows_per_item: int = 1


def prepare_data(
    train: Sequence[SourceSpec],
    evaluation: Sequence[SourceSpec] | int | float | None,
    *,
    template: str,
    template_asked: bool,
    tokenizer: PreTrainedTokenizerBase,
    bos_id: int | None,
    pad_id: int,
    stop_ids: Sequence[int],
    max_length: int,
    max_samples: int | None,
    train_on: TrainOn,
    seed: int,
    cache: Path,
    chunks: bool = False,
    read_record: ReadRecord | None = None,
    template_fallbacks: Sequence[str] = (),
    encoding: Encoding = "parts",
    kind: Kind = "answers",
    max_pixels: int | None = None,
    pictures: bool = True,
    after_prompt: bool = False,
    min_length: int = 1,
    unique: bool = False,
) -> PreparedData:
    """Tokenize the data (or load it from the cache), split, mix and audit it.

    evaluation: sources to evaluate on; or the number (int) or share (float) of records to hold out, taken from the
        training sources in proportion to their size; None for no evaluation data.
    template_asked: the user named the template, so no fallback is tried.
    bos_id: None for no BOS.
    stop_ids: tokens that end an answer, EOS first.
    max_samples: number of records to read from each training source that sets no limit itself; None: all.
    cache: the cache folder.
    chunks: for pretraining: records are plain texts, all tokens are learned, and a text that is too long is split into
        several examples; other records are refused.
    read_record: reader for sources with the custom format; see `surefoot.data.formats.reader.reader_with`.
    template_fallbacks: templates to try in this order if the template cannot render the records.
    encoding: tokenize prompt and answer separately ("parts") or as one text ("whole").
    kind: what is learned from a record. train_on, chunks and encoding apply to "answers" only; "prompts" drops prompts
        of more than max_length tokens.
    max_pixels: limit per picture; None: the limit of the model's processor.
    pictures: whether the method can train on pictures.
    after_prompt: refuse records of token ids that mark no prompt.
    min_length, unique: leave out training examples with fewer tokens, and later copies; before any are held out.

    Raises InputError for anything wrong with the data.
    """
    encoder = TextEncoder(tokenizer)
    processor = read_processor(tokenizer.name_or_path, encoder, max_pixels)
    settings = TokenizeSettings(
        encoder=encoder,
        digest=encoder.digest(),
        template=template,
        template_asked=template_asked,
        fallbacks=tuple(template_fallbacks),
        bos_id=bos_id,
        stop_ids=tuple(stop_ids),
        max_length=max_length,
        kind=kind,
        train_on=train_on,
        chunks=chunks,
        encoding=encoding,
        read_record=read_record,
        processor=processor if pictures else None,
        pictures=pictures,
        after_prompt=after_prompt,
    )
    specs = [replace(spec, max_samples=spec.max_samples or max_samples, kind=kind) for spec in train]
    named = [] if evaluation is None or isinstance(evaluation, int | float) else evaluation
    eval_specs = [replace(spec, kind=kind) for spec in named]
    # First, so that its mistakes do not wait for the training data, which is mostly longer.
    early = _load_all(eval_specs, settings, cache)
    settings, kept, reason = _load_all(specs, settings, cache)
    eval_settings, held_out = _load_evaluation(eval_specs, early[:2], settings, kept, cache)
    kept, held_out = ([with_share(one, seed) for one in loaded] for loaded in (kept, held_out))
    kept = without_short(kept, min_length, kind)
    kept = without_copies(kept, kind) if unique else kept
    if isinstance(evaluation, int | float):
        kept, held_out = hold_out(kept, evaluation, seed)
    sources = _audits(kept, settings, pad_id)
    data = joined([one.examples for one in kept])
    eval_data = joined([one.examples for one in held_out]) if held_out else None
    eval_sources = _audits(held_out, eval_settings, pad_id, training=data)
    return PreparedData(
        train=data,
        eval=eval_data,
        mixture=mix(
            [Part(one.name, len(one.examples) // rows_per_item(kind), one.spec.weight, one.spec.epochs) for one in kept]
        ),
        audit=merge_audits(sources, data),
        eval_audit=None if eval_data is None else merge_audits(eval_sources, eval_data),
        sources=sources,
        eval_sources=eval_sources,
        template=_main_template(kept, settings),
        eval_template=_main_template(held_out, eval_settings) if held_out else None,
        template_reason=reason,
        tokenizer_sha256=settings.digest,
        rows_per_item=rows_per_item(kind),
    )


def _load_all(
    specs: Sequence[SourceSpec], settings: TokenizeSettings, cache: Path
) -> tuple[TokenizeSettings, list[LoadedSource], str]:
    """Load all sources with one template. If a file cannot be rendered with the planned template and the user named
    none, all files take the fallback. Return the settings used, the sources, and why the template was replaced."""
    loaded = [_load(spec, settings, cache) for spec in specs]
    files = _dialogues(loaded)
    refused = next((facts for facts in files if facts.template_fault), None)
    reason = ""
    if refused is not None:
        own = "the tokenizer's own" if settings.template == OWN else settings.template
        reason = f"in place of {own}, which does not support {Path(refused.file).name} {refused.template_fault}"
    names = {facts.template for facts in files}
    if len(names) > 1:
        order = (settings.template, *settings.fallbacks)
        # The last one that any file needed: some file cannot be rendered with those before it.
        last = max(map(order.index, names))
        anew = replace(settings, template=order[last], fallbacks=order[last + 1 :])
        settings, loaded, later = _load_all(specs, anew, cache)
        reason = reason if not later else f"{reason}; {later}"
    return settings, loaded, reason


def _load_evaluation(
    specs: Sequence[SourceSpec],
    early: tuple[TokenizeSettings, list[LoadedSource]],
    settings: TokenizeSettings,
    train: Sequence[LoadedSource],
    cache: Path,
) -> tuple[TokenizeSettings, list[LoadedSource]]:
    """Load the evaluation sources with the template of the training data, so that evaluation data cannot change what
    is learned. If the training data has no dialogues, the template is chosen from the evaluation data.

    early: the same sources with the planned template or, if it cannot render them, a fallback.
    """
    trained = _dialogues(train)
    if not trained or settings.template_asked:
        return early
    template = settings.template_called(trained[0].template).name
    settings = replace(settings, template=template, fallbacks=())
    if all(facts.template == trained[0].template for facts in _dialogues(early[1])):
        return settings, early[1]
    try:
        return settings, [_load(spec, settings, cache) for spec in specs]
    except InputError as error:
        own = "the tokenizer's own template" if template == OWN else f"the template {template}"
        raise InputError([_for_evaluation(fault, own) for fault in error.faults]) from None


def _for_evaluation(fault: Fault, template: str) -> Fault:
    """Add to the fault why no fallback template was tried."""
    if not fault.fix.startswith("choose data.template"):
        return fault
    return replace(fault, what=f"{fault.what}; evaluation must use {template}, because the training data does")


def _dialogues(loaded: Sequence[LoadedSource]) -> list[SourceFacts]:
    """Return the facts of all files except plain texts."""
    return [facts for one in loaded for _, facts in one.files if facts.layout not in WITHOUT_TURNS]


def _load(spec: SourceSpec, settings: TokenizeSettings, cache: Path) -> LoadedSource:
    files, left = [], spec.max_samples
    sources = open_sources(spec)
    for place, source in enumerate(sources, start=1):
        if spec.share is not None and source.sample is not None:
            what = "has num_samples in dataset_info.json, which cannot be combined with share"
            raise InputError(Fault(source.name, what, "remove one of the two", code="SF-DATA-SHARES"))
        file, facts = tokenize(source, settings, left, cache)
        files.append((file, facts))
        if left is not None and (left := left - facts.used) == 0:
            if unread := [source.name for source in sources[place:]]:
                note = f"files not read, because max_samples was reached before them: {first_few(unread, _NAMED)}"
                files[-1] = (file, replace(facts, notes=(*facts.notes, note)))
            break
    name = files[0][1].file if len(files) == 1 else f"{spec.path} ({len(files)} files)"
    examples = of_files((file for file, _ in files), settings.processor)
    if not len(examples):
        used = sum(facts.used for _, facts in files)
        what = f"none of the {used} examples of {name} has a label left: every answer starts beyond "
        if settings.kind == "prompts":
            what = f"all {used} prompts of {name} are longer than "
        raise InputError(
            Fault("data.max_length", f"{what}{settings.max_length} tokens", "raise it", code="SF-DATA-LENGTH")
        )
    return LoadedSource(spec, name, tuple(files), examples)


def _audits(
    loaded: Sequence[LoadedSource], settings: TokenizeSettings, pad_id: int, training: TokenizedDataset | None = None
) -> tuple[Audit, ...]:
    """Audit each source. Duplicates are searched across all sources.

    training: for evaluation data, the training examples to search for overlap.
    """
    parts = [_by_file(one) for one in loaded]
    prints = [item_fingerprints(examples, settings.kind) for own in parts for _, examples in own]
    known = None if training is None else item_fingerprints(training, settings.kind)
    overlaps = [NONE if known is None else np.flatnonzero(np.isin(own, known)) for own in prints]
    counted = zip(copies_in(prints), overlaps, strict=True)
    audits = []
    for own in parts:
        audits.append([])
        for facts, examples in own:
            duplicates, overlap = next(counted)
            audits[-1].append(
                audit_dataset(
                    examples,
                    facts,
                    settings.encoder,
                    settings.template_called(facts.template),
                    bos_id=settings.bos_id,
                    pad_id=pad_id,
                    train_on=settings.train_on,
                    duplicates=duplicates,
                    overlap=overlap,
                    kind=settings.kind,
                )
            )
    return tuple(merge_audits(own, one.examples, one.name) for own, one in zip(audits, loaded, strict=True))


def _by_file(one: LoadedSource) -> list[tuple[SourceFacts, TokenizedDataset]]:
    """Group the source's examples by file; files without examples are left out."""
    ends = np.cumsum([len(file) for file, _ in one.files])
    owner = np.searchsorted(ends, one.examples.chosen, side="right")
    order = np.argsort(owner, kind="stable")
    places = np.split(order, np.searchsorted(owner[order], np.arange(1, len(ends))))
    return [(facts, one.examples.subset(own)) for (_, facts), own in zip(one.files, places, strict=True) if len(own)]


def _main_template(loaded: Sequence[LoadedSource], settings: TokenizeSettings) -> Template:
    """Return the template of the first file with turns, or of the first file if all are plain texts."""
    files = [facts for one in loaded for _, facts in one.files]
    with_turns = (facts for facts in files if facts.layout not in WITHOUT_TURNS)
    return settings.template_called(next(with_turns, files[0]).template)


@dataclass(frozen=True)
class LoadedSource:
    """One loaded source.

    files: its tokenized files with their facts.
    examples: the examples in use, selected from the files.
    """

    spec: SourceSpec
    name: str
    files: tuple[tuple[TokenizedFile, SourceFacts], ...]
    examples: TokenizedDataset


def hold_out(
    loaded: Sequence[LoadedSource], held_out: int | float, seed: int
) -> tuple[list[LoadedSource], list[LoadedSource]]:
    """Split the sources into training and held-out parts. Whole records are held out: if a text was split into several
    examples, training on its beginning and evaluating on its end would leak."""
    kept, taken = [], []
    records = [one.examples.records() for one in loaded]
    try:
        halves = split([int(places[-1]) + 1 for places in records], held_out, seed)
    except InputError as error:
        raise InputError(
            [replace(fault, what=fault.what + _explain_unusable(loaded)) for fault in error.faults]
        ) from None
    for one, places, (train, evaluation) in zip(loaded, records, halves, strict=True):
        if not len(evaluation):
            kept.append(one)
            continue
        count = f"{len(evaluation)} held out"
        kept.append(_with_part(one, np.flatnonzero(np.isin(places, train)), f"without {count} for evaluation"))
        part = np.flatnonzero(np.isin(places, evaluation))
        taken.append(_with_part(one, part, f"{count} by the seed", forget=True))
    return kept, taken


def _explain_unusable(loaded: Sequence[LoadedSource]) -> str:
    """Explain in parentheses why fewer records are usable than the files hold; "" if all are."""
    facts = [facts for one in loaded for _, facts in one.files]
    rows, used = sum(one.rows for one in facts), sum(one.used for one in facts)
    dropped = sum(len(one.dropped) for one in facts)
    parts = [f"{rows - used:,} are beyond max_samples"] if used < rows else []
    parts += [f"{dropped:,} have no label within max_length"] if dropped else []
    return f" (the files hold {rows:,}; {' and '.join(parts)})" if parts else ""


def with_share(one: LoadedSource, seed: int) -> LoadedSource:
    """Select the records of the source's `share`. Records are counted as in the files, before unusable ones are
    dropped, so that runs with other settings (SFT, then PPO) get disjoint shares of the same file."""
    if one.spec.share is None:
        return one
    of, take, in_order = one.spec.share
    counts = [facts.used for _, facts in one.files]
    chosen = part_of(sum(counts), of, take, None if in_order else seed)
    words = f"part {take} of {','.join(f'{size:g}' for size in of)}: {len(chosen):,} of {sum(counts):,} records"
    places, files = [], []
    for (file, facts), start in zip(one.files, np.cumsum([0, *counts]), strict=False):
        own = chosen[(chosen >= start) & (chosen < start + facts.used)] - start + 1
        places.append(np.isin(file.rows[:, 0], own))
        numbers = set(own.tolist())
        dropped = tuple(place for place in facts.dropped if place[1] in numbers)
        files.append((file, replace(facts, part=words, dropped=dropped)))
    found = replace(one, files=tuple(files), examples=one.examples.subset(np.flatnonzero(np.concatenate(places))))
    if not len(found.examples):
        what = f"{one.name} has no usable example in {words}"
        raise InputError(Fault("data.train.share", what, "use another part, or make it larger", code="SF-DATA-SHARES"))
    return found


def without_short(loaded: Sequence[LoadedSource], min_length: int, kind: Kind) -> list[LoadedSource]:
    """Leave out items with a row of fewer than `min_length` tokens."""
    size = rows_per_item(kind)
    short = [np.flatnonzero(one.examples.lengths.reshape(-1, size).min(axis=1) < min_length) for one in loaded]
    return _without_items(loaded, short, "data.min_length", f"shorter than {min_length} tokens", size)


def without_copies(loaded: Sequence[LoadedSource], kind: Kind) -> list[LoadedSource]:
    """Leave out items with the tokens and labels of an earlier one, also of an earlier source."""
    copies = copies_in([item_fingerprints(one.examples, kind) for one in loaded])
    return _without_items(loaded, copies, "data.unique", "copies of earlier ones", rows_per_item(kind))


def _without_items(
    loaded: Sequence[LoadedSource], places: Sequence[np.ndarray], key: str, what: str, size: int
) -> list[LoadedSource]:
    """Leave out the items at these places. Raises InputError if a source then has none. size: examples of an item."""
    left = []
    for one, gone in zip(loaded, places, strict=True):
        if len(gone) * size == len(one.examples):
            fix = "leave the source out, or change the key"
            raise InputError(Fault(key, f"all examples of {one.name} are {what}", fix, code="SF-DATA-LENGTH"))
        rest = np.delete(np.arange(len(one.examples)).reshape(-1, size), gone, axis=0).ravel()
        left.append(_with_part(one, rest, f"without {len(gone):,} {what}") if len(gone) else one)
    return left


def _with_part(one: LoadedSource, indices: np.ndarray, part: str, *, forget: bool = False) -> LoadedSource:
    """Select examples of a source, and add `part` to its facts.

    forget: drop notes and dropped records from the facts, because the facts of the other part list them.
    """
    nothing = {"dropped": (), "unused": (), "notes": (), "placeholders": ()} if forget else {}
    files = tuple(
        (file, replace(facts, part="; ".join(filter(None, (facts.part, part))), **nothing)) for file, facts in one.files
    )
    return replace(one, files=files, examples=one.examples.subset(indices))
