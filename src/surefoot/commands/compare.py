"""`surefoot compare`: show how two runs differ. An unfinished run is compared by what it has so far."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.terminal import echo_json, screen
from surefoot.config.resume_policy import diff_configs
from surefoot.config.yaml_reader import read_yaml
from surefoot.families.files import read_json
from surefoot.planning.plan import Difference, diff_plans, diff_values, plan_from_json
from surefoot.system.folders import require_run

if TYPE_CHECKING:
    from surefoot.report.comparison import Comparison
    from surefoot.report.trainer_log import Row

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("run_a", type=_RUN)
@click.argument("run_b", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw both loss curves into this PNG file.")
def compare(run_a: Path, run_b: Path, as_json: bool, picture: Path | None) -> None:
    """Show how RUN_A and RUN_B differ: config, plan, environment, data, results, curves, and the first step whose
    logged numbers are not bit-equal.

    Differences are no error: the exit code is 0. For a strict test use `surefoot verify RUN_A --same-as RUN_B`.
    """
    from surefoot.system import durable
    from surefoot.system.folders import require_own_picture

    for run in (run_a, run_b):
        require_run(run)
    if picture is not None:
        require_own_picture(picture)
        durable.require_writable(picture.parent)

    from surefoot.report.comparison import comparison_tables, curve_picture, verdict_lines
    from surefoot.report.pictures.plots import png

    found = compare_runs(run_a, run_b)
    if picture is not None:
        durable.write_bytes(picture, png(curve_picture(found.names, logged_rows(run_a), logged_rows(run_b))))
    if as_json:
        echo_json(asdict(found))
        return
    console = screen()
    for table in comparison_tables(found):
        console.show(table)
        console.say()
    for line in verdict_lines(found):
        console.say(line)
    if picture is not None:
        console.say(f"curves: {picture}")


_DATA = ("data", "eval_data", "tokenizer", "base")  # keys of a checkpoint's identity: content hashes of the inputs


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare two run folders. Raises InputError for a folder that is not a run."""
    from surefoot.report.comparison import (
        REWARDS,
        Comparison,
        fields_alone,
        first_difference,
        shared_curve,
        side_by_side,
    )
    from surefoot.runs.run_folder import PLAN

    for folder in (a, b):
        require_run(folder)
    plans = [plan_from_json(read_json(folder / PLAN).get("plan")) for folder in (a, b)]
    rows = logged_rows(a), logged_rows(b)
    return Comparison(
        names=_names(a, b),
        config=tuple(config_differences(a, b)),
        plan=tuple(diff_plans(*plans)),
        environment=tuple(diff_values(*(_environment(folder) for folder in (a, b)))),
        data=tuple(diff_values(_inputs(a), _inputs(b))),
        results=side_by_side(_figures(a, rows[0]), _figures(b, rows[1])),
        curves={key: shared_curve(*rows, key) for key in ("loss", "eval_loss", *REWARDS)},
        first=first_difference(*rows),
        alone=fields_alone(*rows),
        weights=_different_weights(a, b),
    )


def config_differences(a: Path, b: Path) -> list[Difference]:
    """Keys in which the saved configs of two runs differ; empty if either run has no config."""
    from surefoot.runs.output_folder import CONFIG, with_defaults

    if not ((a / CONFIG).is_file() and (b / CONFIG).is_file()):
        return []
    old, new = (with_defaults(read_yaml(folder / CONFIG).data) for folder in (a, b))
    return [Difference(change.key, change.old, change.new) for change in diff_configs(old, new)]


def logged_rows(run: Path) -> list[Row]:
    """All rows of the run's log."""
    from surefoot.report.trainer_log import NAME, read_rows

    return read_rows(run / NAME)


def _figures(run: Path, rows: list[Row]) -> dict[str, Any]:
    from surefoot.report.results import ALL

    return _optional(run / ALL) | ({"peak_memory": rows[-1].get("peak_memory")} if rows else {})


def _environment(run: Path) -> dict[str, Any]:
    """Flattened environment.json, without the start times, which differ between any two runs."""
    from surefoot.report.record import MEMORY_BEFORE
    from surefoot.runs.profiling import START
    from surefoot.runs.run_folder import ENVIRONMENT

    found = _optional(run / ENVIRONMENT)
    for number, rank in enumerate(found.pop("ranks", [])):
        found[f"rank {number}"] = {key: value for key, value in rank.items() if key not in (START, MEMORY_BEFORE)}
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _inputs(run: Path) -> dict[str, Any]:
    """Content hashes of data, tokenizer and base model, from the newest checkpoint."""
    from surefoot.runs.identity import saved_identity
    from surefoot.training.checkpoint import list_checkpoints

    newest = next(iter(list_checkpoints(run)), None)
    identity = saved_identity(newest) if newest else {}
    return {key: identity.get(key) for key in _DATA}


def _different_weights(a: Path, b: Path) -> int | None:
    from surefoot.training.compare import compare_weights

    if not (any(a.glob("*.safetensors")) and any(b.glob("*.safetensors"))):
        return None
    return len(compare_weights(a, b))


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Folder names, or the paths as given if the names are equal."""
    return (a.name, b.name) if a.name != b.name else (str(a), str(b))
