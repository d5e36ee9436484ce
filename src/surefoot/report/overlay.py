"""Several runs in one frame: a self-contained page with a line per run in every chart, and tables beside them.

charts = run_charts({"scale 1": rows_of_one, "scale 0.1": rows_of_another})
page = overlay_page("BOS sweep", "five runs …", charts, [("Results", table)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.report.curves import Chart, Line, number, thinned, to_json
from surefoot.report.page import render
from surefoot.report.rows import Row
from surefoot.report.views import Table

_QUANTITIES = (
    ("loss", "Training loss", "nats per token"),
    ("eval_loss", "Evaluation loss", "nats per token"),
    ("grad_norm", "Gradient norm", "before clipping"),
)


def run_charts(runs: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Losses and gradient norms by step, for the quantities that any run logged. runs: rows of trainer_log.jsonl by the
    name of the line. A value that is not finite is a gap."""
    charts = []
    for key, title, unit in _QUANTITIES:
        lines = [
            Line(name, "line", tuple((row["current_steps"], number(row[key])) for row in rows if key in row))
            for name, rows in runs.items()
        ]
        if kept := tuple(line for line in lines if line.points):
            charts.append(Chart(key, title, unit, kept))
    return charts


def position_chart(key: str, title: str, values: Mapping[str, Sequence[float]], most: int) -> Chart:
    """values: by the name of the line, one per position; the first `most` are drawn, counted from 1."""
    lines = [
        Line(name, "line", tuple((place, number(value)) for place, value in enumerate(row[:most], start=1)))
        for name, row in values.items()
    ]
    return Chart(key, title, "mean norm", tuple(lines), x="position")


def layer_chart(key: str, title: str, unit: str, values: Mapping[str, Sequence[float | None]]) -> Chart:
    """values: by the name of the line, one per layer."""
    lines = [
        Line(name, "line", tuple((layer, number(value)) for layer, value in enumerate(row)))
        for name, row in values.items()
    ]
    return Chart(key, title, unit, tuple(lines), x="layer")


def overlay_page(
    title: str,
    summary: str,
    charts: Sequence[Chart],
    tables: Sequence[tuple[str, Table]],
    cautions: Sequence[str] = (),
) -> str:
    """The page, ready to be written. tables: each with its heading."""
    values = {
        "title": title,
        "summary": summary,
        "cautions": list(cautions),
        "tables": list(tables),
        "curves": {"charts": to_json(thinned(charts)), "marks": []},
        "live": "",
    }
    return render("overlay.html", values)
