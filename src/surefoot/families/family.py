"""Describe a model family as one row of data.

A row contains what config.json and the tokenizer files do not: which token may pad, what ends a turn, known problems,
and, for models whose layers are all alike, the module structure (`Structure`). Code uses the row, never the model's
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Sizes from config.json. embedding: width of token embeddings if it differs from hidden; head: one attention head.
Dimension = Literal["hidden", "query", "key_value", "head", "intermediate", "embedding"]


# values: narrower than those of keys. keys: all heads of queries share one, of which there are no copies.
OddHeads = Literal["", "values", "keys"]


@dataclass(frozen=True)
class Key:
    """A condition: config.json's `name` has the value `on`. `Structure.defaults` has the value of a missing key."""

    name: str
    on: bool = True


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    path: name within a decoder layer, or the full name outside of them.
    outputs: output sizes; several are fused in this order.
    bias: True, False, or the key that decides.
    transposed: whether its weight is (inputs, outputs), as in transformers' Conv1D.
    """

    role: str  # q, k, v, o, gate, up, down; fused ones joined by +; in, out outside of the layers
    path: str
    inputs: Dimension
    outputs: tuple[Dimension, ...]
    bias: Key | bool = False
    transposed: bool = False

    @property
    def roles(self) -> list[str]:
        return self.role.split("+")


@dataclass(frozen=True)
class Norm:
    """A norm of a decoder layer, or the final one.

    size: size of its weight; "head" for a norm of each head (Qwen3's q_norm).
    over: features that it normalizes, over all heads (q_norm: "query").
    bias: True for LayerNorm, False for RMSNorm.
    when: it has parameters only if all of these conditions hold.
    """

    path: str
    size: Dimension = "hidden"
    bias: bool = False
    when: tuple[Key, ...] = ()
    over: Literal["hidden", "query", "key_value"] = "hidden"


@dataclass(frozen=True)
class Positions:
    """A learned position embedding. offset: unused rows at the start."""

    path: str
    offset: int = 0


@dataclass(frozen=True)
class Window:
    """Layers in which a token sees only the last `sliding_window` tokens.

    when: conditions that enable it.
    from_layer: key with the number of the first such layer; None: from the first layer. config.json's list
        `layer_types`, if present, overrides both.
    """

    when: tuple[Key, ...] = ()
    from_layer: str | None = None


@dataclass(frozen=True)
class ReservedPad:
    """A token that text cannot produce and that the family does not use, so that it may serve as padding."""

    token: str
    reason: str


@dataclass(frozen=True)
class ForbiddenPad:
    """A token that must not serve as padding, even if a tokenizer names it as PAD. reason: continues "which"."""

    token: str
    reason: str


@dataclass(frozen=True)
class UntrainedTurns:
    """Chat tokens whose embeddings certain base models never trained.

    vocab: number of embedding rows of those models.
    told_by: EOS tokens of their chat versions, which did train them.
    """

    tokens: tuple[str, ...]
    vocab: int
    told_by: tuple[str, ...]
    warning: str


@dataclass(frozen=True)
class Hazard:
    """A known problem as a sentence for the plan, with its source. compute: only for runs with this compute dtype."""

    sentence: str
    compute: Literal["fp16"] | None = None


@dataclass(frozen=True)
class Refusal:
    """A variant with the same model_type that is not the causal model of this row."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Structure:
    """Module names and config keys of a model whose decoder layers are all alike, which allow planning a run from
    config.json alone. Paths are module names in transformers' model; `layers` is the list of decoder layers.

    keys: Llama's key -> this family's key in config.json, where they differ (hidden_size, intermediate_size,
        num_hidden_layers, num_attention_heads, max_position_embeddings, attention_dropout, hidden_act).
    defaults: config.json key -> transformers' default; a size that is not listed is required.
    """

    embedding: str
    layers: str
    linears: tuple[Linear, ...]
    layer_norms: tuple[Norm, ...]
    final_norm: Norm
    head: str
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    intermediate_per_hidden: int | None = None  # MLP width as a multiple of hidden if config.json has none
    positions: Positions | None = None  # None: rotary
    projections: tuple[Linear, ...] = ()  # outside of the layers, if token embeddings are narrower than hidden


@dataclass(frozen=True)
class Family:
    """One row: facts about a model family.

    uses_bos: whether it is pretrained with BOS before every text. None if the family's models differ: BOS is then used
        if the run's chat template writes it or, without a template, if the tokenizer adds it.
    templates: rows of `families.templates` that its chat models know. They replace the tokenizer's own template for
        records that it cannot render; if empty, such records are refused.
    without_adapter: linear layers whose weights fused kernels, or in training a layer above, read directly, so that an
        adapter on them would only work on some machines, or in evaluation.
    structure: None if layers differ from each other (experts, state spaces, wrapped language models); it is then read
        from the model, built without weights (`surefoot.models.facts`).
    """

    name: str
    model_types: tuple[str, ...]  # config.json's model_type
    uses_bos: bool | None
    structure: Structure | None = None
    dropouts: tuple[str, ...] = ()  # config keys of dropouts other than attention dropout
    window: Window | None = None
    without_sdpa: str = ""  # why transformers refuses SDPA, as part of a sentence
    reserved_pads: tuple[ReservedPad, ...] = ()  # the first that exists is used
    forbidden_pads: tuple[ForbiddenPad, ...] = ()
    turn_ends: tuple[str, ...] = ()  # tokens that end a turn in the family's chat templates
    templates: tuple[str, ...] = ()
    untrained_turns: UntrainedTurns | None = None
    hazards: tuple[Hazard, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    without_adapter: tuple[str, ...] = ()
