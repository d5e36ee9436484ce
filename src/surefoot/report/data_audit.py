"""The data audit for people and for data.json.

What the model learns stands between ⟦ and ⟧, on a terminal in bold colour as well, so that nobody depends on colours.
Texts of the data may hold anything; control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from surefoot.data.audit import Audit, Sample, cautions
from surefoot.data.prepare import PreparedData

_HEAD, _TAIL = 320, 120  # characters shown of a long stretch of a sample
_LEARNED, _CONTROL, _CAUTION = "bold green", "dim", "yellow"
_LISTED = 100  # dropped records named in data.json


def audit_report(data: PreparedData) -> Text:
    """Counts, proofs, cautions and three samples, for a terminal or a pipe."""
    report = _counts("training data", data.audit)
    if data.eval_audit is not None:
        report.append_text(_counts("evaluation data", data.eval_audit))
    report.append("what the model learns stands between ⟦ and ⟧\n", "bold")
    for sample in data.audit.samples:
        report.append_text(_sample(sample))
    report.rstrip()
    return report


def audit_to_json(data: PreparedData) -> dict[str, Any]:
    """For data.json: plain values, no path of this machine."""
    return {
        "train": _file(data.audit),
        "eval": None if data.eval_audit is None else _file(data.eval_audit),
        "tokenizer_sha256": data.tokenizer_sha256,
    }


def _counts(title: str, audit: Audit) -> Text:
    source = audit.source
    text = Text(f"{title}: {source.file}\n", "bold")
    text.stylize("not bold", len(title) + 1)
    lines = {
        "format": f"{source.layout} ({source.layout_reason}), template {source.template}",
        "examples": _examples(audit),
        "tokens": f"{audit.tokens:,}, of which {audit.supervised_tokens:,} are learned ({audit.supervised_share:.1%})",
        "length": f"{audit.shortest:,} to {audit.longest:,}, median {audit.median:,}, 95 % up to {audit.p95:,}",
        "BOS": f"{audit.bos}, exactly once, at the start of every example" if audit.bos else "none",
        "stop": f"{audit.ended:,} of {audit.answers:,} answers end with a learned {' or '.join(audit.stops)}",
        "PAD": f"{audit.pad}, " + ("masked by position" if audit.pad in audit.stops else "which occurs in no example"),
    }
    for name, value in lines.items():
        text.append(f"  {name:<9} {value}\n")
    for caution in cautions(audit):
        text.append(f"  caution   {caution}\n", _CAUTION)
    return text


def _examples(audit: Audit) -> str:
    source = audit.source
    parts = [f"{audit.kept:,} of {source.rows:,} records"]
    if source.used < source.rows:
        parts.append(f"the first {source.used:,} used")
    if source.part:
        parts.append(source.part)
    parts += [f"{len(source.dropped):,} dropped", f"{audit.truncated:,} cut to length"]
    return ", ".join(parts)


def _sample(sample: Sample) -> Text:
    text = Text(f"  row {sample.number} (line {sample.line}), {sample.tokens:,} tokens\n", "bold")
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
    name = Path(source.file)
    return {
        "file": name.name if name.is_absolute() else name.as_posix(),
        "sha256": source.sha256,
        "part": source.part,
        "format": source.layout,
        "format_reason": source.layout_reason,
        "template": source.template,
        "records": source.rows,
        "used": source.used,
        "examples": audit.kept,
        "dropped": len(source.dropped),
        "dropped_records": [{"row": number, "line": line} for number, line in source.dropped[:_LISTED]],
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
