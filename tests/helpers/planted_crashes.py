"""Steps that crash their process. `python planted_crashes.py NAME` replaces a replay's child and crashes likewise."""

import ctypes
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

STEP = 4  # in which it happens
LAYER = 1  # of the tiny model's decoder layers


class Crashing(torch.autograd.Function):
    """The identity, whose backward pass reads unmapped memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(0)
        return gradients[0]


def in_forward(rank: int = 0) -> None:
    """Raise SIGSEGV in the forward pass of one MLP, in one step."""
    _plant(lambda x: ctypes.string_at(0) and x)


def in_backward(rank: int = 0) -> None:
    _plant(Crashing.apply)


def replayed_in_backward(rank: int = 0) -> None:
    """Run a replay's child in the working folder, in a process that has loaded torch already."""
    from surefoot.report.death import death_in_a_step
    from surefoot.runs.failures.replay_run import rerun_step

    in_backward()
    begun = death_in_a_step(Path.cwd()).begun
    rerun_step(Path.cwd(), begun, lambda word, text: os.write(1, f"{word} {text}\n".encode()))
    os._exit(0)


def replayed(rank: int = 0) -> None:
    """Run a replay's child in a fork, with `asked.json` in the working folder as its stdin."""
    from surefoot.runs.failures import replay_run

    asked = json.loads(Path("asked.json").read_text())
    sys.stdin = io.StringIO(json.dumps(asked | {"parent": os.getppid()}))
    replay_run.main()


def replayed_in_forward(rank: int = 0) -> None:
    in_forward()
    replayed()


def _plant(crash: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    from surefoot.training import loop

    train_step, forward = loop.train_step, LlamaMLP.forward
    on: list[Any] = []

    def step(engine: Any, *arguments: Any, **named: Any) -> Any:
        bad = named["step"] == STEP
        names = engine.model.named_modules()
        on[:] = [one for name, one in names if bad and name.endswith(f"layers.{LAYER}.mlp")]
        return train_step(engine, *arguments, **named)

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, crash(x) if self in on else x)

    loop.train_step, LlamaMLP.forward = step, mlp


if __name__ == "__main__":
    from surefoot.runs.failures import replay_run

    globals()[sys.argv[1]]()
    replay_run.main()
