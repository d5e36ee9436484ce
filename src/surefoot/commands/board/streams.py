"""What the live page is sent: the pieces that changed, and the points that are new.

A stream is an endless iterator of messages, None where there is nothing to say. Its state is in the messages' ids, not
in the server: a browser that lost the connection says the last id it got, and the stream goes on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.commands.board.listing import Glance, Overview, Tail, status_now
from surefoot.report import curves, views
from surefoot.report.events import EVENTS, SAMPLES
from surefoot.report.html import curve_values, live_values, part
from surefoot.report.record import RunRecord, sound_events, sound_rows
from surefoot.report.trainer_log import NAME as LOG

_WHOLE = 256  # rows; up to here, and whenever as many have come, the whole picture is sent: it stays thinned and smooth
_PARTS = {"head": "part_head.html", "event-list": "part_events.html", "sample-list": "part_samples.html"}


@dataclass(frozen=True)
class Message:
    """event: what the page's script listens to. id: where to go on from; empty leaves the last one."""

    event: str
    data: Any
    id: str = ""

    def encode(self) -> bytes:
        """As server-sent events want it. JSON holds no line end."""
        place = f"id: {self.id}\n" if self.id else ""
        return f"{place}event: {self.event}\ndata: {json.dumps(self.data, allow_nan=False)}\n\n".encode()


def follow_run(run: Path, last_id: str) -> Iterator[Message | None]:
    """last_id: of the newest message that the browser has; empty for a new one."""
    log, events, samples = Tail(run / LOG), Tail(run / EVENTS), Tail(run / SAMPLES)
    # Rows that the browser has drawn; None where they are not of this log.
    sent = len(sound_rows(log.records)) if log.resume(last_id) else None
    shown: dict[str, str] = {}
    before: object = None
    while True:
        cut = log.read()
        events.read()
        samples.read()
        status = status_now(run, events.records)
        now = (log.place, events.place, samples.place, status)
        if now != before:
            before = now
            record = RunRecord(
                run,
                rows=tuple(sound_rows(log.records)),
                events=tuple(sound_events(events.records)),
                samples=tuple(sound_events(samples.records)),
            )
            values = live_values(record, status)
            parts = {name: part(template, values) for name, template in _PARTS.items()}
            new = {name: text for name, text in parts.items() if shown.get(name) != text}
            shown = parts
            if new:
                yield Message("parts", new)
            yield Message("curves", _curves(record, None if cut else sent), log.place)
            sent = len(record.rows)
        yield None


def follow_all(root: Path, last_id: str) -> Iterator[Message | None]:
    """The overview, whole, whenever a row of it is another one."""
    overview, sent = Overview(root), last_id
    while True:
        html = runs_part(overview.glances())
        digest = hashlib.sha256(html.encode()).hexdigest()[:16]
        if digest != sent:
            sent = digest
            yield Message("parts", {"runs": html}, digest)
        yield None


def runs_part(glances: list[Glance]) -> str:
    return part("part_runs.html", {"runs": glances})


def _curves(record: RunRecord, sent: int | None) -> dict[str, Any]:
    """added: whether these are only the points behind the first `sent` rows."""
    rows = record.rows
    if sent is None or len(rows) <= _WHOLE or sent // _WHOLE != len(rows) // _WHOLE:
        return {"added": False, **curve_values(record)}
    charts, before = curves.charts_of(rows), curves.charts_of(rows[:sent])
    if curves.shape(charts) != curves.shape(before):
        return {"added": False, **curve_values(record)}
    marks = views.marks(record.events, rows)
    return {"added": True, "charts": curves.to_json(curves.since(charts, before)), "marks": marks}
