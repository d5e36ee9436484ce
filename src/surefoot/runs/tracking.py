"""The trackers of a run, as its config asks for them."""

from __future__ import annotations

from pathlib import Path

from surefoot.config.load import plain_config
from surefoot.config.schema import RunConfig
from surefoot.report.console import Console
from surefoot.report.events import append_event
from surefoot.report.trackers.adapters import make_trackers
from surefoot.report.trackers.base import RunFacts as TrackedRun
from surefoot.report.trackers.base import flat_config
from surefoot.report.trackers.fan_out import Trackers
from surefoot.system import process
from surefoot.training.state import RunState


def open_trackers(config: RunConfig, run: Path, state: RunState, console: Console) -> Trackers:
    """Not started yet: it is a context manager. state: where the run goes on, with the ids of earlier sessions."""
    if config.report_to:
        process.refuse_telemetry()

    def say(text: str) -> None:
        console.say(text, style="yellow")
        append_event(run, "tracker", state.step, text)

    facts = TrackedRun(
        run=run,
        project=config.tracking.project,
        name=config.tracking.name or run.resolve().name,
        offline=config.tracking.offline,
        config=flat_config(plain_config(config)),
        step=state.step,
        run_id=None,
    )
    asked = {name: one for name, one in state.trackers.items() if name in config.report_to}
    return Trackers(make_trackers(config.report_to), facts, asked, say)
