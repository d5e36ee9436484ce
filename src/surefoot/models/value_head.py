"""A language model that scores: a linear map from what its output head would see to one number per position.

    value[b, t] = w · h[b, t] + c,   h after the final norm, in fp32 whatever the autocast dtype

No logits are computed. A reward model is the value at the last token of an answer, a critic the values of all its
tokens. The head is written beside the model as `value_head.safetensors`, under the names that TRL and LLaMA-Factory
give it: v_head.summary.weight [1, H] and v_head.summary.bias [1].

Shapes: B rows, T tokens, H width of the hidden states.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from surefoot.convert.recognise import VALUE_HEAD
from surefoot.convert.source import VALUE_HEAD_FILE
from surefoot.data.batch import Batch
from surefoot.errors import Fault, InputError
from surefoot.models.forward import hidden_states, output_head


class ValueHead(nn.Module):
    """fp32, all zeros at first: every answer then has the same score, and no draw of the head's decides the run."""

    def __init__(self, width: int):
        super().__init__()
        self.summary = nn.Linear(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., H] of any dtype -> [...] fp32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.summary(hidden.float()).squeeze(-1)


class ScoredModel(nn.Module):
    """backbone: as transformers or PEFT made it; its output head is not used."""

    def __init__(self, backbone: nn.Module, head: ValueHead):
        super().__init__()
        self.backbone = backbone
        self.v_head = head

    def forward(self, batch: Batch) -> torch.Tensor:
        """One value for every position, [B, T] fp32; those of padding mean nothing."""
        return self.v_head(hidden_states(self.backbone, batch))

    def values(self, batch: Batch) -> torch.Tensor:
        """By way of `forward`, whose hooks an engine may need."""
        return self(batch)


def value_width(model: nn.Module) -> int:
    """Width of the hidden states that leave the decoder: not the config's hidden size where the model projects them
    before its output head (OPT-350m has 1024 and 512)."""
    weight = output_head(model).weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[-1]


def save_value_head(head: ValueHead, folder: Path) -> None:
    """Equal weights give equal bytes."""
    tensors = {VALUE_HEAD + name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / VALUE_HEAD_FILE, metadata={"format": "pt"})


def load_value_head(head: ValueHead, folder: Path) -> None:
    """Into a head of the same width, bit for bit. Raises InputError where the file is missing or of another model."""
    path = folder / VALUE_HEAD_FILE
    if not path.is_file():
        raise InputError(Fault(str(folder), f"is no reward model: it has no {VALUE_HEAD_FILE}", "name a reward model"))
    set_value_head(head, load_file(path), str(path))


def set_value_head(head: ValueHead, tensors: dict[str, torch.Tensor], where: str) -> None:
    """tensors: `v_head.summary.*`, of any floating dtype. Raises InputError, naming `where`, for others."""
    own = {VALUE_HEAD + name: tensor for name, tensor in head.state_dict().items()}
    shapes = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}
    wanted = {name: list(tensor.shape) for name, tensor in sorted(own.items())}
    if shapes != wanted:
        raise InputError(Fault(where, f"holds {shapes}, the model's value head is {wanted}", "it is of another model"))
    faulty = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if faulty:
        raise InputError(Fault(where, f"{faulty[0]} is not finite", "the file is damaged or its training diverged"))
    head.load_state_dict({name.removeprefix(VALUE_HEAD): tensor for name, tensor in tensors.items()})
