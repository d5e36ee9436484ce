"""What is known of a model family, as one row of data.

A row answers the questions that config.json and the tokenizer files cannot: which token may pad, what ends a turn, what
is known to go wrong, and, for models whose layers are all alike, where everything is (`Structure`). Code asks the row,
never the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Sizes that config.json gives. embedding: of a token, where it differs from hidden; head: of one attention head.
Dimension = Literal["hidden", "query", "key_value", "head", "intermediate", "embedding"]


@dataclass(frozen=True)
class Key:
    """True where config.json's `name` has the value `on`. What a missing key means stands in `Structure.defaults`."""

    name: str
    on: bool = True


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    path: within a decoder layer, or the full name outside of them.
    outputs: several are fused in this order.
    bias: always, never, or as the key says.
    transposed: its weight is (inputs, outputs), transformers' Conv1D.
    """

    role: str  # q, k, v, o, gate, up, down; those that share a matrix joined by +; in, out beside the layers
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

    size: of its weight; of a norm over each head by itself "head" (Qwen3's q_norm).
    over: the features of a token that it normalises, all heads together (q_norm: "query").
    bias: LayerNorm has one, RMSNorm none.
    when: it holds parameters only if all of these keys say so.
    """

    path: str
    size: Dimension = "hidden"
    bias: bool = False
    when: tuple[Key, ...] = ()
    over: Literal["hidden", "query", "key_value"] = "hidden"


@dataclass(frozen=True)
class Positions:
    """A learned embedding of positions. offset: rows in front that no position uses."""

    path: str
    offset: int = 0


@dataclass(frozen=True)
class Window:
    """Layers in which a token sees only the last `sliding_window` tokens.

    when: the keys that switch it on.
    from_layer: the key with the first such layer; without it there is always one. config.json's list `layer_types`,
        where it has one, overrides both.
    """

    when: tuple[Key, ...] = ()
    from_layer: str | None = None


@dataclass(frozen=True)
class ReservedPad:
    """A token that text cannot produce and that the family leaves free, so that it may stand for padding."""

    token: str
    reason: str


@dataclass(frozen=True)
class ForbiddenPad:
    """A token that must not stand for padding, even where a tokenizer names it. reason: follows "which"."""

    token: str
    reason: str


@dataclass(frozen=True)
class UntrainedTurns:
    """Chat tokens whose embeddings certain base models never trained.

    vocab: rows of those models' embedding.
    told_by: EOS of their chat versions, which did train them.
    """

    tokens: tuple[str, ...]
    vocab: int
    told_by: tuple[str, ...]
    warning: str


@dataclass(frozen=True)
class Hazard:
    """A sentence for the plan, with where it is known from. compute: only for runs that compute in this type."""

    sentence: str
    compute: Literal["fp16"] | None = None


@dataclass(frozen=True)
class Refusal:
    """A variant that says the same model_type and is not the causal model that this row describes."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Structure:
    """Where everything is in a model whose decoder layers are all alike, and what config.json says of its sizes: with
    it a run is planned from config.json alone. Paths are module names in transformers' model; `layers` is the list
    whose elements carry numbers.

    keys: names in config.json that differ from Llama's (hidden_size, intermediate_size, num_hidden_layers,
        num_attention_heads, max_position_embeddings, attention_dropout, hidden_act).
    defaults: what transformers takes where config.json leaves a key out, under config.json's name; a size that is not
        listed must be there.
    """

    embedding: str
    layers: str
    linears: tuple[Linear, ...]
    layer_norms: tuple[Norm, ...]
    final_norm: Norm
    head: str
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    intermediate_per_hidden: int | None = None  # width of the MLP where config.json gives none
    positions: Positions | None = None  # None: rotary
    projections: tuple[Linear, ...] = ()  # beside the layers, where tokens are embedded narrower than hidden


@dataclass(frozen=True)
class Family:
    """One row: facts that are known by a model's name.

    uses_bos: pretrained with BOS in front of every text. None where the family's models differ: BOS stands first where
        the run's chat template writes it or, in a run without one, where the tokenizer adds it.
    templates: rows of `families.templates` that lay dialogues out as its chat models know them. They stand in for the
        tokenizer's own template on records that it cannot write; where it is empty, such records are refused.
    without_adapter: names of linear layers whose weights fused kernels read past the module, so that an adapter on
        them would act on some machines alone; PEFT refuses them.
    structure: None where layers differ from each other (experts, state spaces, wrapped language models): it is then
        read from the model, built without weights (`surefoot.models.facts`).
    """

    name: str
    model_types: tuple[str, ...]  # config.json's model_type
    uses_bos: bool | None
    structure: Structure | None = None
    dropouts: tuple[str, ...] = ()  # keys besides attention dropout
    window: Window | None = None
    without_sdpa: str = ""  # why transformers refuses SDPA, as the end of a sentence
    beyond_head: str = ""  # what the model does to the output of its head, as a sentence
    reserved_pads: tuple[ReservedPad, ...] = ()  # first that exists
    forbidden_pads: tuple[ForbiddenPad, ...] = ()
    turn_ends: tuple[str, ...] = ()  # tokens that end a turn in the family's chat templates
    templates: tuple[str, ...] = ()
    untrained_turns: UntrainedTurns | None = None
    hazards: tuple[Hazard, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    without_adapter: tuple[str, ...] = ()
