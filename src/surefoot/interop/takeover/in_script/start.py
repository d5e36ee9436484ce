"""Run a training script up to `Trainer.train()`, hand over what it built, and continue it after the training.

    python -c 'from in_script.start import main; main()' SOCKET PROCESSES SCRIPT [ARGUMENTS…]

SOCKET is the path of a Unix socket, with one JSON message a line; PROCESSES how many a launcher would have started:

    script                                       surefoot
    {"kind": "handed over", "folder": …}     ->
                                             <-  {"kind": "loss", "rows": [0, 4, …], "dropped": […]}
    {"kind": "loss", "loss": …, "norm": …}   ->
                                             <-  {"kind": "trained", "run": FOLDER, "steps": N, "loss": …}

A closed connection ends the script. The folder, in the script's output_dir, has handover.json (settings and findings),
model/ (config, weights and tokenizer), adapter/ for a PEFT model, train.jsonl and eval.jsonl (token ids and labels).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import json
import random
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .handover import HandOver
from .weights import load_trained, to_cpu

FOLDER = "taken-over.partial"
"""Folder in the script's output_dir for what it hands over; surefoot renames it."""


class Channel:
    """The connection to surefoot. The script ends when it is closed."""

    def __init__(self, path: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._in, self._out = self._socket.makefile("r"), self._socket.makefile("w")

    def send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def receive(self) -> dict[str, Any]:
        line = self._in.readline()
        if not line:
            raise SystemExit(1)
        return json.loads(line)


class TakeOver:
    """Replaces `Trainer.train`."""

    def __init__(self, channel: Channel, processes: int):
        self._channel, self._processes = channel, processes
        self._done = False

    def train(self, trainer: Any, resume_from_checkpoint: Any = None, *ignored: Any, **more: Any) -> Any:
        if self._done:
            raise RuntimeError("surefoot takes over the first train() of a script; this is the second one")
        self._done = True
        with _unchanged_draws():
            folder = Path(trainer.args.output_dir).resolve() / FOLDER
            handed = HandOver(trainer, folder)
            handed.write(resume_from_checkpoint, self._processes)
        moved = to_cpu(trainer.model, getattr(trainer, "ref_model", None))  # from here on the run needs the device
        with _interrupted_by_surefoot():
            self._channel.send({"kind": "handed over", "folder": str(folder)})
            while (message := self._channel.receive())["kind"] == "loss":
                with _unchanged_draws():
                    found = handed.loss_of(message["rows"], message["dropped"])
                self._channel.send({"kind": "loss", **found})
        load_trained(trainer.model, Path(message["run"]))
        for model in moved:
            model.to(trainer.args.device)
        return _finish(trainer, Path(message["run"]), message["steps"], message["loss"])


def _finish(trainer: Any, run: Path, steps: int, loss: float | None) -> Any:
    """Write the run's log into the script's trainer, and return what train() returns."""
    from transformers.trainer_utils import TrainOutput

    trainer.state.global_step = steps
    log = run / "trainer_log.jsonl"
    trainer.state.log_history = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    mean = float("nan") if loss is None else loss
    return TrainOutput(steps, mean, {"train_loss": mean})


@contextmanager
def _unchanged_draws() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch afterwards: the script may draw after train()."""
    import numpy
    import torch

    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


@contextmanager
def _interrupted_by_surefoot() -> Iterator[None]:
    """Ignore Ctrl-C, which a terminal sends to the script as well: the run stops after its step, and the connection is
    then closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces `Trainer.train` as soon as transformers.trainer is imported."""

    NAME = "transformers.trainer"

    def __init__(self, take_over: TakeOver):
        self._take_over = take_over
        self._loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self.replace_train(module)

    def replace_train(self, module: Any) -> None:
        take_over = self._take_over

        def train(trainer: Any, *arguments: Any, **named: Any) -> Any:
            return take_over.train(trainer, *arguments, **named)

        train.__signature__ = inspect.signature(module.Trainer.train)  # type: ignore[attr-defined]
        module.Trainer.train = train


def main() -> None:
    path, processes, script, *arguments = sys.argv[1:]
    hook = _Hook(TakeOver(Channel(path), int(processes)))
    if (imported := sys.modules.get(_Hook.NAME)) is None:
        sys.meta_path.insert(0, hook)
    else:
        hook.replace_train(imported)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
