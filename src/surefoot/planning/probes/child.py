"""Run trials in a child process: on a GPU a kernel may crash its process, or never return.

    with one_child():
        run_in_child(request)                      # starts the child
        run_in_child(DocumentsRequest(…), DOCUMENTS)    # the same one

The child prints which part (a form of attention, a kind of operators) it is about to run. If it dies, that part has
failed, and another child runs the rest. Probes share a child because most of its time goes into importing torch and
starting the GPU.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

import torch
from pydantic import TypeAdapter

from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.probes import attention
from surefoot.planning.probes.sizes import AttentionRequest

_MODULE = "surefoot.planning.probes.child"
_PATIENCE = 120.0  # seconds for one request; usually ten, mostly for importing torch and starting the GPU
Begin = Callable[[str], object]


@dataclass(frozen=True)
class Probe:
    """A probe that can run in a child process.

    request: dataclass of its request.
    parts: field of the request with the names of the parts.
    trial: dataclass of a result.
    run: returns the trials of a request, one per part; calls its second argument with each part before it runs.
    failed: makes the trial of a failed part from its name and the reason.
    place: module and name of this probe, by which the child finds it.
    """

    request: type[Any]
    parts: str
    trial: type[Any]
    run: Callable[[Any, Begin], tuple[Any, ...]]
    failed: Callable[[str, str], Any]
    place: tuple[str, str]


def _attention(request: AttentionRequest, begin: Begin) -> tuple[AttentionTrial, ...]:
    return attention.attention_trials(request, begin=begin)


ATTENTION = Probe(
    AttentionRequest,
    "forms",
    AttentionTrial,
    _attention,
    lambda form, why: AttentionTrial(form, 0.0, why),
    (_MODULE, "ATTENTION"),
)


def run_request(request: Any, probe: Probe = ATTENTION) -> tuple[Any, ...]:
    """Run the probe in this process."""
    return probe.run(request, lambda name: None)


@contextmanager
def one_child(program: Sequence[str] = ()) -> Iterator[None]:
    """Context in which all probes share a child. It is started by the first one, or by `start_child`, and again only if
    a part has crashed it. program: command of the child, if it is not this module."""
    # A file, because a pipe could fill up.
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as errors:
        children = _Children(program, errors)
        token = _shared.set(children)
        try:
            yield
        finally:
            _shared.reset(token)
            children.end()


def start_child() -> None:
    """Start the shared child, which imports torch while this process does something else. Without effect outside of
    `one_child`."""
    if children := _shared.get():
        children.running()


def run_in_child(request: Any, probe: Probe = ATTENTION, *, patience: float = _PATIENCE) -> tuple[Any, ...]:
    """Run the probe in a child process. A part that crashes its child, or does not end, has failed.

    patience: seconds until a child is ended."""
    children = _shared.get()
    if children is None:
        with one_child():
            return run_in_child(request, probe, patience=patience)
    found: dict[str, Any] = {}
    parts: tuple[str, ...] = getattr(request, probe.parts)
    left = parts
    while left:
        trials, begun, why = children.ask(replace(request, **{probe.parts: left}), probe, patience)
        if trials is not None:
            found |= dict(zip(left, trials, strict=True))
            break
        if begun is None:  # no part has started: none is at fault, and another child would do the same
            return tuple(probe.failed(part, why) for part in parts)
        found[begun] = probe.failed(begun, why)
        left = tuple(part for part in left if part != begun)
    return tuple(found[part] for part in parts)


class _Children:
    """A child process, and the next one once it has died. errors: what it writes to stderr."""

    def __init__(self, program: Sequence[str], errors: IO[str]):
        self._program = program or (sys.executable, "-m", _MODULE)
        self._process: subprocess.Popen[str] | None = None
        self._errors = errors

    def running(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(self._program, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        return self._process

    def ask(self, request: Any, probe: Probe, patience: float) -> tuple[tuple[Any, ...] | None, str | None, str]:
        """Return (trials, None, "") or (None, the part that ran last, why the process ended)."""
        process = self.running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(patience, end)
        timer.start()
        begun = None
        try:
            with suppress(BrokenPipeError):  # it has died already; its output says why
                print(json.dumps({"probe": probe.place, "request": asdict(request)}), file=process.stdin, flush=True)
            for line in process.stdout:
                word, _, rest = line.partition(" ")
                if word == "begin":
                    begun = rest.rstrip("\n")
                elif word == "trials":
                    return _trials(probe).validate_json(rest), None, ""
        finally:
            timer.cancel()
        why = self._ending(process.wait())
        self.end()
        return None, begun, f"did not end within {patience:g} seconds" if late.is_set() else why

    def _ending(self, code: int) -> str:
        if code < 0:
            return f"ended its process with {signal.Signals(-code).name}"
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()  # Python's error message is the last one
        return f"ended its process with exit code {code}{f' ({said[-1]})' if code and said else ''}"

    def end(self) -> None:
        """End the child, if it runs; nothing in it is worth waiting for."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes and waits, so that its GPU memory is free
                self._process = None


_shared: ContextVar[_Children | None] = ContextVar("shared", default=None)


def _trials(probe: Probe) -> TypeAdapter[tuple[Any, ...]]:
    return TypeAdapter(tuple[probe.trial, ...])  # pyright: ignore[reportInvalidTypeForm]


def main() -> None:
    """The child: reads a request from each line of stdin and prints lines to stdout."""
    for line in sys.stdin:
        asked = json.loads(line)
        module, name = asked["probe"]
        probe: Probe = getattr(importlib.import_module(module), name)
        request = TypeAdapter(probe.request).validate_python(asked["request"])
        try:
            trials = probe.run(request, lambda name: print("begin", name, flush=True))
            # The next probe looks for free memory. Before the answer, because an error that a kernel has left behind
            # shows here, and would end the child under the next probe.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        except torch.AcceleratorError as error:  # only the first of its many lines says what is wrong
            sys.exit(str(error).splitlines()[0])
        print("trials", json.dumps(_trials(probe).dump_python(trials, mode="json")), flush=True)


if __name__ == "__main__":
    main()
