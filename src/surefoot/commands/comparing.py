"""Two run folders become one comparison. What a run does not have yet is left out, so unfinished runs compare too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.config.resume_policy import diff_configs
from surefoot.config.yaml_reader import read_yaml
from surefoot.families.files import read_json
from surefoot.planning.plan import Difference, diff_plans, diff_values, plan_from_json
from surefoot.report.comparison import Comparison, fields_alone, first_difference, shared_curve, side_by_side
from surefoot.report.results import ALL
from surefoot.report.rows import Row
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import read_rows
from surefoot.runs.identity import saved_identity
from surefoot.runs.profiling import START
from surefoot.runs.run_folder import CONFIG, ENVIRONMENT, PLAN, with_defaults
from surefoot.system.folders import require_run
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.compare import compare_weights

_DATA = ("data", "eval_data", "tokenizer", "base")  # of a checkpoint's identity: what went in, by content


def compare_runs(a: Path, b: Path) -> Comparison:
    """Raises InputError for a folder that is no run."""
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
        curves={key: shared_curve(*rows, key) for key in ("loss", "eval_loss")},
        first=first_difference(*rows),
        alone=fields_alone(*rows),
        weights=_different_weights(a, b),
    )


def config_differences(a: Path, b: Path) -> list[Difference]:
    """Keys in which the saved configs of two runs differ; none where one of them has no config."""
    if not ((a / CONFIG).is_file() and (b / CONFIG).is_file()):
        return []
    old, new = (with_defaults(read_yaml(folder / CONFIG).data) for folder in (a, b))
    return [Difference(change.key, change.old, change.new) for change in diff_configs(old, new)]


def logged_rows(run: Path) -> list[Row]:
    """All rows of the run's log."""
    return read_rows(run / LOG)


def _figures(run: Path, rows: list[Row]) -> dict[str, Any]:
    return _optional(run / ALL) | ({"peak_memory": rows[-1].get("peak_memory")} if rows else {})


def _environment(run: Path) -> dict[str, Any]:
    """What the run ran on and with; how long the start took differs from run to run."""
    found = _optional(run / ENVIRONMENT)
    for number, rank in enumerate(found.pop("ranks", [])):
        found[f"rank {number}"] = {key: value for key, value in rank.items() if key != START}
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _inputs(run: Path) -> dict[str, Any]:
    """Hashes of data, tokenizer and base model, from the newest checkpoint."""
    newest = next(iter(list_checkpoints(run)), None)
    identity = saved_identity(newest) if newest else {}
    return {key: identity.get(key) for key in _DATA}


def _different_weights(a: Path, b: Path) -> int | None:
    if not (any(a.glob("*.safetensors")) and any(b.glob("*.safetensors"))):
        return None
    return len(compare_weights(a, b))


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Folder names, or the paths as they were given where those are the same."""
    return (a.name, b.name) if a.name != b.name else (str(a), str(b))
