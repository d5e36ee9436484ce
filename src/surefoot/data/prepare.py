"""From data sources to what a run trains and evaluates on, with the audit of both.

Resolve, tokenise each file (or find it in the cache), select shares and held-out records, mix, audit. Files stay
separate on disk and in memory; a data set only selects examples among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.data.audit import Audit, audit_dataset, audit_together
from surefoot.data.batching.order import Mixture, Part, mix, part_of, split
from surefoot.data.checks import NONE, copies_in, item_prints
from surefoot.data.sources.records import Kind, rows_per_item
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.data.tokenize.dataset import SourceFacts, TokenisedDataset, TokenisedFile, joined, of_files
from surefoot.data.tokenize.encode import Encoding, TrainOn
from surefoot.data.tokenize.segments import Template, TextEncoder
from surefoot.data.tokenize.sight import read_sight
from surefoot.data.tokenize.tokenize_file import ReadRecord, TokenizeSettings, tokenise
from surefoot.families.templates import OWN
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

_NAMED = 3  # files that are not read


@dataclass(frozen=True)
class PreparedData:
    """What a run trains and evaluates on.

    train: all sources, one after the other, as `mixture` counts them.
    audit, sources: of the training data as a whole, and of each source.
    template: what the examples were written with; generation lays its prompts out with it and stops at its stop_ids.
    template_reason: why it is not the planned one, where the records could not be written with that.
    eval_template: of the evaluation data.
    tokenizer_sha256: of all that decides how text becomes ids.
    rows_per_item: examples that are drawn together, and that `mixture` counts as one: 2 in pairs, the better answer
        first.
    """

    train: TokenisedDataset
    eval: TokenisedDataset | None
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
) -> PreparedData:
    """Tokenise (or find in the cache), split, mix and audit.

    evaluation: None, sources, a number of records or a share to hold out of each training source in proportion.
    template_asked: the user named it.
    bos_id: None for no BOS.
    stop_ids: EOS first.
    max_samples: only the first so many records of every training source that says nothing of its own.
    cache: a folder.
    chunks: every token of plain texts is learned, and one that is too long becomes several examples; other records are
        refused.
    read_record: for sources whose format is custom; see `surefoot.data.formats.reader.reader_with`.
    template_fallbacks: names of the table, to be tried in this order where the template cannot write the records and
        nobody asked for it.
    encoding: of prompt and answer, in parts or as a whole.
    kind: what is learned from a record; for other kinds than answers, train_on, chunks and encoding have no meaning,
        and a prompt is left out where it has more than max_length tokens.
    max_pixels: of a picture; None: as the model's processor has it.
    pictures: records may have some, where the model sees.

    Raises InputError for anything wrong with the data.
    """
    encoder = TextEncoder(tokenizer)
    sight = read_sight(tokenizer.name_or_path, encoder, max_pixels)
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
        sight=sight if pictures else None,
        pictures=pictures,
    )
    specs = [replace(spec, max_samples=spec.max_samples or max_samples, kind=kind) for spec in train]
    named = [] if evaluation is None or isinstance(evaluation, int | float) else evaluation
    eval_specs = [replace(spec, kind=kind) for spec in named]
    settings, kept, reason = _load_all(specs, settings, cache)
    eval_settings, held_out = _load_evaluation(eval_specs, settings, kept, cache)
    kept, held_out = ([shared(one, seed) for one in loaded] for loaded in (kept, held_out))
    if isinstance(evaluation, int | float):
        kept, held_out = held_out_of(kept, evaluation, seed)
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
        audit=audit_together(sources, data),
        eval_audit=None if eval_data is None else audit_together(eval_sources, eval_data),
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
) -> tuple[TokenizeSettings, list[Loaded], str]:
    """The sources, all of whose dialogues are laid out in one way: where nobody asked for a template and one file needs
    another than the planned one, all take that. And why it is another."""
    loaded = [_load(spec, settings, cache) for spec in specs]
    files = _dialogues(loaded)
    refused = next((facts for facts in files if facts.template_fault), None)
    reason = ""
    if refused is not None:
        own = "the tokenizer's own" if settings.template == OWN else settings.template
        reason = f"in place of {own}, which cannot write {Path(refused.file).name} {refused.template_fault}"
    names = {facts.template for facts in files}
    if len(names) > 1:
        order = (settings.template, *settings.fallbacks)
        # Of the templates that files took the last: what kept some file from those before it still does.
        last = max(map(order.index, names))
        anew = replace(settings, template=order[last], fallbacks=order[last + 1 :])
        settings, loaded, later = _load_all(specs, anew, cache)
        reason = reason if not later else f"{reason}; {later}"
    return settings, loaded, reason


def _load_evaluation(
    specs: Sequence[SourceSpec], settings: TokenizeSettings, train: Sequence[Loaded], cache: Path
) -> tuple[TokenizeSettings, list[Loaded]]:
    """The sources to evaluate on, by the template that the training data took: what is evaluated changes nothing that
    is learned. Where that has no dialogues, these choose among themselves."""
    trained = _dialogues(train)
    if not trained or settings.template_asked:
        settings, loaded, _ = _load_all(specs, settings, cache)
        return settings, loaded
    template = settings.template_called(trained[0].template).name
    settings = replace(settings, template=template, fallbacks=())
    try:
        return settings, [_load(spec, settings, cache) for spec in specs]
    except InputError as error:
        own = "the tokenizer's own template" if template == OWN else f"the template {template}"
        raise InputError([_for_evaluation(fault, own) for fault in error.faults]) from None


def _for_evaluation(fault: Fault, template: str) -> Fault:
    """A record that the template cannot write is refused because another was not looked for: say why."""
    if not fault.fix.startswith("choose data.template"):
        return fault
    return replace(fault, what=f"{fault.what}; the training data takes {template}, and evaluation has to")


def _dialogues(loaded: Sequence[Loaded]) -> list[SourceFacts]:
    """Facts of the files that hold other records than plain texts."""
    return [facts for one in loaded for _, facts in one.files if facts.layout != "text"]


def _load(spec: SourceSpec, settings: TokenizeSettings, cache: Path) -> Loaded:
    files, left = [], spec.max_samples
    sources = open_sources(spec)
    for place, source in enumerate(sources, start=1):
        if spec.share is not None and source.sample is not None:
            what = "picks records by num_samples, and a share counts all of them"
            raise InputError(Fault(source.name, what, "leave one of them out", code="SF-DATA-SHARES"))
        file, facts = tokenise(source, settings, left, cache)
        files.append((file, facts))
        if left is not None and (left := left - facts.used) == 0:
            if unread := [source.name for source in sources[place:]]:
                files[-1] = (file, replace(facts, notes=(*facts.notes, _not_read(unread))))
            break
    name = files[0][1].file if len(files) == 1 else f"{spec.path} ({len(files)} files)"
    examples = of_files((file for file, _ in files), settings.sight)
    if not len(examples):
        used = sum(facts.used for _, facts in files)
        what = f"no label is left in any of {used} examples of {name}: every answer lies beyond "
        if settings.kind == "prompts":
            what = f"all {used} prompts of {name} have more than "
        raise InputError(
            Fault("data.max_length", f"{what}{settings.max_length} tokens", "raise it", code="SF-DATA-LENGTH")
        )
    return Loaded(spec, name, tuple(files), examples)


def _not_read(names: Sequence[str]) -> str:
    return f"files that nothing is taken from, because max_samples was reached before: {first_few(names, _NAMED)}"


def _audits(
    loaded: Sequence[Loaded], settings: TokenizeSettings, pad_id: int, training: TokenisedDataset | None = None
) -> tuple[Audit, ...]:
    """Of each source; copies are looked for across all of them.

    training: what evaluation data may have copies of.
    """
    parts = [_by_file(one) for one in loaded]
    prints = [item_prints(examples, settings.kind) for own in parts for _, examples in own]
    known = None if training is None else item_prints(training, settings.kind)
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
    return tuple(audit_together(own, one.examples, one.name) for own, one in zip(audits, loaded, strict=True))


def _by_file(one: Loaded) -> list[tuple[SourceFacts, TokenisedDataset]]:
    """The files that examples are left of, with these."""
    ends = np.cumsum([len(file) for file, _ in one.files])
    owner = np.searchsorted(ends, one.examples.chosen, side="right")
    order = np.argsort(owner, kind="stable")
    places = np.split(order, np.searchsorted(owner[order], np.arange(1, len(ends))))
    return [(facts, one.examples.subset(own)) for (_, facts), own in zip(one.files, places, strict=True) if len(own)]


def _main_template(loaded: Sequence[Loaded], settings: TokenizeSettings) -> Template:
    """That of the first file with turns; of texts alone, the texts'."""
    files = [facts for one in loaded for _, facts in one.files]
    return settings.template_called(next((facts for facts in files if facts.layout != "text"), files[0]).template)


