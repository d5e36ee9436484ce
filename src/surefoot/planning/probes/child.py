"""Run trials in a child process: on a GPU a kernel may crash its process, or never return.

The child prints which part (a form of attention, a kind of operators) it is about to run. If it dies, that part has
failed, and another child runs the rest.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.probes import attention
from surefoot.planning.probes.sizes import AttentionRequest

_PATIENCE = 120.0  # seconds for one child; usually ten, mostly for importing torch and starting the GPU
Begin = Callable[[str], object]


@dataclass(frozen=True)
class Probe:
    """A probe that can run in a child process.

    request: dataclass of its request.
    parts: field of the request with the names of the parts.
    trial: dataclass of a result.
    run: returns the trials of a request, one per part; calls its second argument with each part before it runs.
    failed: makes the trial of a failed part from its name and the reason.
    program: module that `python -m` runs, with arguments; it calls `answer`.
    """

    request: type[Any]
    parts: str
    trial: type[Any]
    run: Callable[[Any, Begin], tuple[Any, ...]]
    failed: Callable[[str, str], Any]
    program: tuple[str, ...]


def _attention(request: AttentionRequest, begin: Begin) -> tuple[AttentionTrial, ...]:
    return attention.attention_trials(request, begin=begin)


ATTENTION = Probe(
    AttentionRequest,
    "forms",
    AttentionTrial,
    _attention,
    lambda form, why: AttentionTrial(form, 0.0, why),
    ("surefoot.planning.probes.child",),
)


def run_request(request: Any, probe: Probe = ATTENTION) -> tuple[Any, ...]:
    """Run the probe in this process."""
    return probe.run(request, lambda name: None)


def run_in_child(
    request: Any, probe: Probe = ATTENTION, *, program: Sequence[str] = (), patience: float = _PATIENCE
) -> tuple[Any, ...]:
    """Run the probe in child processes. A part that crashes its child, or does not end, has failed. program: command of
    the child, if not the probe's."""
    program = program or (sys.executable, "-m", *probe.program)
    found: dict[str, Any] = {}
    parts: tuple[str, ...] = getattr(request, probe.parts)
    left = parts
    while left:
        trials, begun, why = _one_child(replace(request, **{probe.parts: left}), probe, program, patience)
        if trials is not None:
            found |= dict(zip(left, trials, strict=True))
            break
        if begun is None:  # no part has started: none is at fault, and another child would do the same
            return tuple(probe.failed(part, why) for part in parts)
        found[begun] = probe.failed(begun, why)
        left = tuple(part for part in left if part != begun)
    return tuple(found[part] for part in parts)


def _one_child(
    request: Any, probe: Probe, program: Sequence[str], patience: float
) -> tuple[tuple[Any, ...] | None, str | None, str]:
    """Return (trials, None, "") or (None, the part that ran last, why the process ended)."""
    requested = TypeAdapter(probe.request).dump_json(request).decode()
    try:
        done = subprocess.run(program, input=requested, capture_output=True, text=True, timeout=patience)
        output, why = done.stdout, _ending(done.returncode)
        if done.returncode > 0 and done.stderr.strip():  # Python's error message
            why += f" ({done.stderr.strip().splitlines()[-1]})"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"did not end within {patience:g} seconds"
    begun = None
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "begin":
            begun = rest
        elif word == "trials":
            return _trials(probe).validate_json(rest), None, ""
    return None, begun, why


def _trials(probe: Probe) -> TypeAdapter[tuple[Any, ...]]:
    return TypeAdapter(tuple[probe.trial, ...])  # pyright: ignore[reportInvalidTypeForm]


def _ending(code: int) -> str:
    if code < 0:
        return f"ended its process with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def answer(probe: Probe) -> None:
    """Entry point of the child: reads a request from stdin and prints lines to stdout."""
    request = TypeAdapter(probe.request).validate_json(sys.stdin.read())
    try:
        trials = probe.run(request, lambda name: print("begin", name, flush=True))
    except torch.AcceleratorError as error:  # only the first of its many lines says what is wrong
        sys.exit(str(error).splitlines()[0])
    print("trials", json.dumps(_trials(probe).dump_python(trials, mode="json")), flush=True)


def main() -> None:
    answer(ATTENTION)


if __name__ == "__main__":
    main()
