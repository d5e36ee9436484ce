"""Runs of several processes for tests: a tiny model and data, real commands, and whoever they leave behind.

`run` and `start` take a command as a user types it. `run_forked` and `start_forked` take the words behind `surefoot`,
and save the imports of each process (tests/helpers/forked_command.py).

`changed` makes a folder for PYTHONPATH. Its sitecustomize.py lets a rank hang or fail, and can shorten how long one may
be silent or slow and is waited for; the commands stay what a user types.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from helpers.forked_command import Forked
from helpers.tiny_models import tiny_llama
from surefoot.training import activity, watchdog

LONGEST = 240  # seconds: a machine that is busy with other tests is slow, and nothing here is timed by the clock
SILENT = 6.0  # seconds without a beat, where a test waits for it
STALLED = 15.0  # seconds without progress: later, so that a stopped rank is told to be silent
UNHEARD = 0.1  # seconds that others wait for the last words of a rank that has none
SETTINGS = {"batch": {"size": 4, "micro": 1}, "duration": "6 steps", "optim": {"lr": 1e-2}}
ENDLESS = {"duration": "100000 steps", "eval_every": None}

_CHANGED = """
import os, sys, importlib.abc, importlib.util

NAMES = ["surefoot.training." + name for name in ("watchdog", "session", "activity")] + ["{of}"]

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in NAMES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            change(name, module)
        spec.loader.exec_module = exec_module
        return spec

def change(name, module):
    if hasattr(module, "SILENT"):
        module.SILENT = {silent}
    if hasattr(module, "LEAST_LIMIT"):
        module.LEAST_LIMIT = {stalled}
    if hasattr(module, "LINGER"):
        module.LINGER = {linger}
    if name != "{of}":
        return
    if os.environ.get("RANK") == "0":
        {rank_0}
    elif os.environ.get("RANK") == "1":
        {rank_1}

sys.meta_path.insert(0, Finder())
for name in dict.fromkeys(NAMES):  # of a forked rank
    if name in sys.modules:
        change(name, sys.modules[name])
"""
HANGS = """
        import time
        whole = module.own_batches
        def own_batches(*given):
            own = whole(*given)
            def of_step(step):
                while step == 8:
                    time.sleep(0.1)
                return own(step)
            return of_step
        module.own_batches = own_batches
"""
FAILS_IN_SETUP = """
        from surefoot.system.errors import Fault, InputError
        def broken(*arguments):
            raise InputError(Fault("train.json", "cannot be read here", "look at the disk"))
        module.load_and_check = broken
"""


FLIPS = """
        import torch
        from dataclasses import replace
        whole = module.run_loop
        def train(job, *arguments):
            def batches(step):
                if step == 3:
                    parameter = next(iter(job.engine.parameters.values()))
                    parameter.data.view(torch.int32).view(-1)[0] ^= 1 << 20
                return job.batches(step)
            return whole(replace(job, batches=batches), *arguments)
        module.run_loop = train
"""
FULL_DISK = """
        import errno
        whole = module.run_loop
        def train(job, *arguments):
            proper, calls = job.engine.gathered, []
            def gathered(frozen=True):
                calls.append(1)
                if len(calls) == 2:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return proper(frozen)
            job.engine.gathered = gathered
            return whole(job, *arguments)
        module.run_loop = train
"""
LEAVES_FILES = """
        from surefoot.system import disk, durable
        durable.discard_unfinished = lambda: None  # where the watchdog ends the process
        disk.remove_tree = lambda *given, **named: None  # where waiting for the other rank fails first
"""
LATE = """
        import time
        def meet(ranks, limit):
            open(os.environ["LATE"], "w").close()
            while True:
                time.sleep(0.1)
        module._meet = meet
"""


def changed(
    folder: Path,
    rank_1: str = "pass",
    rank_0: str = "pass",
    of: str = "surefoot.runs.steps",
    silent: float = watchdog.SILENT,
    stalled: float = activity.LEAST_LIMIT,
    linger: float = watchdog.LINGER,
) -> dict[str, str]:
    """Environment for commands. rank_0, rank_1: what is changed there in module `of`. silent, stalled: with shorter
    ones a busy machine looks like a broken one, so they are for tests that wait for them. linger: shorter where the
    rank that rank 0 waits for cannot hear it."""
    folder.mkdir(exist_ok=True)
    body = _CHANGED
    settings = {"silent": str(silent), "stalled": str(stalled), "linger": str(linger), "of": of}
    for name, value in {**settings, "rank_0": rank_0.strip(), "rank_1": rank_1.strip()}.items():
        body = body.replace(f"{{{name}}}", value)
    (folder / "sitecustomize.py").write_text(body)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def write_world(folder: Path) -> Path:
    """A base model and data; returns the folder."""
    tiny_llama(folder / "base")
    rows = [
        {"instruction": f"Say {word} {k} times.", "input": "", "output": " ".join([word] * k)}
        for word in ("one", "two", "heron", "sky")
        for k in (1, 2, 4)
    ]
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


def write_config(world: Path, output: Path, **changes: Any) -> Path:
    """11 examples and 3 of an evaluation, so that neither is dealt out evenly."""
    config = {
        "stage": "sft",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(world / "train.json"), "eval": 3, "max_length": 128},
        "precision": "fp32",
        "eval_every": "3 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(output),
        **SETTINGS,
        **changes,
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return path


def environment(more: Mapping[str, str]) -> dict[str, str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {**{name: value for name, value in os.environ.items() if name not in ranks}, **more}


def surefoot(*words: object) -> list[str]:
    return [sys.executable, "-m", "surefoot", *map(str, words)]


def run(command: Sequence[str], log: Path, more: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code, and all that was said."""
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=environment(more or {}), timeout=LONGEST)
    return done.returncode, log.read_text()


def run_forked(words: Sequence[object], log: Path, more: Mapping[str, str] | None = None) -> tuple[int, str]:
    """As `run`, of `surefoot *words`. All ranks must end by themselves."""
    command = Forked([str(word) for word in words], log, environment(more or {}), told=LONGEST)
    try:
        return command.wait(LONGEST), log.read_text()
    finally:
        command.kill()  # of one that hangs; another has ended


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]


@dataclass
class Started:
    """A command that is running."""

    process: subprocess.Popen[bytes] | Forked
    output: Path
    log: Path

    def await_step(self, step: int) -> None:
        until = time.monotonic() + LONGEST
        path = self.output / "trainer_log.jsonl"
        while not path.is_file() or len(path.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def ranks(self) -> dict[int, psutil.Process]:
        if isinstance(self.process, Forked):
            return {rank: psutil.Process(pid) for rank, pid in self.process.rank_pids().items()}
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}

    def end(self) -> tuple[int, str, float]:
        """Exit code, what was said, seconds from now."""
        began = time.monotonic()
        code = self.process.wait(LONGEST)
        return code, self.log.read_text(), time.monotonic() - began


def start(command: Sequence[str], output: Path, more: Mapping[str, str] | None = None) -> Started:
    log = output.with_suffix(".txt")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment(more or {}))
    return Started(process, output, log)


def start_forked(
    words: Sequence[object], output: Path, more: Mapping[str, str] | None = None, told: float | None = None
) -> Started:
    """As `start`, of `surefoot *words`. told: as `Forked`."""
    log = output.with_suffix(".txt")
    return Started(Forked([str(word) for word in words], log, environment(more or {}), told), output, log)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def stop(process: psutil.Process, number: int = signal.SIGSTOP) -> None:
    os.kill(process.pid, number)
