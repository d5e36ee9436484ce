"""The data audit for people and for data.json.

What the model learns stands between ⟦ and ⟧, on a terminal in bold colour as well, so that nobody depends on colours.
Texts of the data may hold anything; control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surefoot.data.audit import Audit, Sample, cautions
from surefoot.data.prepare import PreparedData
from surefoot.data.sources.records import Kind
from surefoot.data.tokenize.dataset import Place
from surefoot.report.console import Hanging
from surefoot.system.messages import first_few

_HEAD, _TAIL = 320, 120  # characters shown of a long stretch of a sample
_LEARNED, _CONTROL, _CAUTION = "bold green", "dim", "yellow"
_LISTED = 100  # dropped records named in data.json
_UNITS: Mapping[Kind, str] = {"pairs": "pairs", "prompts": "prompts"}
_LEGENDS: Mapping[Kind, str] = {
    "answers": "what the model learns stands between ⟦ and ⟧",
    "pairs": "the answers that are compared stand between ⟦ and ⟧",
    "judged": "the answers that were judged stand between ⟦ and ⟧",
    "prompts": "what the model is to answer",
}


def audit_report(data: PreparedData) -> RenderableType:
    """Counts, proofs, cautions and some samples, for `Console.show`."""
    parts, several = _set("training data", data.audit, data.sources), len(data.sources) > 1
    if several:
        parts += _mixture(data)
    if data.eval_audit is not None:
        parts += _set("evaluation data", data.eval_audit, data.eval_sources)
    samples: Sequence[Sample] = data.audit.samples
    if several and data.rows_per_item == 1:  # of each source the one with the most to see
        samples = [max(audit.samples, key=lambda sample: len(sample.parts)) for audit in data.sources]
    parts.append(Text(_LEGENDS[data.audit.kind], "bold"))
    return Group(*parts, *(part for sample in samples for part in _sample(sample, several)))


def all_cautions(data: PreparedData) -> list[str]:
    """Those of the report. What is much of one source may be little of all, so each speaks for itself."""
    found: dict[str, list[str]] = {}
    for prefix, sources in (("", data.sources), ("evaluation data: ", data.eval_sources)):
        for audit in sources:
            for caution in cautions(audit):
                found.setdefault(f"{prefix}{caution}", []).append(audit.source.file)
    several = len(data.sources) > 1 or len(data.eval_sources) > 1
    return [f"{caution} (of {first_few(files, 3)})" if several else caution for caution, files in found.items()]


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


def _set(title: str, whole: Audit, sources: Sequence[Audit]) -> list[RenderableType]:
    """Every source; and, where there are several, what is the same for all of them only once."""
    if len(sources) == 1:
        lines = {**_records(whole), **_size(whole), **_ends(whole), **_control(whole)}
        return _block(f"{title}: {whole.source.file}", lines, cautions(whole))
    parts = []
    for audit in sources:
        lines = {**_records(audit), **_size(audit), **_ends(audit)}
        parts += _block(f"{title}: {audit.source.file}", lines, cautions(audit))
    unit = _UNITS.get(whole.kind, "examples")
    together = f"{title} together: {whole.kept:,} {unit} of {len(sources)} sources"
    return parts + _block(together, {**_size(whole), **_control(whole)}, ())


def _block(heading: str, lines: Mapping[str, str], cautions: Sequence[str]) -> list[RenderableType]:
    first = Text(heading, "bold")
    first.stylize("not bold", heading.index(":") + 1)
    found = [Hanging(Text(f"  {name:<9} "), Text(value)) for name, value in lines.items()]
    found += [Hanging(Text("  caution   ", _CAUTION), Text(caution, _CAUTION)) for caution in cautions]
    return [first, *found]


def _records(audit: Audit) -> dict[str, str]:
    source = audit.source
    return {
        "format": f"{source.layout} ({source.layout_reason}), template {source.template}",
        _UNITS.get(audit.kind, "examples"): _examples(audit),
    }


def _size(audit: Audit) -> dict[str, str]:
    tokens = f"{audit.tokens:,}"
    if audit.kind != "prompts":
        what = "are learned" if audit.kind == "answers" else "belong to the answers"
        tokens += f", of which {audit.supervised_tokens:,} {what} ({audit.supervised_share:.1%})"
    return {
        "tokens": tokens,
        "length": f"{audit.shortest:,} to {audit.longest:,}, median {audit.median:,}, 95 % up to {audit.p95:,}",
        **_verdicts(audit),
    }


def _verdicts(audit: Audit) -> dict[str, str]:
    """What tells the answers apart, before any model has seen them."""
    if audit.pairs:
        mean = [total / audit.pairs.count for total in (audit.pairs.better_tokens, audit.pairs.worse_tokens)]
        longer = audit.pairs.better_longer / audit.pairs.count
        return {
            "answers": f"{mean[0]:,.1f} tokens in the mean if better, {mean[1]:,.1f} if worse; the better one is "
            f"longer in {longer:.1%} of the pairs, {audit.pairs.identical:,} pairs of two equal answers"
        }
    if audit.kind == "judged":
        return {"judged": f"{audit.good:,} good ({audit.good / audit.kept:.1%}), {audit.kept - audit.good:,} bad"}
    return {}


def _ends(audit: Audit) -> dict[str, str]:
    if audit.kind == "prompts":
        return {}
    whole, what = audit.answers - audit.continued, "texts" if audit.continued else "answers"
    return {"stop": f"{audit.ended:,} of {whole:,} {what} end with a learned {' or '.join(audit.stops)}"}


def _control(audit: Audit) -> dict[str, str]:
    bos = f"{audit.bos}, exactly once, at the start of every {'text' if audit.continued else 'example'}"
    return {
        "BOS": bos if audit.bos else "none",
        "PAD": f"{audit.pad}, " + ("masked by position" if audit.pad in audit.stops else "which occurs in no example"),
    }


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
    numbers = [
        (f"{quota:,}", f"{quota / total:.1%}", f"{quota / count:.3g}", f"{count:,}")
        for count, quota in zip(data.mixture.counts, data.mixture.quotas, strict=True)
    ]
    wide = [max(map(len, column)) for column in zip(*numbers, strict=True)]
    heading = Text(f"mixture: {total:,} {_UNITS.get(data.audit.kind, 'examples')} in an epoch", "bold")
    rows = []
    for audit, texts in zip(data.sources, numbers, strict=True):
        quota, share, passes, count = (f"{text:>{width}}" for text, width in zip(texts, wide, strict=True))
        rows.append(Hanging(Text(f"  {quota}  {share}  {passes} × {count}  "), Text(audit.source.file)))
    return [heading, *rows]


def _sample(sample: Sample, several: bool) -> list[RenderableType]:
    place = f"{sample.file} row {sample.number}" if several else f"row {sample.number}"
    verdict = f", {sample.verdict}" if sample.verdict else ""
    heading = Text(f"  {place} (line {sample.line}), {sample.tokens:,} tokens{verdict}", "bold")
    return [heading, Hanging(Text("    "), sample_text(sample))]


def sample_text(sample: Sample, head: int = _HEAD, tail: int = _TAIL, *, lines: bool = True) -> Text:
    """head, tail: characters that are shown of a long stretch. lines: line ends are kept, else shown as escapes."""
    learning = False
    body = Text()
    for part in sample.parts:
        if part.supervised != learning:
            body.append("⟦" if part.supervised else "⟧", _LEARNED)
            learning = part.supervised
        style = _LEARNED if part.supervised else _CONTROL if part.control else ""
        body.append(_shortened(part.text, head, tail, lines), style)
    if learning:
        body.append("⟧", _LEARNED)
    return body


def _shortened(text: str, head: int, tail: int, lines: bool) -> str:
    if len(text) > head + tail:
        left_out = len(text) - head - tail
        text = f"{text[:head]} … ({left_out:,} more characters) … {text[-tail:]}"
    return "".join(
        letter if letter.isprintable() or (lines and letter == "\n") else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _file(audit: Audit) -> dict[str, Any]:
    source = audit.source
    return {
        "file": _plain_name(source.file),
        "sha256": source.sha256,
        "commit": source.commit,
        "part": source.part,
        "format": source.layout,
        "format_reason": source.layout_reason,
        "template": source.template,
        "records": source.rows,
        "used": source.used,
        "examples": audit.kept,
        "continued": audit.continued,
        "dropped": len(source.dropped),
        "dropped_records": _dropped(source.dropped),
        "placeholders": len(source.placeholders),
        "truncated": audit.truncated,
        "stop_lost": audit.stop_lost,
        "answers_lost": audit.answers_lost,
        "prompt_cut": audit.prompt_cut,
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
        **_kind(audit),
        "samples": [
            {
                "file": _plain_name(sample.file),
                "row": sample.number,
                "line": sample.line,
                "tokens": sample.tokens,
                **({"verdict": sample.verdict} if sample.verdict else {}),
                "parts": [
                    {"text": part.text, "supervised": part.supervised, "control": part.control} for part in sample.parts
                ],
            }
            for sample in audit.samples
        ],
    }


def _kind(audit: Audit) -> dict[str, Any]:
    """What data for supervised training does not have."""
    if audit.kind == "answers":
        return {}
    counts = {"pairs": asdict(audit.pairs)} if audit.pairs else {}
    return {"kind": audit.kind, **counts, **({"good": audit.good} if audit.kind == "judged" else {})}


def _dropped(places: tuple[Place, ...]) -> list[dict[str, Any]]:
    return [{"file": _plain_name(file), "row": number, "line": line} for file, number, line in places[:_LISTED]]


def _plain_name(file: str) -> str:
    """A file without the folders of this machine; names of several files are joined by commas."""
    names = [Path(name) for name in file.split(", ")]
    return ", ".join(name.name if name.is_absolute() else name.as_posix() for name in names)
