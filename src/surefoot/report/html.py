"""report.html: one self-contained page about a run that works offline.

It is made from the run folder alone, so it can be written whenever a run ends, well or badly, and again later.

Templates are filled with escaped values; style and script are inline and nothing is fetched. Control characters are
shown as escapes, because file names, configs and generated text may hold anything. The Content-Security-Policy names
the hash of each inline style and script, so that nothing else runs even if an escape were missing.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from surefoot.report import curves, views
from surefoot.report.calibration import last_calibration
from surefoot.report.record import RunRecord, read_run
from surefoot.report.status import Status, reported_status, verdict
from surefoot.report.tables.audit import audit_views
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault
from surefoot.system.folders import MANIFEST as MANIFEST

_ASSETS = resources.files("surefoot.report") / "assets"
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "page.js")


def render(template: str, values: Mapping[str, Any], connect: str = "'none'") -> str:
    """Return a page.

    template: a file in `assets`.
    values: unescaped values for it.
    connect: where its script may fetch from.
    """
    return part(template, {**values, "style": _inline(_STYLES), "script": _inline(_SCRIPTS), "policy": policy(connect)})


def part(template: str, values: Mapping[str, Any]) -> str:
    """Return a fragment of a page, with which the live page replaces its own."""
    return _templates().get_template(template).render(values)


@cache
def policy(connect: str = "'none'") -> str:
    """The Content-Security-Policy of a page. connect: where its script may fetch from."""
    style, script = (_hash(_inline(names)) for names in (_STYLES, _SCRIPTS))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("surefoot.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Used by the filter tojson, which also escapes "<": inside a script it could end the data early.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    return environment


@cache
def _inline(names: tuple[str, ...]) -> Markup:
    """Concatenate asset files exactly as they appear between the tags: the policy's hash is computed from this."""
    return Markup("\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in names))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(value: Any) -> Any:
    """Replace control characters by visible escapes, such as ANSI codes and text direction marks."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(letter if _is_shown(letter) else letter.encode("unicode_escape").decode() for letter in value)


def _is_shown(letter: str) -> bool:
    """Spaces of all scripts, and the joiners that some scripts and emoji need, are not control codes."""
    return letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"


NAME = "report.html"
_NOTHING = views.Table((), ())


def write_report(run: Path) -> Path:
    """Write report.html into the run folder and return its path. Files that cannot be read are named in the page and
    are no error; raises EnvironmentFault if the page cannot be written."""
    record = read_run(run)
    status = reported_status(record.events, published=(run / MANIFEST).is_file())
    path = run / NAME
    durable.write_text(path, report_page(record, status))
    return path


def draw_report(run: Path) -> tuple[list[str], list[str]]:
    """Call `write_report` at the end of a run. Return the file's name, or a caution if it failed."""
    try:
        return [write_report(run).name], []
    except EnvironmentFault as error:
        return [], [str(error)]
    except Exception as error:  # a failed report must not lose the model
        return [], [f"{NAME} was not written: {type(error).__name__}: {error}"]


def report_page(record: RunRecord, status: Status, *, live: str = "", back: str = "") -> str:
    """Return the whole page.

    live: address of the event stream that updates the page on the board.
    back: address of the board.
    """
    moving, standing = live_values(record, status), _standing_values(record, status)
    cautions = [*record.cautions, *moving.pop("cautions"), *standing.pop("cautions")]
    values = {"title": record.name, "live": live, "back": back, "cautions": cautions, **moving, **standing}
    return render("report.html", values, connect="'self'" if live else "'none'")


def live_values(record: RunRecord, status: Status) -> dict[str, Any]:
    """The values that change while a run goes on, except the curves."""
    cautions: list[str] = []
    rows, events = record.rows, record.events
    return {
        "status": status,
        "verdict": verdict(status, rows, events),
        "figures": views.guarded(
            "the row of figures",
            lambda: views.figures(rows, status, record.results, views.memory_forecast(record)),
            [],
            cautions,
        ),
        "values": views.value_table(rows),
        "events": views.guarded("the list of events", lambda: views.event_list(events), ([], 0), cautions),
        "samples": views.guarded("the samples", lambda: views.sample_groups(record.samples), ([], 0), cautions),
        "answers": views.guarded("the answers", lambda: views.answer_tables(record.answers), [], cautions),
        "cautions": cautions,
    }


def curve_values(record: RunRecord) -> dict[str, Any]:
    """The curves in which something changes, thinned, the marks on them, and the names of the others, for the page's
    script."""
    charts, still = curves.without_still(curves.charts_of(record.rows))
    drawn = curves.to_json(curves.thinned(charts))
    said = f"The same at every step: {'; '.join(still)}." if still else ""
    return {"charts": drawn, "marks": views.marks(record.events, record.rows), "still": said}


def _standing_values(record: RunRecord, status: Status) -> dict[str, Any]:
    cautions: list[str] = []
    facts = record.environment
    return {
        "curves": curve_values(record),
        "calibration": views.guarded("the calibration", lambda: last_calibration(record.rows), None, cautions),
        **views.plan_tables(record),
        "experts": views.guarded("the experts' loads", lambda: views.expert_load(record), _NOTHING, cautions),
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
