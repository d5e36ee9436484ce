"""A disk that fails while a finished run is published: exit 3 and nothing half; the same command then publishes."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from faults.faulty_disk import FaultyDisk, copy_of, operations_of
from faults.soak import short_and_soak
from faults.test_power_loss import write_config
from faults.trials import Trial, many
from surefoot.commands.main import main
from surefoot.runs.publish import is_published
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.manifest import MANIFEST, check_files

SHORT, LAST = 3, 6


class Publishing:
    """`train --resume` on a copy of a run that has all its steps and is not published."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = write_config(folder, folder / "run")
        assert self.command(folder / "run", resume=False).exit_code == 0
        (folder / "run" / MANIFEST).unlink()
        self.operations = operations_of(lambda: self.command(copy_of(folder / "run", folder / "whole")))

    def command(self, run: Path, resume: bool = True):
        words = ["train", str(self.config), f"output={run}", *(["--resume"] if resume else [])]
        return CliRunner().invoke(main, words)

    def __call__(self, trial: Trial) -> str:
        draw, run = trial.draw, trial.folder
        copy_of(self.folder / "run", run)
        kind = draw.choice(["full", "broken", "short"])
        number = draw.randint(1, len(self.operations))
        where = f"{kind} at {number} of {len(self.operations)} ({self.operations[number - 1]})"
        with FaultyDisk(kind, number).installed():
            result = self.command(run)
        if result.exit_code not in (0, 3) or "Traceback" in result.output:
            return f"{where}: exit {result.exit_code}: {result.output[-1500:]}"
        if left := [path.name for path in run.glob(".*.tmp")]:
            return f"{where}: left {left}"
        if verify_checkpoint(run / f"checkpoint-{LAST}"):
            return f"{where}: the last checkpoint is damaged"
        if result.exit_code == 3 and self.command(run).exit_code:
            return f"{where}: does not go on"
        whole = is_published(run, LAST) and not any(check.fault for check in check_files(run))
        return "" if whole else f"{where}: not published"


@pytest.fixture(scope="module")
def publishing(tmp_path_factory):
    return Publishing(tmp_path_factory.mktemp("publishing"))


@short_and_soak("failing disks", SHORT)
def test_a_failing_disk_costs_no_publication(publishing, trials, tmp_path):
    assert many("publications on a failing disk", trials, publishing, tmp_path) == []
