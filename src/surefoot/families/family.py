"""What is known of a model family, as one row of data.

A row answers the questions that config.json and the tokenizer files cannot: where the layers are, which token may pad,
what ends a turn, what is known to go wrong. Code asks the row, never the model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dimension = Literal["hidden", "query", "key_value", "intermediate"]


@dataclass(frozen=True)
class Linear:
    """A linear layer of every decoder layer. path: within that layer. bias: the config key that switches a bias on."""

    role: str  # q, k, v, o, gate, up, down
    path: str
    inputs: Dimension
    outputs: Dimension
    bias: str


@dataclass(frozen=True)
class ReservedPad:
    """A token that text cannot produce and that the family leaves free, so that it may stand for padding."""

    token: str
    reason: str


@dataclass(frozen=True)
class UntrainedTurns:
    """Chat tokens whose embeddings certain base models never trained. vocab: rows of those models' embedding.

    told_by: EOS of their chat versions, which did train them.
    """

    tokens: tuple[str, ...]
    vocab: int
    told_by: tuple[str, ...]
    warning: str


@dataclass(frozen=True)
class Family:
    """One row. Paths are module names in transformers' model; `layers` is the list whose elements carry numbers."""

    name: str
    model_types: tuple[str, ...]  # config.json's model_type
    embedding: str
    layers: str
    linears: tuple[Linear, ...]
    layer_norms: tuple[str, ...]
    final_norm: str
    head: str
    uses_bos: bool
    reserved_pads: tuple[ReservedPad, ...]  # first that exists
    turn_ends: tuple[str, ...]  # tokens that end a turn in the family's chat templates
    untrained_turns: UntrainedTurns | None
