"""Read a run folder for a report: what can be read, and sentences about what cannot.

Nothing here raises for a damaged or missing file, because a report is most useful after a failure. What a run resumes
from is read strictly, elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json
from surefoot.planning.plan import RunPlan, plan_from_json
from surefoot.report import journal, profile
from surefoot.report.events import ANSWERS, EVENTS, SAMPLES
from surefoot.report.expert_load import NAME as EXPERT_LOAD
from surefoot.report.results import ALL
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import Row
from surefoot.system.errors import InputError, IntegrityError

MEMORY_BEFORE = "memory_before"  # key of a rank in environment.json: bytes before the models were loaded; CPU only
IN_PYTHON = "in_python"  # key of `verified` in plan.json: arguments of surefoot.train that no config names
_MOST_PICTURE = 4_000_000  # bytes
_HEAD, _TAIL = 1 << 20, 2 << 20  # bytes read from both ends of answers.jsonl, which can have gigabytes
_MOST_TEXT = 200_000  # characters of config.yaml shown


@dataclass(frozen=True)
class RunRecord:
    """The readable content of a run folder.

    run: its path.
    plan: None if it cannot be read.
    answers: the first and the last rollout answers.
    profile_picture: a PNG.
    cautions: what could not be shown, and why.
    """

    run: Path
    config: str = ""
    plan: RunPlan | None = None
    verified: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    expert_load: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    events: tuple[journal.Record, ...] = ()
    samples: tuple[journal.Record, ...] = ()
    answers: tuple[journal.Record, ...] = ()
    profile: dict[str, Any] = field(default_factory=dict)
    profile_picture: bytes = b""
    cautions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name, also if the path is "."."""
        return Path(os.path.abspath(self.run)).name


def read_run(run: Path) -> RunRecord:
    """Read everything that the report shows."""
    cautions: list[str] = []
    made = _json(run / "plan.json", cautions)
    return RunRecord(
        run=run,
        config=_text(run / "config.yaml", cautions),
        plan=_plan(made, cautions),
        verified=made.get("verified") or {},
        environment=_json(run / "environment.json", cautions),
        data=_json(run / "data.json", cautions),
        results=_json(run / ALL, cautions),
        expert_load=_json(run / EXPERT_LOAD, cautions),
        rows=tuple(sound_rows(_lines(run / LOG, cautions))),
        events=tuple(sound_events(_lines(run / EVENTS, cautions))),
        samples=tuple(sound_events(_lines(run / SAMPLES, cautions))),
        answers=tuple(sound_events(_ends(run / ANSWERS, cautions))),
        profile=_json(run / profile.FOLDER / profile.RECORD, cautions),
        profile_picture=_bytes(run / profile.FOLDER / profile.PICTURE, cautions),
        cautions=tuple(cautions),
    )


def brought_in_python(run: Path) -> Sequence[str]:
    """Return the arguments with which a Python caller brought functions that are in no config; none if plan.json cannot
    be read."""
    return (_json(run / "plan.json", []).get("verified") or {}).get(IN_PYTHON, ())


def results_of(run: Path) -> dict[str, Any]:
    """Return all_results.json, empty if it cannot be read."""
    return _json(run / ALL, [])


def sound_rows(records: Iterable[journal.Record], after: int = 0) -> list[Row]:
    """The rows that can be drawn: with a step that is not smaller than that of the row before.

    after: the last step of the rows that these follow.
    """
    rows: list[Row] = []
    for record in records:
        step = record.get("current_steps")
        # Steps decrease only in a log that was edited or merged, and its curve would be unreadable.
        if type(step) is int and step >= after:
            rows.append(record)
            after = step
    return rows


def sound_events(records: Iterable[journal.Record]) -> list[journal.Record]:
    return [record for record in records if type(record.get("step")) is int]


def is_plain(path: Path) -> bool:
    """Whether it is a regular file of the folder itself. Untrusted run folders may hold links; a run writes none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _json(path: Path, cautions: list[str]) -> dict[str, Any]:
    if not is_plain(path):
        return {}
    try:
        return read_json(path)
    except InputError as error:
        cautions.append(f"{path.name} is left out: {error.faults[0].what}")
        return {}


def _plan(made: dict[str, Any], cautions: list[str]) -> RunPlan | None:
    if not made:
        return None
    try:
        return plan_from_json(made.get("plan"))
    except InputError as error:
        cautions.append(f"plan.json is left out: {error.faults[0]}")
        return None


def _text(path: Path, cautions: list[str]) -> str:
    if not is_plain(path):
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_TEXT)
    except OSError as error:
        cautions.append(f"{path.name} is left out: {error.strerror}")
        return ""


def _bytes(path: Path, cautions: list[str]) -> bytes:
    try:
        return path.read_bytes()[:_MOST_PICTURE] if is_plain(path) else b""
    except OSError as error:
        cautions.append(f"{path.name} is left out: {error.strerror}")
        return b""


def _lines(path: Path, cautions: list[str]) -> list[journal.Record]:
    try:
        records, damaged = journal.salvage(path) if is_plain(path) else ([], [])
    except IntegrityError as error:
        cautions.append(f"{path.name} is left out: {error.faults[0].what}")
        return []
    if damaged:
        lines = "line" if len(damaged) == 1 else "lines"
        shown = ", ".join(map(str, damaged[:8])) + (" …" if len(damaged) > 8 else "")
        cautions.append(
            f"{path.name}: {lines} {shown} cannot be read and {'is' if lines == 'line' else 'are'} left out"
        )
    return records


def _ends(path: Path, cautions: list[str]) -> list[journal.Record]:
    """Read the first and the last lines of a file that may be very long."""
    if not is_plain(path) or path.stat().st_size <= _HEAD + _TAIL:
        return _lines(path, cautions)
    try:
        with path.open("rb") as file:
            first = file.read(_HEAD).split(b"\n")[:-1]
            file.seek(-_TAIL, os.SEEK_END)
            last = file.read().split(b"\n")[1:]
    except OSError as error:
        cautions.append(f"{path.name} is left out: {error.strerror}")
        return []
    return [one for line in (*first, *last) if (one := journal.parse(line.decode(errors="replace"))) is not None]
