"""`surefoot.train` and `surefoot.plan`: the commands as Python functions, with the same objects.

    import surefoot
    result = surefoot.train("my-run.yaml", ["optim.lr=1e-4"])
    result.results["eval_loss"], result.folder

Importing prints nothing and changes no settings. Several runs can follow each other in one process: torch settings that
a run changes (number of threads, TF32) are restored, and its memory is freed; its weights are in the run folder.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from surefoot.config.load import LoadedConfig, check_config, load_config, plain_config
from surefoot.config.schema import RunConfig
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.families.files import read_json
from surefoot.methods.method import RewardFunction
from surefoot.methods.sources import settled
from surefoot.planning.plan import RunPlan
from surefoot.report.console import open_console
from surefoot.report.results import ALL
from surefoot.runs.custom import Custom
from surefoot.runs.make_plan import make_plan
from surefoot.runs.plan_with_data import plan_with_data
from surefoot.runs.run import RunOptions, train_run
from surefoot.system import hardware, process
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.training.evaluation import Metric
from surefoot.training.objective import Objective

AnyConfig = RunConfig | LoadedConfig | Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    folder: the run folder.
    finished: False if a signal stopped the run; resume=True continues it.
    results: content of all_results.json.
    """

    folder: Path
    finished: bool
    results: Mapping[str, Any] = field(repr=False)


def train(
    config: AnyConfig,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    objective: Objective | None = None,
    metrics: Mapping[str, Metric] | None = None,
    read_record: ReadRecord | None = None,
    reward: RewardFunction | None = None,
    stream: TextIO | None = None,
) -> TrainResult:
    """Run a config to its end, like `surefoot train`.

    config: path of a YAML file, a mapping with the same keys, or the result of `load_config`.
    overrides: "key=value" strings, for a file.
    resume: continue from the newest intact checkpoint.
    overwrite: replace the run in the output folder.
    objective: (model, batch) -> LossSum, replaces the stage's loss.
    metrics: functions of all answers, by the name used in metrics.names.
    read_record: reads a record if data.format is custom.
    reward: scores answers in stage ppo: (prompts, responses) -> one number per answer.
    stream: where to print; stdout by default.

    Raises surefoot.system.errors.SurefootError with the text that the command line prints, minus its flags.
    """
    if resume and overwrite:
        raise InputError(
            Fault(
                "train",
                "resume continues a run and overwrite replaces it",
                "give one of them",
                code="SF-USE-FLAG",
            )
        )
    chosen = _config(config, overrides)
    # Notebook kernels set FORCE_COLOR, but escape codes are only rendered in the live output, not where it is saved.
    console = open_console(stream or sys.stdout, replace(process.terminal_wishes(), force_color=False))
    custom = Custom(objective, metrics or {}, read_record, reward)
    with _restored_torch_settings(), _python_advice():
        mode = "resume" if resume else "overwrite" if overwrite else "new"
        code = train_run(chosen, mode, console, RunOptions(custom=custom))
    folder = Path(chosen.output)
    return TrainResult(folder, code == 0, read_json(folder / ALL) if code == 0 else {})


def plan(config: AnyConfig, overrides: Sequence[str] = (), *, hardware_name: str | None = None) -> RunPlan:
    """Return every choice of the run with its reason, like `surefoot plan`; trains nothing.

    hardware_name: a preset such as "h100", for which the data is not read; this machine by default.
    """
    with _restored_torch_settings():
        chosen = _config(config, overrides)
        if hardware_name:
            return make_plan(chosen, hardware=hardware.preset(hardware_name))
        return plan_with_data(chosen)[0]


def _config(config: AnyConfig, overrides: Sequence[str]) -> RunConfig:
    return settled(_checked(config, overrides))


def _checked(config: AnyConfig, overrides: Sequence[str]) -> RunConfig:
    if isinstance(overrides, str):
        raise InputError(
            Fault("overrides", "is a string", 'give a list, such as ["optim.lr=1e-4"]', code="SF-CONFIG-OVERRIDE")
        )
    if isinstance(config, str | os.PathLike):
        return load_config(os.fspath(config), overrides).config
    if overrides:
        raise InputError(
            Fault(
                "overrides",
                "apply to a config file only",
                "change the mapping or the config itself",
                code="SF-CONFIG-OVERRIDE",
            )
        )
    if isinstance(config, LoadedConfig):
        return config.config
    if isinstance(config, RunConfig):  # made in Python, so nobody has looked for contradictions and files
        check_config(plain_config(config))
        return config  # which knows what was given and what is a default
    if isinstance(config, Mapping):
        return check_config(config)
    what = f"{config!r:.60} is not a config"
    raise InputError(
        Fault("config", what, "give the path of a YAML file, or a mapping with its keys", code="SF-USE-FLAG")
    )


@contextlib.contextmanager
def _python_advice() -> Iterator[None]:
    """Replace command-line flags in error texts by the Python arguments."""
    try:
        yield
    except SurefootError as error:
        faults = (replace(fault, what=_in_python(fault.what), fix=_in_python(fault.fix)) for fault in error.faults)
        error.faults = tuple(faults)
        error.args = ("\n".join(map(str, error.faults)),)
        raise


def _in_python(text: str) -> str:
    return re.sub(r"--(resume|overwrite)\b", r"\1=True", text)


@contextlib.contextmanager
def _restored_torch_settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    products, convolutions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.fp32_precision = convolutions
        gc.collect()  # modules and hooks form reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
