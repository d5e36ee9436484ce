"""Adapters of the zoo's models with non-zero weights, for tests of fused parts and dtypes."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers.plans import adapter_plan
from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.models.adapters import add_adapter
from surefoot.models.forward import output_head
from surefoot.models.peft import PeftModel
from surefoot.models.save import save_adapter
from surefoot.models.value_head import ValueHead, value_width


def base_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder)


def stir(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def adapted(folder: Path, kind: str, seed: int, *, targets: str = "", dropout: float = 0.0, **options) -> PeftModel:
    """Add an adapter. targets: substring of the linear layers' names."""
    model = base_model(folder)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output_head(model) and targets in name
    ]
    model = add_adapter(model, adapter_plan(names, kind, dropout=dropout, **options), seed=seed, base=str(folder))
    stir([parameter for parameter in model.parameters() if parameter.requires_grad], seed)
    return model


def saved(model: PeftModel, folder: Path) -> Path:
    save_adapter(model, folder, save_embedding=False)
    return folder


def head_of(model: nn.Module, seed: int) -> ValueHead:
    head = ValueHead(value_width(model))
    stir(head.parameters(), seed)
    return head


def a_batch(side="right") -> Batch:
    rows = [[5, 9, 30, 7, 11, 40], [8, 21, 13], [17, 33, 4, 28, 2]]
    return collate([Example(_ids(row), _ids(row) > 10, number) for number, row in enumerate(rows)], 0, side)


def _ids(row):
    return torch.tensor(row).numpy()
