"""What one forward pass sees: tensors, and how much they weigh.

Shapes: B examples, T tokens of the longest one. Targets are already shifted: `targets[b, t]` is the token that
position t must predict, or IGNORE. Padding is masked by position, never by token id, so PAD may equal EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

IGNORE = -100
RecordName = int | str  # a record's number in its file or, where there are several files, "data/a.json:120"


@dataclass(frozen=True)
class Example:
    """One tokenised example. ids[T] and supervised[T]: True where the token itself is to be learned."""

    ids: np.ndarray
    supervised: np.ndarray
    number: RecordName  # named in logs and errors


@dataclass(frozen=True)
class Batch:
    """input_ids, targets: [B, T] int64. attention_mask: [B, T] int64, or None where causality alone hides the padding
    (right padding: no real token can see what comes after it). weight: supervised tokens, the denominator of the loss.
    lengths: real input tokens of each example."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    attention_mask: torch.Tensor | None
    weight: int
    lengths: tuple[int, ...]
    examples: tuple[RecordName, ...]

    @property
    def tokens(self) -> int:
        """Real input tokens of all examples."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> Batch:
        if self.input_ids.device == device:
            return self
        mask = self.attention_mask
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if mask is None else mask.to(device, non_blocking=True),
            self.weight,
            self.lengths,
            self.examples,
        )


def collate(examples: Sequence[Example], pad_id: int, side: Literal["left", "right"] = "right") -> Batch:
    """Pad to the longest example. Left padding needs, and gets, an attention mask."""
    longest = max(len(example.ids) for example in examples)
    input_ids = np.full((len(examples), longest), pad_id, dtype=np.int64)
    targets = np.full((len(examples), longest), IGNORE, dtype=np.int64)
    mask = np.zeros((len(examples), longest), dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.ids)
        start = longest - length if side == "left" else 0
        input_ids[row, start : start + length] = example.ids
        mask[row, start : start + length] = 1
        # The first token has no predecessor to predict it, so its supervision flag cannot count.
        learned = np.where(example.supervised[1:], example.ids[1:], IGNORE)
        targets[row, start : start + length - 1] = learned
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(targets),
        torch.from_numpy(mask) if side == "left" else None,
        int((targets != IGNORE).sum()),
        tuple(len(example.ids) for example in examples),
        tuple(example.number for example in examples),
    )
