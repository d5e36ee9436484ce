"""Recorded writes of whole runs, and what must hold of every state that a power failure can leave of them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from faults.breaks import broken
from faults.histories import loaded, recovered, save
from faults.power import EXACT, WAYS, Operation, Recording, disk_after, lose_power
from faults.trials import Trial
from surefoot.commands.main import main
from surefoot.report.journal import salvage
from surefoot.report.observer import RunObserver
from surefoot.report.trainer_log import NAME as LOG
from surefoot.runs.publish import is_published
from surefoot.system.errors import IntegrityError
from surefoot.training.checkpoint import newest_verified
from surefoot.training.manifest import check_files

IN_IT = "new/run"  # the run folder in the place that is watched: to be lost, too
TOY_SAVES = ((1, 0), (2, 0), (3, 0), (3, 3), (4, 0), (5, 0))


@dataclass(frozen=True)
class Outage:
    """name: of what was recorded. log: of all operations, with a mark where surefoot said that a checkpoint is saved.
    wrong: (folder, last mark) -> "" or what is wrong after recovery from it."""

    name: str
    log: list[Operation]
    wrong: Callable[[Path, object], str]


def toy_outage(folder: Path, without: str | None = None) -> Outage:
    """Six saves: plain, beside the steps, over an older one of the same step."""
    place = folder / "toy"
    place.mkdir()
    run = place / IN_IT
    with Recording(place).installed() as recording, broken(without):
        for number, (step, evaluated) in enumerate(TOY_SAVES):
            save(run, step, beside=number % 2 == 1, evaluated=evaluated)
            recording.mark(number)

    def wrong(state: Path, last: object) -> str:
        oldest = last if isinstance(last, int) else -1
        found = loaded(state / IN_IT)
        number = TOY_SAVES.index(found) if found else -1
        return "" if oldest <= number <= oldest + 1 else f"loaded {found} after save number {oldest} was done"

    return Outage("six saves", recording.log, wrong)


def run_outage(place: Path, config: Path, without: str | None = None) -> Outage:
    """A real run into `place / IN_IT`, from the making of its folder to the end of its publication."""
    place.mkdir()
    run = place / IN_IT
    saved: dict[int, dict[str, bytes]] = {}
    say = RunObserver.saved

    def marked(self, where, state):
        say(self, where, state)
        saved[state.step] = _files(where)
        recording.mark(state.step)

    with Recording(place).installed() as recording, broken(without), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunObserver, "saved", marked)
        result = CliRunner().invoke(main, ["train", str(config)])
        assert result.exit_code == 0, result.output
        recording.mark("published")
    last = max(saved)
    rows, _ = salvage(run / LOG)

    def wrong(place: Path, mark: object) -> str:
        state = recovered(place / IN_IT)
        found, _ = newest_verified(state)
        acknowledged = last if mark == "published" else mark if isinstance(mark, int) else 0
        if (found.step if found else 0) < acknowledged:
            return f"checkpoint-{acknowledged} was said to be saved, and {found} is the newest"
        if found and _files(found.folder) != saved[found.step]:
            return f"{found.folder.name} verifies and is not what was saved"
        kept, _ = salvage(state / LOG)
        expected = [row for row in rows if found and row["current_steps"] < found.step]
        if kept[: len(expected)] != expected:
            return f"rows before step {found.step if found else 0} are lost from the log"
        published = is_published(state, last)
        if mark == "published" and not published:
            return "the publication is lost"
        if published and (faults := [check.fault for check in check_files(state) if check.fault]):
            return f"published, and {faults[0]}"
        return ""

    return Outage("a whole run", recording.log, wrong)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start_of_publication(outage: Outage) -> int:
    """How many operations there were when the last checkpoint was saved."""
    return max(number for number, one in enumerate(outage.log) if one.name == "mark" and one.other != "published")


def fail_once(outage: Outage, trial: Trial) -> str:
    """Power fails after a random operation; returns "" or what is wrong with what is found then."""
    count, way = trial.draw.randint(0, len(outage.log)), trial.draw.choice(WAYS)
    return _fail(outage, count, way, trial.draw, trial.folder)


def fail_everywhere(outage: Outage, folder: Path, first: int = 0) -> Iterator[str]:
    """Power fails, or the process is killed, after each operation from `first` on; chance has no part in it. Yields
    what is wrong."""
    draw = random.Random(0)  # unused by these ways
    places = [(way, count) for way in EXACT for count in range(first, len(outage.log) + 1)]
    found = (_fail(outage, count, way, draw, folder / f"{way}-{count}") for way, count in places)
    return (wrong for wrong in found if wrong)


def _fail(outage: Outage, count: int, way: str, draw: random.Random, to: Path) -> str:
    to.mkdir()
    before = outage.log[:count]
    mark = next((operation.other for operation in reversed(before) if operation.name == "mark"), None)
    lose_power(disk_after(before), draw, to, way)
    try:
        wrong = outage.wrong(to, mark)
    except (AssertionError, IntegrityError) as error:
        wrong = f"{type(error).__name__}: {error}"
    return wrong and f"after {count} of {len(outage.log)} operations ({way}): {wrong}"
