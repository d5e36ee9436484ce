"""A model that trains in microseconds, for tests of the training engine, which needs no language model."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.data.batching.batch import IGNORE, Batch, Example, collate
from surefoot.training.checkpoint import begin_checkpoint
from surefoot.training.engine import Engine, SingleEngine
from surefoot.training.objective import LossSum
from surefoot.training.optimizer import adamw, trainable_parameters
from surefoot.training.state import RunState
from surefoot.training.step import StepSettings

VOCABULARY = 11


class ToyModel(nn.Module):
    """Predicts the next token from the current one: embedding, dropout, one hidden layer, head."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.dropout(self.embed(ids)))))


def toy_loss(model: nn.Module, batch: Batch) -> LossSum:
    logits = model(batch.input_ids).float().flatten(0, 1)
    targets = batch.targets.flatten()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return LossSum(loss, {"correct": (logits.argmax(-1) == targets).sum()})


def toy_examples(count: int, seed: int = 0) -> list[Example]:
    """Return random ids of random lengths; about half of the tokens are supervised, at least the last one."""
    draw = np.random.default_rng(seed)
    examples = []
    for number in range(count):
        length = int(draw.integers(3, 9))
        supervised = draw.random(length) < 0.5
        supervised[-1] = True
        examples.append(Example(draw.integers(0, VOCABULARY, length), supervised, number))
    return examples


def toy_batches(examples: list[Example], micro: int, side="right") -> list[Batch]:
    return [collate(examples[i : i + micro], pad_id=0, side=side) for i in range(0, len(examples), micro)]


def toy_engine(dropout: float = 0.0, weight_decay: float = 0.01) -> SingleEngine:
    model = ToyModel(dropout)
    parameters = trainable_parameters(model)
    return SingleEngine(model, parameters, adamw(parameters, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay))


def settings(seed: int = 7, max_grad_norm: float | None = 1.0, autocast: torch.dtype | None = None) -> StepSettings:
    forward = nullcontext if autocast is None else lambda: torch.autocast("cpu", autocast)
    return StepSettings(seed, max_grad_norm, forward, nullcontext)


def bits(engine: SingleEngine) -> dict[str, torch.Tensor]:
    """Copy weights and moments for bitwise comparison."""
    state = {**dict(engine.model.named_parameters()), **engine.gather_state()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_checkpoint(
    run: Path,
    engine: Engine,
    state: RunState,
    write_model: Callable[[Path], None] = lambda folder: None,
    **parts: Any,
) -> Path:
    """Write a complete checkpoint of any engine; without identity and log unless `parts` has them."""
    parts = {"trainer_state": {}, "identity": {}, **parts}
    with begin_checkpoint(run, engine, state, **parts) as pending:
        if pending.folder is not None:
            write_model(pending.folder)
    return pending.finish()
