"""What surefoot does with a zoo model: its first step, a whole short run, and one that is stopped and resumed."""

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conformance.reference import logits
from helpers.wrappers import SEEING
from helpers.zoo import ZOO
from helpers.zoo_modern import MIXTURES, MODERN
from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.methods.losses.sft import sft_loss
from surefoot.report.console import Console
from surefoot.runs.custom import NOTHING, Custom
from surefoot.runs.load_models import load_models
from surefoot.runs.prepare import prepare
from surefoot.runs.run import RunOptions, train_run
from surefoot.runs.run_folder import inspect_folder
from surefoot.system.errors import STOPPED_EXIT_CODE
from surefoot.training.interrupt import StopRequest
from surefoot.training.objective import LossSum
from surefoot.training.step import LOSS, accumulate_gradients

KINDS = ("full", "lora", "dora")
RANK, ALPHA = 4, 8
STEPS = 4
TEXT = "What is the colour of the sky, and how does a heron tell a trout from another fish?"
_WORDS = ("one", "two", "heron", "sky")
_STOPPING_CALL = 3  # of the loss, while steps are taken: two calls make a step, so this one is in step 2
# Without dropout two frameworks can be compared; with it, as published, resuming has draws to repeat.
_NO_DROPOUT = {
    "opt": {"dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}

Disturb = Callable[[nn.Module], None]


@dataclass(frozen=True)
class FirstStep:
    """values: of the trainable parameters at the step. examples: ids [T] and labels [T] of each, without padding."""

    loss: float
    gradients: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    examples: list[tuple[torch.Tensor, torch.Tensor]]


def build(family: str, folder: Path, *, dropout: bool) -> Path:
    return (ZOO | MODERN | SEEING)[family](folder, **({} if dropout else _NO_DROPOUT.get(family, {})))


def run_config(base: Path, kind: str, output: Path, *, dropout: bool, **adapter: Any) -> RunConfig:
    """Eleven short examples in steps of four, two micro-batches each: padding and a short last step take part."""
    rows = [
        {"instruction": f"Say {word} {count} times.", "input": "", "output": " ".join([word] * count)}
        for word in _WORDS
        for count in (1, 2, 4)
    ][:11]
    data = output.parent / "train.json"
    data.write_text(json.dumps(rows))
    config: dict[str, Any] = {
        "stage": "sft",
        "model": str(base),
        "data": {"train": str(data), "max_length": 512},
        "precision": "fp32",
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2},
        "duration": f"{STEPS} steps",
        "checkpoint": {"every": "2 steps", "best": "none"},
        "output": str(output),
    }
    if kind != "full":
        share = 0.1 if dropout and not has_experts(base) else 0.0  # PEFT has none for experts in one parameter
        config["adapter"] = {"kind": kind, "rank": RANK, "alpha": ALPHA, "dropout": share} | adapter
    return RunConfig.model_validate(config)


def has_experts(base: Path) -> bool:
    config = json.loads((base / "config.json").read_text())
    return config.get("text_config", config)["model_type"] in MIXTURES


def first_step(config: RunConfig, *, stirred: bool, disturb: Disturb | None = None) -> FirstStep:
    """Forward and backward of step 1 along the way of a run. stirred: trainable values are moved off their start,
    where B is zero and hides most of an adapter's gradients. disturb: changes the model behind the comparison's back.
    """
    run = prepare(config, inspect_folder(config, "new"), _silent(), NOTHING)
    loaded = load_models(config, run.plan, run.base, None)
    trainable = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    if stirred:
        stir(trainable)
    values = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    if disturb:
        disturb(loaded.model)
    batches = run.task.step_batches(1)
    weight = sum(batch.weight for batch in batches)
    sums = accumulate_gradients(
        loaded.engine, run.task.objective, batches, weight=weight, step=1, scale=None, settings=loaded.settings
    )
    gradients = {name: p.grad for name, p in trainable.items() if p.grad is not None}
    examples = [example for batch in batches if isinstance(batch, Batch) for example in unpadded(batch)]
    return FirstStep(float(sums[LOSS]) / weight, gradients, values, examples)


def unpadded(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each example up to the last token that is learned: what follows cannot matter."""
    for ids, targets in zip(batch.input_ids, batch.targets, strict=True):
        end = int((targets != IGNORE).nonzero().max()) + 2
        yield ids[:end], torch.cat((torch.tensor([IGNORE]), targets[: end - 1]))


@torch.no_grad()
def stir(trainable: dict[str, nn.Parameter]) -> None:
    draw = torch.Generator().manual_seed(3)
    for parameter in trainable.values():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def whole_run(config: RunConfig, base: Path) -> torch.Tensor:
    """Train to the end; the trained model's logits of TEXT, before anything is read back from disk."""
    seen: list[torch.Tensor] = []

    def look(model: nn.Module, _: object) -> dict[str, Any]:
        seen.append(logits(model, base, TEXT))
        return {}

    assert train_run(config, "new", _silent(), RunOptions(figures=look)) == 0
    return seen[0]


def stopped_and_resumed(config: RunConfig) -> None:
    """The same run, but a signal stops it in the middle, and a second call takes it to its end."""
    calls = 0

    def loss(model: nn.Module, batch: Batch) -> LossSum:
        nonlocal calls
        hears = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        calls += isinstance(hears, StopRequest)  # what looks at the loss before step 1 is not counted
        if calls == _STOPPING_CALL:
            os.kill(os.getpid(), signal.SIGINT)
        return sft_loss(model, batch)

    custom = Custom(objective=loss)
    code = train_run(config, "new", _silent(), RunOptions(custom=custom))
    assert code == STOPPED_EXIT_CODE, f"the run was to be stopped and ended with {code}"
    assert train_run(config, "resume", _silent(), RunOptions(custom=custom)) == 0


def _silent() -> Console:
    return Console(io.StringIO())
