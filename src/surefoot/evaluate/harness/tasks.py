"""`surefoot evaluate harness`: run tasks of lm-evaluation-harness, built-in ones or those of a folder, on a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.evaluate.harness.needs import require_harness
from surefoot.evaluate.side_by_side import Only, Side, sides
from surefoot.methods.open_model import OpenModel
from surefoot.report.tables.evaluation import Cell, ScoreRow
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.messages import nearest_word

_BOOTSTRAP = 1000  # bootstrap draws for standard errors of metrics that are not means
_SHOTS_SEED = 1234  # the harness' default, so that it draws the same examples
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


@dataclass(frozen=True)
class HarnessRequest:
    """Which tasks to run, and how.

    tasks: names of tasks, groups or tags.
    include: a folder of task YAML files.
    limit: documents per task.
    shots: examples before each question; None: the task's default.
    chat: format with the tokenizer's chat template.
    """

    tasks: tuple[str, ...]
    include: Path | None = None
    limit: int | None = None
    shots: int | None = None
    rows: int = 8
    chat: bool = False
    only: Only | None = None


def known_tasks(request: HarnessRequest) -> Any:
    """Return the harness' TaskManager; needs no model. Raises InputError for an unknown task."""
    require_harness()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an extra

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if request.include is None else str(request.include))
    check_tasks(request.tasks, manager.all_tasks)
    return manager


def run_harness(opened: OpenModel, request: HarnessRequest, manager: Any = None) -> dict[str, dict[str, Any]]:
    """Return side -> the harness' results.

    manager: from `known_tasks`; None creates it.

    Raises InputError for an unknown task, EnvironmentFault if a task's data is not available.
    """
    compared = sides(opened, request.only)
    tasks = _load(known_tasks(request) if manager is None else manager, request)
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

    from surefoot.evaluate.harness.model import SurefootLM

    model = SurefootLM(opened, request.rows)

    def measure() -> dict[str, Any]:
        results = evaluate(
            model,
            tasks,
            limit=request.limit,
            bootstrap_iters=_BOOTSTRAP,
            apply_chat_template=request.chat,
            log_samples=False,
        )
        return {key: results[key] for key in _KEPT if key in results}

    return measured(compared, tasks["tasks"].values(), measure)


def measured(
    compared: Sequence[Side], tasks: Iterable[Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return side -> result of `measure`. A task draws its few-shot examples from one random stream, which is reset for
    each side, so that all sides get the same examples."""
    tasks, found = tuple(tasks), {}
    for side in compared:
        for task in tasks:  # otherwise the second side would get the next examples of the stream
            task.set_fewshot_seed(seed=_SHOTS_SEED)
        with side.entered():
            found[side.name] = measure()
    return found


def check_tasks(request: Sequence[str], known: Sequence[str]) -> None:
    """Raises InputError for a name that the harness does not know."""
    for name in request:
        if name not in known:
            near = nearest_word(name, known)
            fix = f"did you mean {near}?" if near else "name a folder with your own tasks by --include-path"
            raise InputError(Fault("--tasks", f"unknown task {name!r}", fix, code="SF-EVALUATE"))


def _load(manager: Any, request: HarnessRequest) -> dict[str, dict[str, Any]]:
    """Load the tasks with their data, and their groups. Libraries raise many kinds of errors here: no network, no file,
    code that needs trust."""
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in request.tasks:
        try:
            found = manager.load(name)
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            fix = "its data set must be on this machine, or the hub reachable"
            raise EnvironmentFault(
                Fault(f"task {name}", f"cannot be loaded: {text}", fix, code="SF-EVALUATE")
            ) from error
        for kind, several in loaded.items():
            several.update(found[kind])
    for name, task in loaded["tasks"].items() if request.shots is not None else ():
        if task.get_config("num_fewshot") == 0 != request.shots:
            raise InputError(
                Fault(
                    "--num-fewshot",
                    f"the task {name} does not allow few-shot examples",
                    "leave it out",
                    code="SF-EVALUATE",
                )
            )
        task.set_config(key="num_fewshot", value=request.shots)
    return loaded


def metrics_of(found: Mapping[str, Any]) -> dict[str, Cell]:
    """Return "task metric" -> value and standard error, in the harness' order. found: results of one side."""
    cells = {}
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not kind:
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            name = f"{task} {metric}" + ("" if kind == "none" else f" ({kind})")
            cells[name] = Cell(float(value), float(error) if isinstance(error, int | float) else None)
    return cells


def share_rows(found: Mapping[str, Mapping[str, Any]]) -> tuple[list[ScoreRow], list[str]]:
    """Rows for the picture, and the metrics in it: those that are shares on every side."""
    cells = {side: metrics_of(one) for side, one in found.items()}
    names = [name for name in next(iter(cells.values())) if all(0 <= of[name].accuracy <= 1 for of in cells.values())]
    return [ScoreRow(side, of, None, measured=True) for side, of in cells.items()], names
