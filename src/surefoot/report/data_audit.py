"""The data audit for people and for data.json.

What the model learns stands between ⟦ and ⟧, on a terminal in bold colour as well, so that nobody depends on colours.
Texts of the data may hold anything; control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.data.audit import Audit, Sample, cautions
from surefoot.data.facts import Place
from surefoot.data.prepare import PreparedData

_HEAD, _TAIL = 320, 120  # characters shown of a long stretch of a sample
_LEARNED, _CONTROL, _CAUTION = "bold green", "dim", "yellow"
_LISTED = 100  # dropped records named in data.json


def audit_report(data: PreparedData) -> RenderableType:
    """Counts, proofs, cautions and some samples, for `Console.show`."""
    parts = [part for audit in data.sources for part in _counts("training data", audit)]
    if len(data.sources) > 1:
        parts += _mixture(data)
    parts += [part for audit in data.eval_sources for part in _counts("evaluation data", audit)]
    samples = data.audit.samples
    if len(data.sources) > 1:  # of each the one with the most to see
        samples = [max(audit.samples, key=lambda sample: len(sample.parts)) for audit in data.sources]
    parts.append(Text("what the model learns stands between ⟦ and ⟧", "bold"))
    return Group(*parts, *(_sample(sample, len(data.sources) > 1) for sample in samples))


def audit_to_json(data: PreparedData) -> dict[str, Any]:
    """For data.json: plain values, no path of this machine. train and eval: each set as a whole, and its sources."""
    quotas = data.mixture.quotas
    train = [_file(audit) | {"per_epoch": quota} for audit, quota in zip(data.sources, quotas, strict=True)]
    evaluation = None
    if data.eval_audit is not None:
        evaluation = _file(data.eval_audit) | {"sources": [_file(audit) for audit in data.eval_sources]}
    return {
        "train": _file(data.audit) | {"per_epoch": data.mixture.epoch_size, "sources": train},
        "eval": evaluation,
        "tokenizer_sha256": data.tokenizer_sha256,
    }


def _counts(title: str, audit: Audit) -> list[RenderableType]:
    source = audit.source
    heading = Text(f"{title}: {source.file}", "bold")
    heading.stylize("not bold", len(title) + 1)
    bos = f"{audit.bos}, exactly once, at the start of every {'text' if audit.continued else 'example'}"
    lines = {
        "format": f"{source.layout} ({source.layout_reason}), template {source.template}",
        "examples": _examples(audit),
        "tokens": f"{audit.tokens:,}, of which {audit.supervised_tokens:,} are learned ({audit.supervised_share:.1%})",
        "length": f"{audit.shortest:,} to {audit.longest:,}, median {audit.median:,}, 95 % up to {audit.p95:,}",
        "BOS": bos if audit.bos else "none",
        "stop": f"{audit.ended:,} of {audit.answers:,} answers end with a learned {' or '.join(audit.stops)}",
        "PAD": f"{audit.pad}, " + ("masked by position" if audit.pad in audit.stops else "which occurs in no example"),
    }
    table = _grid(1)
    for name, value in lines.items():
        table.add_row(f"  {name:<9}", Text(value))
    for caution in cautions(audit):
        table.add_row(Text("  caution", _CAUTION), Text(caution, _CAUTION))
    return [heading, table]


def _grid(columns: int) -> Table:
    """Columns as wide as what is in them, and a last one whose lines go on below it."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(columns):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _examples(audit: Audit) -> str:
    source = audit.source
    parts = [f"{audit.kept:,} of {source.rows:,} records"]
    if source.used < source.rows:
        parts.append(f"the first {source.used:,} used")
    if audit.continued:
        parts.append(f"{audit.continued:,} of them go on with a text that is longer than one example")
    if source.part:
        parts.append(source.part)
    parts += [f"{len(source.dropped):,} dropped", f"{audit.truncated:,} cut to length"]
    return ", ".join(parts)


def _mixture(data: PreparedData) -> list[RenderableType]:
    """How many examples of each source an epoch holds."""
    total = data.mixture.epoch_size
    table = _grid(3)
    for audit, count, quota in zip(data.sources, data.mixture.counts, data.mixture.quotas, strict=True):
        table.add_row(
            f"  {quota:,}", f"{quota / total:.1%}", f"{quota / count:.3g} of its {count:,}", audit.source.file
        )
    return [Text(f"mixture: {total:,} examples in an epoch", "bold"), table]


def _sample(sample: Sample, several: bool) -> Text:
    place = f"{sample.file} row {sample.number}" if several else f"row {sample.number}"
    text = Text(f"  {place} (line {sample.line}), {sample.tokens:,} tokens\n", "bold")
    learning = False
    body = Text()
    for part in sample.parts:
        if part.supervised != learning:
            body.append("⟦" if part.supervised else "⟧", _LEARNED)
            learning = part.supervised
        style = _LEARNED if part.supervised else _CONTROL if part.control else ""
        body.append(_shortened(part.text), style)
    if learning:
        body.append("⟧", _LEARNED)
    for line in body.split("\n", allow_blank=True):
        text.append("    ").append_text(line).append("\n")
    text.rstrip()
    return text


def _shortened(text: str) -> str:
    if len(text) > _HEAD + _TAIL:
        left_out = len(text) - _HEAD - _TAIL
        text = f"{text[:_HEAD]} … ({left_out:,} more characters) … {text[-_TAIL:]}"
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _file(audit: Audit) -> dict[str, Any]:
    source = audit.source
    return {
        "file": _plain_name(source.file),
        "sha256": source.sha256,
        "part": source.part,
        "format": source.layout,
        "format_reason": source.layout_reason,
        "template": source.template,
        "records": source.rows,
        "used": source.used,
        "examples": audit.kept,
        "continued": audit.continued,
        "dropped": len(source.dropped),
        "dropped_records": _records(source.dropped),
        "placeholders": len(source.placeholders),
        "truncated": audit.truncated,
        "stop_lost": audit.stop_lost,
        "prompt_lost": audit.prompt_lost,
        "control_text": audit.control_text,
        "duplicates": audit.duplicates,
        "overlap": audit.overlap,
        "tokens": audit.tokens,
        "supervised": audit.supervised_tokens,
        "supervised_share": round(audit.supervised_share, 6),
        "length": {"shortest": audit.shortest, "median": audit.median, "p95": audit.p95, "longest": audit.longest},
        "bos": audit.bos,
        "pad": audit.pad,
        "stops": list(audit.stops),
        "answers": audit.answers,
        "answers_with_stop": audit.ended,
        "unused_fields": list(source.unused),
        "cautions": list(cautions(audit)),
        "samples": [
            {
                "file": _plain_name(sample.file),
                "row": sample.number,
                "line": sample.line,
                "tokens": sample.tokens,
                "parts": [
                    {"text": part.text, "supervised": part.supervised, "control": part.control} for part in sample.parts
                ],
            }
            for sample in audit.samples
        ],
    }


def _records(places: tuple[Place, ...]) -> list[dict[str, Any]]:
    return [{"file": _plain_name(file), "row": number, "line": line} for file, number, line in places[:_LISTED]]


def _plain_name(file: str) -> str:
    """A file without the folders of this machine; names of several files are joined by commas."""
    names = [Path(name) for name in file.split(", ")]
    return ", ".join(name.name if name.is_absolute() else name.as_posix() for name in names)
