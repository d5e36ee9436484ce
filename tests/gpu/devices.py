"""One function for both kinds of device: on the CPU in the suite or its long tier, which shows that the test itself
works, and on a GPU behind its marker.

    @pytest.mark.parametrize("device", DEVICES)
    def test_it(place, device): ...

A GPU computes the same formulas in another order, and its kernels need not repeat themselves bit for bit. Those of
`QUIET` do: eager attention is two products and a softmax.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.trained_runs import heron_train
from surefoot.system import hardware

HERE = torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="there is no NVIDIA GPU")])
DEVICES = ["cpu", CUDA]
IN_THE_LONG_TIER = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]  # on the CPU
# Nothing is left open that would be measured first, in processes that each take seconds to start.
QUIET: dict[str, Any] = {"attention": "eager", "kernels": {"pointwise": "plain", "rotary": "plain", "gated": "plain"}}


def take(device: str, patch: pytest.MonkeyPatch) -> None:
    """From here on runs of this process are on that device. The peak of its memory begins anew."""
    if device == "cpu":
        patch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.detect().kind == device
    gc.collect()  # models of former runs, which would be in the peak
    hardware.forget_peak(device)


def losses_of(folder: Path, name: str, **changes: Any) -> list[float]:
    """Of each step of a run that has to succeed, where nothing is dropped out."""
    ways = QUIET | {"adapter": {"kind": "lora", "rank": 4}, "duration": "6 steps", "optim": {"lr": 1e-2}} | changes
    result = heron_train(folder, name, **ways)
    assert result.exit_code == 0, result.output
    return logged(folder / name)


def logged(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def device_of(run: Path) -> str:
    return json.loads((run / "plan.json").read_text())["plan"]["device"]["value"]