@dataclass(frozen=True)
class Loaded:
    """One source: its files, each with its facts."""

    spec: SourceSpec
    name: str
    files: tuple[tuple[TokenisedFile, SourceFacts], ...]
    examples: TokenisedDataset


def held_out_of(loaded: Sequence[Loaded], held_out: int | float, seed: int) -> tuple[list[Loaded], list[Loaded]]:
    """The sources without what is held out, and that. Whole records are: of a text in several examples all or none,
    else a model would be asked for the end of what it has learned the beginning of."""
    kept, taken = [], []
    records = [one.examples.records() for one in loaded]
    try:
        halves = split([int(places[-1]) + 1 for places in records], held_out, seed)
    except InputError as error:
        raise InputError([replace(fault, what=fault.what + _left_out(loaded)) for fault in error.faults]) from None
    for one, places, (train, evaluation) in zip(loaded, records, halves, strict=True):
        if not len(evaluation):
            kept.append(one)
            continue
        count = f"{len(evaluation)} held out"
        kept.append(_with_part(one, np.flatnonzero(np.isin(places, train)), f"without {count} for evaluation"))
        part = np.flatnonzero(np.isin(places, evaluation))
        taken.append(_with_part(one, part, f"{count} by the seed", forget=True))
    return kept, taken


def _left_out(loaded: Sequence[Loaded]) -> str:
    """Why there are fewer records than the files hold, for the end of a sentence."""
    facts = [facts for one in loaded for _, facts in one.files]
    rows, used = sum(one.rows for one in facts), sum(one.used for one in facts)
    dropped = sum(len(one.dropped) for one in facts)
    parts = [f"{rows - used:,} lie beyond max_samples"] if used < rows else []
    parts += [f"{dropped:,} have no label within max_length"] if dropped else []
    return f" (the files hold {rows:,}; {' and '.join(parts)})" if parts else ""


