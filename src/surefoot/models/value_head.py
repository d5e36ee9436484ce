"""Value head: a linear map from the final hidden states to one number per position.

    value[b, t] = w · h[b, t] + c,   h after the final norm, in fp32 whatever the autocast dtype

No logits are computed. A reward model uses the value at the last token of an answer, a critic the values of all its
tokens. The head is saved in the model's folder as `value_head.safetensors`, under the names of TRL and LLaMA-Factory:
v_head.summary.weight [1, H] and v_head.summary.bias [1].

Shapes: B rows, T tokens, H width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from surefoot.data.batching.batch import Batch
from surefoot.models.convert.recognize import VALUE_HEAD
from surefoot.models.convert.safetensors_file import StoredTensor, lazy_tensors
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.models.embeddings import is_tied
from surefoot.models.folder import ADAPTER_CONFIG, stored_tensors
from surefoot.models.forward import causal_model, hidden_states, output_head
from surefoot.models.shared_prefix import states_behind
from surefoot.system.errors import Fault, InputError

SCORE = "score."
_PLAIN = {"score.weight": "v_head.summary.weight", "v_head.weight": "v_head.summary.weight"}


class ValueHead(nn.Module):
    """The head in fp32, initialized to zeros: all answers start with the same score, and no random initialization
    affects the run."""

    def __init__(self, width: int):
        super().__init__()
        self.summary = nn.Linear(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., H] of any dtype -> [...] fp32."""
        # fp32, because scores are compared: 16 bits would make close ones equal.
        with torch.autocast(hidden.device.type, enabled=False):
            # Not a view: FSDP2 registers hooks on module outputs, and those of a view are lost if it is modified.
            return self.summary(hidden.float()).squeeze(-1).clone()


class ScoredModel(nn.Module):
    """A language model with a value head. backbone: a transformers or PEFT model; its output head is not used."""

    def __init__(self, backbone: nn.Module, head: ValueHead):
        super().__init__()
        self.backbone = backbone
        self.v_head = head

    def forward(
        self, batch: Batch, prefixes: Sequence[int] | None = None, read: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a value for every position, [B, T] fp32; values at padding are meaningless.

        prefixes: length of each pair's common prefix, which is computed once; values there are zeros.
        read: positions that will be used, see `forward.reading`; other values are meaningless.
        """
        if prefixes is None:
            return self.v_head(hidden_states(self.backbone, batch, read))
        states, places = states_behind(self.backbone, batch, prefixes)
        rows, tokens = batch.input_ids.shape
        values = torch.zeros(rows, tokens + states.shape[1], device=states.device)
        return values.scatter(1, places, self.v_head(states))[:, :tokens]

    def values(self, batch: Batch, read: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values through `__call__`, so that an engine's hooks run."""
        return self(batch, read=read)


def value_width(model: nn.Module) -> int:
    """Return the width of the decoder's output. It differs from the config's hidden size if the model projects it
    before the output head (OPT-350m: 1024 and 512)."""
    weight = output_head(model).weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[-1]


def save_value_head(head: ValueHead, folder: Path) -> None:
    """Save the head; equal weights give equal bytes."""
    tensors = {VALUE_HEAD + name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / VALUE_HEAD_FILE, metadata={"format": "pt"})


def load_value_head(head: ValueHead, folder: Path) -> None:
    """Load a saved head bit-exactly. Raises InputError if there is none or its shapes differ."""
    found = value_head_tensors(folder)
    own = head.state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in found.items()}
    wanted = {name: list(tensor.shape) for name, tensor in own.items()}
    if shapes != wanted:
        what = f"its value head has {shapes}, but the model needs {wanted}"
        fix = "it belongs to another model, or has more than one score"
        raise InputError(Fault(str(folder), what, fix, code="SF-MODEL-KEYS"))
    if faulty := [name for name, tensor in found.items() if not torch.isfinite(tensor).all()]:
        what = f"{faulty[0]} of its value head is not finite"
        fix = "the file is damaged or its training diverged"
        raise InputError(Fault(str(folder), what, fix, code="SF-MODEL-NUMBERS"))
    head.load_state_dict(found)


def is_of_value_head(name: str) -> bool:
    """Whether a tensor of this name belongs to a value head rather than to the backbone."""
    return name.startswith((VALUE_HEAD, SCORE))


def has_value_head(folder: Path) -> bool:
    """Whether the folder has a value head; reads no weights. Raises InputError for a folder without weights."""
    return (folder / VALUE_HEAD_FILE).is_file() or any(map(is_of_value_head, _own_tensors(folder)))


def value_head_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the head for `ValueHead.load_state_dict`, in the file's dtype: from its own file or from the model's
    weights. There transformers' sequence classifiers call it score.weight and DeepSpeed-Chat v_head.weight, without a
    bias. Raises InputError if there is none."""
    if (folder / VALUE_HEAD_FILE).is_file():
        found = load_file(folder / VALUE_HEAD_FILE)
    else:
        stored = lazy_tensors(_own_tensors(folder))
        found = {name: tensor.read() for name, tensor in stored.items() if is_of_value_head(name)}
    if not found:
        what = f"is not a reward model: it has neither {VALUE_HEAD_FILE} nor score.weight"
        raise InputError(Fault(str(folder), what, "train one with stage: reward, or name one", code="SF-MODEL-KIND"))
    plain = {_PLAIN.get(name, name).removeprefix(VALUE_HEAD): tensor for name, tensor in found.items()}
    if plain.keys() == {"summary.weight"}:
        plain["summary.bias"] = torch.zeros(len(plain["summary.weight"]))
    return plain


def freeze_output_head(model: nn.Module) -> None:
    """Freeze the unused output head of a scoring model, so that weight decay does not change it; a head tied to the
    embedding stays trainable."""
    if not is_tied(causal_model(model)):
        output_head(model).requires_grad_(False)


def _own_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model's files; empty for an adapter folder."""
    return {} if (folder / ADAPTER_CONFIG).is_file() else stored_tensors(folder)
