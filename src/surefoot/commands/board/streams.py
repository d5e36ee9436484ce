"""Server-sent events of the live page: the pieces of HTML that changed, and the curves.

A stream is an endless iterator of messages, None if nothing changed since the last check. It begins with everything, so
a reconnecting browser needs no state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.commands.board.listing import Glance, Overview, signature, status_now
from surefoot.report.html import curve_values, live_values, part
from surefoot.report.record import read_run

_PARTS = {"head": "part_head.html", "event-list": "part_events.html", "sample-list": "part_samples.html"}


@dataclass(frozen=True)
class Message:
    """A server-sent event. event: the name that the page's script listens for."""

    event: str
    data: Any

    def encode(self) -> bytes:
        """Encode as an event; JSON contains no line end, so the data are one line."""
        return f"event: {self.event}\ndata: {json.dumps(self.data, allow_nan=False)}\n\n".encode()


def follow_run(run: Path) -> Iterator[Message | None]:
    """Yield the parts of one run's page whenever a file changed or its process ended."""
    shown: dict[str, str] = {}
    before: object = None
    while True:
        now = signature(run)
        if now != before:
            before, record = now, read_run(run)
            values = live_values(record, status_now(run, record.events))
            parts = {name: part(template, values) for name, template in _PARTS.items()}
            if new := {name: text for name, text in parts.items() if shown.get(name) != text}:
                shown = parts
                yield Message("parts", new)
            yield Message("curves", curve_values(record))
        yield None


def follow_all(root: Path) -> Iterator[Message | None]:
    """Yield the whole overview whenever one of its rows changed."""
    overview, sent = Overview(root), None
    while True:
        html = runs_part(overview.glances())
        if html != sent:
            sent = html
            yield Message("parts", {"runs": html})
        yield None


def runs_part(glances: list[Glance]) -> str:
    return part("part_runs.html", {"runs": glances})
