"""Attention trials in a process of their own: on a GPU a kernel may take its process with it, or never come back.

The child says which form it is about to run. When it dies, that form has failed, and another child tries the rest.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import TypeAdapter

from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.plan import DType
from surefoot.probe import attention

_PATIENCE = 120.0  # seconds for one child: importing torch and starting a GPU take most of the usual ten
_PROGRAM = (sys.executable, "-m", "surefoot.probe.child")
_TRIALS = TypeAdapter(tuple[AttentionTrial, ...])


@dataclass(frozen=True)
class AttentionRequest:
    """What `attention_trials` is asked for. device: cpu | cuda. window: None where no form needs a mask."""

    forms: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    dtype: DType
    device: str
    window: int | None = None


_REQUEST = TypeAdapter(AttentionRequest)


def run_request(request: AttentionRequest) -> tuple[AttentionTrial, ...]:
    """In this process."""
    return _run(request, lambda name: None)


def run_in_child(
    request: AttentionRequest, *, program: Sequence[str] = _PROGRAM, patience: float = _PATIENCE
) -> tuple[AttentionTrial, ...]:
    """The same in other processes; a form that ends one, or does not end, has failed."""
    found: dict[str, AttentionTrial] = {}
    left = request.forms
    while left:
        trials, begun, why = _one_child(replace(request, forms=left), program, patience)
        if trials is not None:
            found |= {trial.form: trial for trial in trials}
            break
        if begun is None:  # it never came to a form: none of them is to blame, and another child would do the same
            return tuple(AttentionTrial(form, 0.0, why) for form in request.forms)
        found[begun] = AttentionTrial(begun, 0.0, why)
        left = tuple(form for form in left if form != begun)
    return tuple(found[form] for form in request.forms)


def _one_child(
    request: AttentionRequest, program: Sequence[str], patience: float
) -> tuple[tuple[AttentionTrial, ...] | None, str | None, str]:
    """(trials, None and empty) or (None, the form that ran last, why the process ended)."""
    asked = _REQUEST.dump_json(request).decode()
    try:
        done = subprocess.run(program, input=asked, capture_output=True, text=True, timeout=patience)
        said, why = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"did not end within {patience:g} seconds"
    begun = None
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        if word == "begin":
            begun = rest
        elif word == "trials":
            return _TRIALS.validate_json(rest), None, ""
    return None, begun, why


def _ending(code: int) -> str:
    if code < 0:
        return f"ended its process with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _run(request: AttentionRequest, begin: Callable[[str], object]) -> tuple[AttentionTrial, ...]:
    return attention.attention_trials(
        request.forms,
        heads=request.heads,
        kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        length=request.length,
        dtype=request.dtype,
        device=torch.device(request.device),
        window=request.window,
        begin=begin,
    )


def main() -> None:
    """The child: a request on stdin, lines on stdout."""
    request = _REQUEST.validate_json(sys.stdin.read())
    trials = _run(request, lambda name: print("begin", name, flush=True))
    print("trials", json.dumps(_TRIALS.dump_python(trials, mode="json")), flush=True)


if __name__ == "__main__":
    main()
