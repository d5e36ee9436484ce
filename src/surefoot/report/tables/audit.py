"""The data audit for people: on the screen, and in the report from data.json.

The learned part stands between ⟦ and ⟧, on a terminal also in bold color, so that nobody depends on colors. Data may
contain any text; control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surefoot.method_facts.methods import COUNTED
from surefoot.report.console import Hanging
from surefoot.report.data_audit import AuditJson, end_facts, file_json, record_facts, size_facts, token_facts
from surefoot.report.thumbnails import MOST, Blocks, from_json
from surefoot.report.views import Table
from surefoot.report.wording import shortened

if TYPE_CHECKING:  # the board and reports must not import torch
    from surefoot.data.audit import Audit, Sample
    from surefoot.data.prepare import PreparedData
    from surefoot.data.sources.records import Kind

_ON_SCREEN = (320, 120)  # number of first and last characters shown of a long part of a sample
_ON_PAGE = (1200, 300)
_LEARNED, _CONTROL, _CAUTION = "bold green", "dim", "yellow"
_ROLES = {"train": "training data", "eval": "evaluation data"}
_LEGENDS: Mapping[Kind, str] = {
    "answers": "the model learns the text between ⟦ and ⟧",
    "pairs": "the compared answers are between ⟦ and ⟧",
    "judged": "the judged answers are between ⟦ and ⟧",
    "prompts": "prompts for the model",
}


def audit_report(data: PreparedData) -> RenderableType:
    """Counts, checks, cautions and some samples, for `Console.show`."""
    parts, several = _set("training data", data.audit, data.sources), len(data.sources) > 1
    if several:
        parts += _mixture(data)
    if data.eval_audit is not None:
        parts += _set("evaluation data", data.eval_audit, data.eval_sources)
    samples: Sequence[Sample] = data.audit.samples
    if several and data.rows_per_item == 1:  # the longest sample of each source
        samples = [max(audit.samples, key=lambda sample: len(sample.parts)) for audit in data.sources]
    parts.append(Text(_LEGENDS[data.audit.kind], "bold"))
    return Group(*parts, *(part for sample in samples for part in _sample(sample, several)))


def _set(title: str, whole: Audit, sources: Sequence[Audit]) -> list[RenderableType]:
    """All sources of a data set; facts common to several are shown once."""
    from surefoot.data.audit import cautions

    together = file_json(whole)
    if len(sources) == 1:
        lines = {**record_facts(together), **size_facts(together), **end_facts(together), **token_facts(together)}
        return _block(f"{title}: {whole.source.file}", lines, cautions(whole))
    parts = []
    for audit in sources:
        one = file_json(audit)
        lines = {**record_facts(one), **size_facts(one), **end_facts(one)}
        parts += _block(f"{title}: {audit.source.file}", lines, cautions(audit))
    unit = COUNTED[whole.kind]
    return parts + _block(
        f"{title} together: {whole.kept:,} {unit} of {len(sources)} sources",
        {**size_facts(together), **token_facts(together)},
        (),
    )


def _block(heading: str, lines: Mapping[str, str], cautions: Sequence[str]) -> list[RenderableType]:
    first = Text(heading, "bold")
    first.stylize("not bold", heading.index(":") + 1)
    found = [Hanging(Text(f"  {name:<9} "), Text(value)) for name, value in lines.items()]
    found += [Hanging(Text("  caution   ", _CAUTION), Text(caution, _CAUTION)) for caution in cautions]
    return [first, *found]


def _mixture(data: PreparedData) -> list[RenderableType]:
    """How many examples of each source are in an epoch."""
    total = data.mixture.epoch_size
    numbers = [
        (f"{quota:,}", f"{quota / total:.1%}", f"{quota / count:.3g}", f"{count:,}")
        for count, quota in zip(data.mixture.counts, data.mixture.quotas, strict=True)
    ]
    wide = [max(map(len, column)) for column in zip(*numbers, strict=True)]
    heading = Text(f"mixture: {total:,} {COUNTED[data.audit.kind]} in an epoch", "bold")
    rows = []
    for audit, texts in zip(data.sources, numbers, strict=True):
        quota, share, passes, count = (f"{text:>{width}}" for text, width in zip(texts, wide, strict=True))
        rows.append(Hanging(Text(f"  {quota}  {share}  {passes} × {count}  "), Text(audit.source.file)))
    return [heading, *rows]


def _sample(sample: Sample, several: bool) -> list[RenderableType]:
    place = f"{sample.file} row {sample.number}" if several else f"row {sample.number}"
    verdict = f", {sample.verdict}" if sample.verdict else ""
    heading = Text(f"  {place} (line {sample.line}), {sample.tokens:,} tokens{verdict}", "bold")
    pictures = [Blocks(picture, indent=4) for picture in sample.pictures[:MOST]]
    return [heading, Hanging(Text("    "), sample_text(sample)), *pictures]


def sample_text(sample: Sample, head: int = _ON_SCREEN[0], tail: int = _ON_SCREEN[1], *, lines: bool = True) -> Text:
    """Show an example with its learned parts between ⟦ and ⟧.

    head, tail: characters shown of a long part.
    lines: keep line ends instead of showing them as escapes.
    """
    learning = False
    body = Text()
    for part in sample.parts:
        if part.supervised != learning:
            body.append("⟦" if part.supervised else "⟧", _LEARNED)
            learning = part.supervised
        style = _LEARNED if part.supervised else _CONTROL if part.control else ""
        body.append(_printable(shortened(part.text, head, tail), lines), style)
    if learning:
        body.append("⟧", _LEARNED)
    return body


def _printable(text: str, lines: bool) -> str:
    return "".join(
        letter if letter.isprintable() or (lines and letter == "\n") else letter.encode("unicode_escape").decode()
        for letter in text
    )


@dataclass(frozen=True)
class Part:
    """A part of an example. control: whether it is special tokens."""

    text: str
    control: bool


@dataclass(frozen=True)
class Example:
    """An example for the page.

    stretches: (whether it is learned, its parts), alternating.
    pictures: captions, each with a JPEG in base64.
    """

    title: str
    stretches: tuple[tuple[bool, tuple[Part, ...]], ...]
    pictures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AuditView:
    """One data set for the page.

    facts: (name, value) rows.
    sources: one row per file if there are several.
    """

    title: str
    file: str
    facts: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]
    examples: tuple[Example, ...]
    sources: Table


def audit_views(data: Mapping[str, Any]) -> list[AuditView]:
    """Views for the page. Raises KeyError, TypeError and the like if the file is not from `audit_to_json`."""
    return [_view(title, data[role]) for role, title in _ROLES.items() if data.get(role)]


def _view(title: str, audit: Mapping[str, Any]) -> AuditView:
    return AuditView(
        title,
        str(audit.get("file", "")),
        tuple(_facts(audit).items()),
        tuple(map(str, audit.get("cautions", ()))),
        tuple(_example(sample, len(audit.get("sources", ())) > 1) for sample in audit.get("samples", ())),
        _sources(audit.get("sources", ())),
    )


def _sources(sources: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (
            str(source["file"]),
            f"{source['records']:,}",
            f"{source['examples']:,}",
            f"{source['per_epoch']:,}" if "per_epoch" in source else "",
            f"{source['tokens']:,}",
            f"{source['supervised_share']:.1%}",
        )
        for source in sources
    )
    columns = ("source", "records", "examples", "in an epoch", "tokens", "learned")
    return Table(columns, rows if len(rows) > 1 else (), numeric=True)


def _facts(audit: AuditJson) -> dict[str, str]:
    facts = {**record_facts(audit), **size_facts(audit), **end_facts(audit), **token_facts(audit)}
    return {**facts, "SHA-256": str(audit["sha256"])}


def _example(sample: Mapping[str, Any], several: bool) -> Example:
    stretches = tuple(
        (bool(learned), tuple(Part(shortened(part["text"], *_ON_PAGE), part["control"]) for part in parts))
        for learned, parts in groupby(sample["parts"], key=itemgetter("supervised"))
    )
    place = f"row {sample['row']:,} (line {sample['line']:,}), {sample['tokens']:,} tokens"
    if sample.get("verdict"):
        place += f", {sample['verdict']}"
    pictures = tuple(map(from_json, sample.get("pictures", ())[:MOST]))
    return Example(f"{sample['file']}, {place}" if several else place, stretches, pictures)
