"""Trackers, one class per library, each imported when its run starts.

A tracker is started once with the facts of the run, gets numbers by step, and is told how the run ended. If it can find
out which steps its run already holds, they are skipped: a resumed run repeats them bit for bit, so nothing is lost.
"""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from surefoot.report.trainer_log import Row, is_eval_row
from surefoot.system import process
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.libraries import is_installed

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


Status = Literal["finished", "stopped", "failed"]
Numbers = dict[str, float]

_PLACE = ("current_steps", "total_steps", "percentage")  # passed separately as the step


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run for a tracker.

    run: the run folder.
    config: flat, see `flat_config`.
    step: steps done before this session; 0 at a fresh start.
    run_id: the tracker's id of the run from an earlier session; None for a new one.
    """

    run: Path
    project: str
    name: str
    offline: bool
    config: Mapping[str, str | int | float | bool]
    step: int
    run_id: str | None


class Tracker(Protocol):
    """Interface to one library. Every method may raise and may block for long; the caller handles both."""

    def start(self, facts: RunFacts) -> str:
        """Open or reopen the run; returns the id with which a resumed run continues it."""
        ...

    def log(self, step: int, numbers: Numbers) -> None: ...
    def finish(self, status: Status) -> None: ...


def numbers_of(row: Row) -> tuple[int, Numbers]:
    """Step and numbers of a row of the training log, as "train/loss" and "eval/loss". Leaves out null and text: a
    non-finite value cannot be plotted."""
    part = "eval" if is_eval_row(row) else "train"
    numbers: Numbers = {
        f"{part}/{key.removeprefix('eval_')}": value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _PLACE
    }
    return row["current_steps"], numbers


def flat_config(config: Mapping[str, Any], group: str = "") -> dict[str, str | int | float | bool]:
    """{"optim": {"lr": 1e-4}} -> {"optim.lr": 1e-4}. Lists become text, null "none", since not all trackers take
    them."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        key = f"{group}.{name}" if group else name
        if isinstance(value, Mapping):
            flat |= flat_config(value, key)
        elif isinstance(value, str | int | float | bool):
            flat[key] = value
        else:
            flat[key] = "none" if value is None else str(value)
    return flat


FOLDER = "tensorboard"  # in the run folder
_DATABASES = "sqlalchemy"  # MLflow needs it for databases; mlflow-skinny does not install it
_DATABASE_KINDS = frozenset({"sqlite", "postgresql", "mysql", "mssql"})


