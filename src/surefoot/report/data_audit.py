"""The data audit as JSON values for data.json, and as facts in words for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.method_facts.methods import COUNTED, OF_TOKENS
from surefoot.report.thumbnails import MOST, to_json
from surefoot.system.messages import first_few

if TYPE_CHECKING:  # the board and reports show audits without torch
    from surefoot.data.audit import Audit
    from surefoot.data.prepare import PreparedData
    from surefoot.data.tokenize.dataset import Place

_LISTED = 100  # dropped records named in data.json
AuditJson = Mapping[str, Any]  # one data set or file in the output of `audit_to_json`


def audit_to_json(data: PreparedData) -> dict[str, Any]:
    """The content of data.json, without paths of this machine. train and eval: each data set and its sources."""
    quotas = data.mixture.quotas
    train = [file_json(audit) | {"per_epoch": quota} for audit, quota in zip(data.sources, quotas, strict=True)]
    evaluation = None
    if data.eval_audit is not None:
        sources = [file_json(audit) for audit in data.eval_sources]
        evaluation = file_json(data.eval_audit, shown=True) | {"sources": sources}
    return {
        "train": file_json(data.audit, shown=True) | {"per_epoch": data.mixture.epoch_size, "sources": train},
        "eval": evaluation,
        "tokenizer_sha256": data.tokenizer_sha256,
    }


def all_cautions(data: PreparedData) -> list[str]:
    """All cautions for the report. Each source is checked by itself: a large share of one source may be little
    overall."""
    from surefoot.data.audit import cautions

    found: dict[str, list[str]] = {}
    for prefix, sources in (("", data.sources), ("evaluation data: ", data.eval_sources)):
        for audit in sources:
            for caution in cautions(audit):
                found.setdefault(f"{prefix}{caution}", []).append(audit.source.file)
    several = len(data.sources) > 1 or len(data.eval_sources) > 1
    return [f"{caution} (of {first_few(files, 3)})" if several else caution for caution, files in found.items()]


def record_facts(audit: AuditJson) -> dict[str, str]:
    """Layout, and the numbers of examples and records."""
    kind, used, records = audit.get("kind", "answers"), audit.get("used", audit["records"]), audit["records"]
    parts = [f"{audit['examples']:,} of {records:,} records"]
    if used < records:
        parts.append(f"the first {used:,} used")
    if continued := audit.get("continued"):
        parts.append(f"{continued:,} of them continue a text longer than one example")
    if audit.get("part"):
        parts.append(audit["part"])
    template = "" if audit["format"] in OF_TOKENS else f", template {audit['template']}"
    parts += [f"{audit['dropped']:,} dropped", f"{audit['truncated']:,} cut to length"]
    return {
        "format": f"{audit['format']} ({audit['format_reason']})" + template,
        COUNTED.get(kind, "examples"): ", ".join(parts),
    }


def size_facts(audit: AuditJson) -> dict[str, str]:
    """Tokens, lengths, and how chosen and rejected answers differ in length."""
    kind, length, tokens = audit.get("kind", "answers"), audit["length"], f"{audit['tokens']:,}"
    if kind != "prompts":
        what = "are learned" if kind == "answers" else "belong to the answers"
        tokens += f", of which {audit['supervised']:,} {what} ({audit['supervised_share']:.1%})"
    found = {
        "tokens": tokens,
        "length": f"{length['shortest']:,} to {length['longest']:,}, median {length['median']:,}, "
        f"95 % up to {length['p95']:,}",
    }
    if pictures := audit.get("pictures"):
        count, total = pictures["count"], pictures["tokens"]
        found["pictures"] = f"{count:,}, which take {total:,} tokens ({total / count:,.0f} each on average)"
    if pairs := audit.get("pairs"):
        names = ("better_tokens", "worse_tokens", "better_longer")
        better, worse, longer = (pairs[name] / pairs["count"] for name in names)
        found["answers"] = (
            f"better answers {better:,.1f} tokens on average, worse ones {worse:,.1f}; the better one is longer in "
            f"{longer:.1%} of the pairs, {pairs['identical']:,} pairs have two equal answers"
        )
    elif kind == "judged":
        good, count = audit["good"], audit["examples"]
        found["judged"] = f"{good:,} good ({good / count:.1%}), {count - good:,} bad"
    return found


def end_facts(audit: AuditJson) -> dict[str, str]:
    """How many answers end with a stop token that is trained on."""
    if audit.get("kind") == "prompts":
        return {}
    continued = audit.get("continued", 0)
    whole, what = audit["answers"] - continued, "texts" if continued else "answers"
    return {
        "stop": f"{audit['answers_with_stop']:,} of {whole:,} {what} end with a learned {' or '.join(audit['stops'])}"
    }


def token_facts(audit: AuditJson) -> dict[str, str]:
    """BOS and PAD."""
    start = f"exactly once, at the start of every {'text' if audit.get('continued') else 'example'}"
    masked = "masked by position" if audit["pad"] in audit["stops"] else "which occurs in no example"
    return {"BOS": f"{audit['bos']}, {start}" if audit.get("bos") else "none", "PAD": f"{audit['pad']}, {masked}"}


def file_json(audit: Audit, *, shown: bool = False) -> dict[str, Any]:
    """The audit of one data set or file.

    shown: include the samples' pictures as thumbnails. Raises InputError for a picture that has changed.
    """
    from surefoot.data.audit import cautions

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
                **({"pictures": list(map(to_json, sample.pictures[:MOST]))} if shown and sample.pictures else {}),
            }
            for sample in audit.samples
        ],
    }


def _kind(audit: Audit) -> dict[str, Any]:
    """Fields about pictures, and those of data other than supervised examples."""
    pictures = {"pictures": {"count": audit.pictures, "tokens": audit.picture_tokens}} if audit.pictures else {}
    if audit.kind == "answers":
        return pictures
    counts = {"pairs": asdict(audit.pairs)} if audit.pairs else {}
    return {"kind": audit.kind, **counts, **({"good": audit.good} if audit.kind == "judged" else {}), **pictures}


def _dropped(places: tuple[Place, ...]) -> list[dict[str, Any]]:
    return [{"file": _plain_name(file), "row": number, "line": line} for file, number, line in places[:_LISTED]]


def _plain_name(file: str) -> str:
    """The file name without folders of this machine; names of several files are joined by commas."""
    names = [Path(name) for name in file.split(", ")]
    return ", ".join(name.name if name.is_absolute() else name.as_posix() for name in names)
