"""report.html: one file that tells a run, to be read now or in ten years, on a phone or on paper, offline.

It is made from the run folder alone, so it can be written whenever a run ends, well or badly, and again later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.report import curves, views
from surefoot.report.page import render
from surefoot.report.pictures.calibration import last_calibration
from surefoot.report.record import RunRecord, read_run
from surefoot.report.status import Status, status_told, verdict
from surefoot.report.tables.audit import audit_views
from surefoot.system import durable
from surefoot.system.folders import MANIFEST as MANIFEST

NAME = "report.html"
_NOTHING = views.Table((), ())


def write_report(run: Path) -> Path:
    """Write report.html into the run folder and return its path. What cannot be read of the folder is named in the page
    and never an error; only a disk that cannot be written is (EnvironmentFault)."""
    record = read_run(run)
    status = status_told(record.events, published=(run / MANIFEST).is_file())
    path = run / NAME
    durable.write_text(path, report_page(record, status))
    return path


def draw_report(run: Path) -> tuple[list[str], list[str]]:
    """`write_report` for the end of a run: the name of the file, or a caution in its place."""
    try:
        return [write_report(run).name], []
    except Exception as error:  # whatever it is, the model is worth more than its report
        return [], [f"{NAME} was not written: {type(error).__name__}: {error}"]


def report_page(record: RunRecord, status: Status, *, live: str = "", back: str = "") -> str:
    """live: address of the stream that keeps the page up to date, on the board. back: address of the board itself."""
    moving, standing = live_values(record, status), _standing_values(record, status)
    cautions = [*record.cautions, *moving.pop("cautions"), *standing.pop("cautions")]
    values = {"title": record.name, "live": live, "back": back, "cautions": cautions, **moving, **standing}
    return render("report.html", values, connect="'self'" if live else "'none'")


def live_values(record: RunRecord, status: Status) -> dict[str, Any]:
    """What changes while a run goes on, but for the curves."""
    cautions: list[str] = []
    rows, events = record.rows, record.events
    return {
        "status": status,
        "verdict": verdict(status, rows, events),
        "figures": views.guarded(
            "the row of figures", lambda: views.figures(rows, status, record.results), [], cautions
        ),
        "values": views.value_table(rows),
        "events": views.guarded("the list of events", lambda: views.event_list(events), ([], 0), cautions),
        "samples": views.guarded("the samples", lambda: views.sample_groups(record.samples), ([], 0), cautions),
        "cautions": cautions,
    }


def curve_values(record: RunRecord) -> dict[str, Any]:
    """For the page's script: all the curves, thinned, and what is marked on them."""
    charts = curves.thinned(curves.charts_of(record.rows))
    return {"charts": curves.to_json(charts), "marks": views.marks(record.events, record.rows)}


def _standing_values(record: RunRecord, status: Status) -> dict[str, Any]:
    cautions: list[str] = []
    facts = record.environment
    return {
        "curves": curve_values(record),
        "calibration": views.guarded("the calibration", lambda: last_calibration(record.rows), None, cautions),
        "plan": views.plan_choices(record),
        "memory": views.plan_memory(record),
        "notes": list(record.plan.cautions) if record.plan else [],
        "audits": views.guarded("the data audit", lambda: audit_views(record.data), [], cautions),
        "profile": views.guarded("the profile", lambda: views.profile(record), None, cautions),
        "results": views.guarded("the results", lambda: views.results(record), _NOTHING, cautions),
        "machine": views.guarded("the environment", lambda: views.environment(record), _NOTHING, cautions),
        "version": views.guarded("the version", lambda: facts["versions"]["surefoot"] if facts else "", "", cautions),
        "config": record.config,
        "commands": views.commands(record, status),
        "cautions": cautions,
    }