class TensorBoard:
    """Event files in the run folder. A resumed run starts another file, which replaces the steps that it repeats."""

    def start(self, facts: RunFacts) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = facts.run / FOLDER
        folder.mkdir(exist_ok=True)
        self._events, self._summaries = _messages("event_pb2"), _messages("summary_pb2")
        self._writer: EventFileWriter = EventFileWriter(str(folder))
        if facts.step:
            # TensorBoard drops steps of earlier files from here on: a resumed run logs these steps again.
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(facts.step + 1, session_log=log)
        self._add_config(facts)
        return FOLDER

    def log(self, step: int, numbers: Numbers) -> None:
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(step, summary=summary(value=values))

    def finish(self, status: Status) -> None:
        self._writer.close()

    def _add_config(self, facts: RunFacts) -> None:
        """Add the config as a text: TensorBoard shows Markdown, so as a code block."""
        text = "\n".join(f"    {key}: {value}" for key, value in facts.config.items())
        summary, metadata = self._summaries.Summary, self._summaries.SummaryMetadata
        kind = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        tensor = _messages("tensor_pb2").TensorProto(dtype=_messages("types_pb2").DT_STRING, string_val=[text.encode()])
        value = summary.Value(tag="config", metadata=kind, tensor=tensor)
        self._add(facts.step, summary=summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class WandB:
    """A run of Weights & Biases; with tracking.offline a folder for `wandb sync`. The server drops repeated steps."""

    def start(self, facts: RunFacts) -> str:
        import wandb

        if not facts.offline and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("not logged in: `wandb login`, or set tracking.offline: true")
        # No console, git state, code or machine statistics: only the training log's values leave the machine.
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, init_timeout=60
        )
        self._run = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.run_id,
            resume="allow" if facts.run_id else None,
            dir=facts.run,
            mode="offline" if facts.offline else "online",
            config=dict(facts.config),
            settings=settings,
        )
        return self._run.id

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(numbers, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run in the store named by MLFLOW_TRACKING_URI. Without it MLflow uses a database in the working folder, and
    mlflow-skinny, which cannot open one, files."""

    def start(self, facts: RunFacts) -> str:
        from mlflow import MlflowClient

        self._client: MlflowClient = MlflowClient(tracking_uri=_mlflow_store())
        experiment = self._client.get_experiment_by_name(facts.project)
        home = experiment.experiment_id if experiment else self._client.create_experiment(facts.project)
        self._id = facts.run_id or self._client.create_run(home, run_name=facts.name).info.run_id
        self._held = {part: self._last_step(f"{part}/loss") for part in ("train", "eval")}
        self._client.update_run(self._id, status="RUNNING")
        if not facts.run_id:
            for key, value in facts.config.items():
                self._client.log_param(self._id, key, value)
        return self._id

    def log(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        if step > self._held[_part(numbers)]:
            stamp = int(time.time() * 1000)
            self._client.log_batch(self._id, [Metric(name, float(one), stamp, step) for name, one in numbers.items()])

    def finish(self, status: Status) -> None:
        state = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status]
        self._client.set_terminated(self._id, state)

    def _last_step(self, key: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, key)), default=-1)


class Trackio:
    """A run in Trackio's database, which identifies runs by name: a random suffix makes it unique."""

    def start(self, facts: RunFacts) -> str:
        trackio: Any = importlib.import_module("trackio")
        name = facts.run_id or f"{facts.name}-{secrets.token_hex(3)}"
        self._run: Any = trackio.init(
            project=facts.project,
            name=name,
            config=dict(facts.config),
            resume="allow" if facts.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._held = self._last_step(facts.project, name) if facts.run_id else -1
        return name

    def log(self, step: int, numbers: Numbers) -> None:
        if step > self._held:
            self._run.log(numbers, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()

    def _last_step(self, project: str, name: str) -> int:
        """The last step in the local database. With a server the local one may differ: return -1, skip nothing."""
        if any(importlib.import_module("trackio.utils").resolve_space_id_and_server_url(None, None)):
            return -1
        storage: Any = importlib.import_module("trackio.sqlite_storage")
        step = storage.SQLiteStorage.get_last_step(project, name)
        return -1 if step is None else step


_ADAPTERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def require_trackers(names: Iterable[str]) -> None:
    """Raises EnvironmentFault for every requested tracker that is not installed or cannot open its store."""
    names = list(names)
    missing = [name for name in names if not is_installed(name)]
    fix = f"pip install {' '.join(missing)}, or leave it out of report_to"
    faults = [Fault("report_to", f"{name} is not installed", fix, code="SF-PACKAGE") for name in missing]
    if "mlflow" in names and "mlflow" not in missing and (kind := _unopened_database()):
        what = f"names a {kind} database, which mlflow-skinny cannot open"
        faults.append(
            Fault(
                "MLFLOW_TRACKING_URI",
                what,
                "pip install mlflow, or name a server or a file: folder",
                code="SF-PACKAGE",
            )
        )
    if faults:
        raise EnvironmentFault(faults)


def _mlflow_store() -> str | None:
    """The store to set, None for MLflow's choice. mlflow-skinny supports only servers and files, and MLflow 3 uses
    files only on request."""
    store = process.mlflow_store()
    if store is None and not is_installed(_DATABASES):
        store = Path("mlruns").absolute().as_uri()
    if store is not None and urlsplit(store).scheme in {"", "file"}:
        process.allow_mlflow_files()
    return store


def _unopened_database() -> str:
    """The kind of database in MLFLOW_TRACKING_URI if the library for it is missing; else empty."""
    kind = urlsplit(process.mlflow_store() or "").scheme.partition("+")[0]
    return kind if kind in _DATABASE_KINDS and not is_installed(_DATABASES) else ""


def make_trackers(names: Iterable[str]) -> dict[str, Tracker]:
    """Create the trackers by name, without starting them."""
    return {name: _ADAPTERS[name]() for name in names}


def _part(numbers: Numbers) -> str:
    return next(iter(numbers)).partition("/")[0]


def _messages(module: str) -> Any:
    """A module of TensorBoard's protobuf messages, whose classes are created at run time, unknown to type checkers."""
    return importlib.import_module(f"tensorboard.compat.proto.{module}")
