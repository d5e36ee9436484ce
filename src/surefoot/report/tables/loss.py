"""The findings of `surefoot evaluate loss` as a table: a row for each side, the base first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from surefoot.data.audit import Audit
from surefoot.training.report import EvalReport


def loss_table(results: Mapping[str, EvalReport]) -> Table:
    """Loss in nats per supervised token, perplexity, share of supervised tokens that are the first choice, seconds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("loss", "perplexity", "token accuracy", "seconds"):
        table.add_column(heading, justify="right")
    for name, report in results.items():
        accuracy = "" if report.accuracy is None else f"{report.accuracy:.2%}"
        perplexity = "" if report.perplexity is None else f"{report.perplexity:.4g}"
        numbers = (f"{report.loss:.5f}", perplexity, accuracy, f"{report.seconds:.1f}")
        table.add_row(name, *numbers)
    return table


def loss_lines(audit: Audit, results: Mapping[str, EvalReport], max_length: int) -> Iterator[str]:
    """What was measured on, and what to be careful about."""
    source = audit.source
    yield f"data: {source.file}, {source.layout} records, template {source.template}"
    yield (
        f"{audit.kept:,} examples of {source.used:,} records, {audit.supervised_tokens:,} supervised tokens of "
        f"{audit.tokens:,}, {audit.truncated:,} examples cut at {max_length:,} tokens"
    )
    if source.dropped:
        yield f"caution: {len(source.dropped):,} records have no label left within {max_length:,} tokens: not measured"
    if audit.stop_lost:
        yield f"caution: {audit.stop_lost:,} answers lost their end, so their stop token is not measured"
    for name, report in results.items():
        if not abs(report.loss) < float("inf"):
            yield f"caution: the loss of the {name} is not finite"
