"""The data audit of data.json for the report: counts, cautions, and examples in which one sees what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from surefoot.report.views import Table

_HEAD, _TAIL = 1200, 300  # characters shown of a long stretch of a sample
_ROLES = {"train": "training data", "eval": "evaluation data"}


@dataclass(frozen=True)
class Part:
    """A stretch of an example. control: special tokens."""

    text: str
    control: bool


@dataclass(frozen=True)
class Example:
    """stretches: (whether loss is taken on it, its parts), alternating."""

    title: str
    stretches: tuple[tuple[bool, tuple[Part, ...]], ...]


@dataclass(frozen=True)
class AuditView:
    """One data set. facts: (name, value) rows. sources: a row for each file, where there are several."""

    title: str
    file: str
    facts: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]
    examples: tuple[Example, ...]
    sources: Table


def audit_views(data: Mapping[str, Any]) -> list[AuditView]:
    """Raises KeyError, TypeError and their like where the file is not what `audit_to_json` writes."""
    return [_view(title, data[role]) for role, title in _ROLES.items() if data.get(role)]


def _view(title: str, audit: Mapping[str, Any]) -> AuditView:
    return AuditView(
        title,
        str(audit.get("file", "")),
        tuple(_facts(audit)),
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


def _share_of(audit: Mapping[str, Any]) -> str:
    """Why examples can be fewer than the records."""
    used, part = audit.get("used", audit["records"]), audit.get("part", "")
    first = f", the first {used:,} used" if used < audit["records"] else ""
    return f"{first}{f', {part}' if part else ''}"


def _facts(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    length = audit["length"]
    bos = f"{audit['bos']}, once, at the start of every example" if audit.get("bos") else "none"
    return [
        ("format", f"{audit['format']} ({audit['format_reason']}), template {audit['template']}"),
        (
            "examples",
            f"{audit['examples']:,} of {audit['records']:,} records{_share_of(audit)}; {audit['dropped']:,} dropped, "
            f"{audit['truncated']:,} cut to length",
        ),
        (
            "tokens",
            f"{audit['tokens']:,}, of which {audit['supervised']:,} are learned ({audit['supervised_share']:.1%})",
        ),
        (
            "length",
            f"{length['shortest']:,} to {length['longest']:,} tokens, median {length['median']:,}, "
            f"95 % up to {length['p95']:,}",
        ),
        ("BOS", bos),
        *_verdicts(audit),
        (
            "stop",
            f"{audit['answers_with_stop']:,} of {audit['answers']:,} answers end with a learned "
            f"{' or '.join(audit['stops'])}",
        ),
        ("PAD", str(audit["pad"])),
        ("SHA-256", str(audit["sha256"])),
    ]


def _verdicts(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of pairs and of judged answers."""
    if pairs := audit.get("pairs"):
        mean = [pairs[name] / pairs["count"] for name in ("better_tokens", "worse_tokens")]
        longer = f"the better one is longer in {pairs['better_longer'] / pairs['count']:.1%}"
        return [
            ("pairs", f"{pairs['count']:,}, {pairs['identical']:,} of them two equal answers"),
            ("mean answer", f"{mean[0]:,.1f} tokens if better, {mean[1]:,.1f} if worse; {longer}"),
        ]
    if audit.get("kind") == "judged":
        return [("judged good", f"{audit['good']:,} of {audit['examples']:,} answers")]
    return []


def _example(sample: Mapping[str, Any], several: bool) -> Example:
    stretches = tuple(
        (bool(learned), tuple(Part(_shortened(part["text"]), part["control"]) for part in parts))
        for learned, parts in groupby(sample["parts"], key=itemgetter("supervised"))
    )
    place = f"row {sample['row']:,} (line {sample['line']:,}), {sample['tokens']:,} tokens"
    if sample.get("verdict"):
        place += f", {sample['verdict']}"
    return Example(f"{sample['file']}, {place}" if several else place, stretches)


def _shortened(text: str) -> str:
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]} … ({len(text) - _HEAD - _TAIL:,} more characters) … {text[-_TAIL:]}"
