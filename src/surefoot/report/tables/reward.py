"""The findings of `surefoot evaluate reward` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from surefoot.data.audit import Audit
from surefoot.report.calibration import Bin
from surefoot.report.pictures.calibration import bins_table


def reward_lines(audit: Audit, found: Mapping[str, Any]) -> Iterator[str]:
    """What was measured on, what came out, and what to be careful about. found: as `reward_to_json` makes it."""
    source, data = audit.source, found["data"]
    yield f"data: {source.file}, {source.layout} records, template {source.template}"
    yield f"{data['pairs']:,} pairs of {source.used:,} records, {audit.truncated:,} answers cut"
    if source.dropped:
        yield f"caution: {len(source.dropped):,} records are left out: nothing of an answer is left, or there is none"
    low, high = found["accuracy_interval"]
    sure = f"95 % interval {low:.1%} to {high:.1%}"
    yield f"accuracy {found['accuracy']:.1%} ({sure}) · margin {_number(found['margin'])}"
    better, worse = _number(found["score_chosen"]), _number(found["score_rejected"])
    yield f"mean score of the better answers {better}, of the worse {worse}"
    yield f"loss ({found['loss']['kind']}) {_number(found['loss']['value'])}"
    yield f"expected calibration error {_share(found['calibration']['expected_error'])}"


def calibration_table(bins: Sequence[Bin]) -> Table:
    """How sure the model was against how often it was right, bin by bin."""
    plain = bins_table(bins)
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(plain.columns):
        table.add_column(heading, justify="right" if place else "left")
    for row in plain.rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1%}"