def shared(one: Loaded, seed: int) -> Loaded:
    """The source's part of its records, which are counted as they stand in the files: what cannot be learned in one run
    may be a prompt in the next."""
    if one.spec.share is None:
        return one
    of, take = one.spec.share
    counts = [facts.used for _, facts in one.files]
    chosen = part_of(sum(counts), of, take, seed)
    words = f"part {take} of {','.join(f'{size:g}' for size in of)}: {len(chosen):,} of {sum(counts):,} records"
    places, files = [], []
    for (file, facts), start in zip(one.files, np.cumsum([0, *counts]), strict=False):
        own = chosen[(chosen >= start) & (chosen < start + facts.used)] - start + 1
        places.append(np.isin(file.rows[:, 0], own))
        dropped = tuple(place for place in facts.dropped if place[1] in own)
        files.append((file, replace(facts, part=words, dropped=dropped)))
    found = replace(one, files=tuple(files), examples=one.examples.subset(np.flatnonzero(np.concatenate(places))))
    if not len(found.examples):
        what = f"{one.name} has nothing to learn in {words}"
        raise InputError(Fault("data.train.share", what, "take another part, or raise its size", code="SF-DATA-SHARES"))
    return found


def _with_part(one: Loaded, indices: np.ndarray, part: str, *, forget: bool = False) -> Loaded:
    """forget: what was said of the records was said of the other part already."""
    nothing = {"dropped": (), "unused": (), "notes": (), "placeholders": ()} if forget else {}
    files = tuple(
        (file, replace(facts, part="; ".join(filter(None, (facts.part, part))), **nothing)) for file, facts in one.files
    )
    return replace(one, files=files, examples=one.examples.subset(indices))
