"""Read a model's dimensions from config.json alone: enough to plan precision, adapter targets and memory.

No weights, no torch. Counts are exact, and every fault of the file is collected before it is refused. If no row has the
family's structure, the caller passes the module tree of the model built without weights (`surefoot.models.facts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from surefoot.families import find
from surefoot.families.bos_zero import read_bos_scale
from surefoot.families.config_keys import ConfigKeys, Stored
from surefoot.families.family import Dimension, Family, Linear, Norm, OddHeads, Structure
from surefoot.families.files import read_json
from surefoot.families.logits import read_logit_change
from surefoot.families.stored_forms import stored_form
from surefoot.system.errors import InputError

OPENED_BY = "AutoModelForCausalLM"  # transformers' class for text-only models
_SLIDING, _FULL = "sliding_attention", "full_attention"  # values in config.json's layer_types
_MOST_LAYERS = 10_000  # far above any model's; each layer is expanded, and a wrong number would take hours


@dataclass(frozen=True)
class MatrixFact:
    """A matrix parameter outside of a linear layer: one matrix per expert, or a router's.

    name: name within its module. experts: number of matrices in it.
    """

    name: str
    experts: int
    inputs: int
    outputs: int

    @property
    def numbers(self) -> int:
        return self.experts * self.inputs * self.outputs

    @property
    def sides(self) -> int:
        """Sum of inputs and outputs of all matrices, the size of an adapter per rank."""
        return self.experts * (self.inputs + self.outputs)


@dataclass(frozen=True)
class ModuleFact:
    """A module that directly has parameters.

    linear: (inputs, outputs) of a linear layer, else None.
    matrices: its matrix parameters, if it is not a linear layer.
    routes: whether it is a router: it selects experts for a token, or weights a shared expert.
    as_parameter: whether PEFT adapts it like experts, see `surefoot.models.adapter_targets`.
    """

    name: str  # full name in the transformers model
    parameters: int
    linear: tuple[int, int] | None = None
    matrices: tuple[MatrixFact, ...] = ()
    routes: bool = False
    as_parameter: bool = False

    @property
    def in_layer(self) -> bool:
        """Whether it is inside a decoder layer: layers are in a list, so the name contains a number."""
        return any(part.isdigit() for part in self.name.split("."))

    @property
    def of_experts(self) -> bool:
        """Whether it contains routed experts, all of them or one; shared experts do not count."""
        return any(one.experts > 1 for one in self.matrices) or (".experts." in f"{self.name}." and not self.routes)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Facts from the model built without weights; families with a structure use the defaults.

    without_sdpa: why SDPA cannot run it, as part of a sentence; "" if it can.
    active: experts per token, 0 without experts.
    attends: whether some layer has softmax attention; state spaces and linear attention have none.
    recurrent: whether some layer has a recurrent state or a convolution along the sequence.
    wrapper_parameters: number of parameters outside the language model (vision tower, projector), which stay frozen
        unless `vision` trains them.
    both_ways: whether the tokens of an image attend to each other in both directions.
    states: hidden states of a token that go from layer to layer; more than one with AltUp.
    sparse: fraction of the MLPs that keep only their largest inputs to the activation.
    odd_heads: what is unlike in its heads, which some SDPA kernels do not take; "" for nothing.
    vision: (name, shape) of the parameters of vision tower and projector. vision_linears: their linear layers.
    patches: patches of the vision tower for each image token.
    cross_layers: names of the decoder layers that read pictures by cross-attention.
    spare_rows: embedding rows that the output head lacks: tokens that are read and never predicted.
    opened_by: transformers' class that loads the checkpoint.
    """

    without_sdpa: str = ""
    active: int = 0
    attends: bool = True
    recurrent: bool = False
    odd_heads: OddHeads = ""
    wrapper_parameters: int = 0
    both_ways: bool = False
    states: int = 1
    sparse: float = 0.0
    vision: tuple[tuple[str, tuple[int, ...]], ...] = ()
    vision_linears: tuple[ModuleFact, ...] = ()
    patches: float = 1.0
    cross_layers: tuple[str, ...] = ()
    spare_rows: int = 0
    opened_by: str = OPENED_BY


@dataclass(frozen=True, kw_only=True)
class ModuleTree(Shown):
    """The module tree of a model built without weights, for families without a structure.

    config: config values with defaults, under Llama's names.
    modules: modules with parameters, including a tied head.
    dropouts: config keys of dropouts.
    text_type: model_type of the language model inside a wrapper.
    """

    config: Mapping[str, Any]
    modules: tuple[ModuleFact, ...]
    embedding: str
    head: str
    dropouts: tuple[str, ...] = ()
    text_type: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts(Shown):
    """Facts about a model for planning; for a multimodal model, about its language model.

    family: None if no row describes the model_type.
    vocab: number of rows of the output head, each `embedding_width` wide.
    window: sliding window in tokens, None if no layer has one.
    dropouts: (config key, probability) of dropouts above 0, without attention's.
    gated: whether the MLP has a gate.
    activation: activation of the MLP, as in config.json.
    norms: inputs of the norms of one layer: hidden, query, key_value.
    layer_norm: whether they are LayerNorms instead of RMSNorms.
    fused_rotary: whether q, k and v come from one matrix before the rotary embedding.
    rotary_switch: positions above which "longrope" uses its other table for the whole micro-batch.
    stored: dtype on disk.
    stored_form: quantization format from `families.stored_forms.stored_form`; such weights are decoded when loaded.
    balance: factor of the load-balancing loss in config.json, None if the family has none.
    balances: whether config.json enables that loss.
    logit_cap: height at which tanh caps the logits, None if nothing does.
    bos_scale: factor on the BOS embedding in training, if a file next to the model records one.
    """

    model_type: str
    family: Family | None
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    stored: Stored
    max_positions: int
    attention_dropout: float
    modules: tuple[ModuleFact, ...]
    embedding: str
    head: str
    embedding_width: int
    gated: bool
    activation: str = ""
    norms: tuple[Dimension, ...] = ("hidden", "hidden")
    layer_norm: bool = False
    fused_rotary: bool = False
    window: int | None = None
    dropouts: tuple[tuple[str, float], ...] = ()
    rotary_switch: int | None = None
    balance: float | None = None
    balances: bool = False
    stored_form: str = ""
    logit_cap: float | None = None
    bos_scale: float | None = None

    @property
    def structure(self) -> Structure | None:
        """Structure of the family's row; None if it was read from the model."""
        return self.family.structure if self.family else None

    @property
    def embedding_rows(self) -> int:
        return self.vocab + self.spare_rows

    @property
    def parameters(self) -> int:
        """Number of parameters of the language model; a tied head is counted once."""
        twice = self.vocab * self.embedding_width if self.tied else 0
        return sum(module.parameters for module in self.modules) - twice

    def size(self, dimension: Dimension) -> int:
        return {
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key_value": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "intermediate": self.intermediate,
            "embedding": self.embedding_width,
        }[dimension]

    @property
    def layer_linears(self) -> tuple[ModuleFact, ...]:
        """All linear layers except the output head."""
        return tuple(module for module in self.modules if module.linear and module.name != self.head)

    @property
    def experts(self) -> int:
        """Number of experts in a mixture-of-experts layer, 0 if there are none."""
        return max((one.experts for module in self.modules for one in module.matrices if not module.routes), default=0)


def with_dropout(model: ModelFacts, share: float | None) -> ModelFacts:
    """Return the facts with the model's dropout set to `share`; None keeps its config."""
    if share is None:
        return model
    kept = tuple((name, value) for name, value in model.dropouts if name == "layerdrop")
    return replace(model, dropouts=(*((("dropout", share),) if share else ()), *kept), attention_dropout=share)


def read_model_facts(folder: Path, tree: ModuleTree | None = None) -> ModelFacts:
    """Return the facts in folder/config.json.

    tree: the model's module tree; required if the family's structure is unknown, and replaces it if given.

    Raises InputError with one fault per missing or impossible key, and if it is not a causal text model.
    """
    path = folder / "config.json"
    values = read_json(path)
    family = find(str(values.get("model_type")))
    if tree is not None:
        keys = ConfigKeys(tree.config, str(path))
        family = family or find(tree.text_type)
        family = family and replace(family, structure=None)
    elif family is not None and family.structure is not None:
        keys = ConfigKeys(values, str(path), names=family.structure.keys, defaults=family.structure.defaults)
    else:
        keys = ConfigKeys(values, str(path))
        keys.fault("model_type", f"{keys.text('model_type')!r} is not described", "give the model's module tree")
    facts = _sizes(keys, family, tree)
    if keys.faults:
        raise InputError(keys.faults)
    modules = (
        tree.modules if tree else tuple(_expand(family.structure, facts, keys)) if family and family.structure else ()
    )
    form = stored_form(values.get("quantization_config"))
    norms = _layer_norms(facts, tree) if tree else facts.norms
    return replace(facts, modules=modules, norms=norms, bos_scale=read_bos_scale(folder), stored_form=form)


# Norms of queries and keys, by their names; those inside latent attention are narrower and have others.
_QK_NORMS: Mapping[str, Dimension] = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "query"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "key_value"),
}


def _layer_norms(facts: ModelFacts, tree: ModuleTree) -> tuple[Dimension, ...]:
    """Inputs of the norms of an average layer."""
    count: Counter[Dimension] = Counter()
    for module in tree.modules:
        name = module.name.rpartition(".")[2]
        if module.in_layer and name in _QK_NORMS:
            count[_QK_NORMS[name]] += 1
        elif module.in_layer and "norm" in name and module.parameters in (facts.hidden, 2 * facts.hidden):
            count["hidden"] += 1
    if "hidden" not in count:  # norms without weights are no modules of the tree
        count["hidden"] = 2 * facts.layers
    return tuple(one for one, number in count.items() for _ in range(round(number / facts.layers)))


def _sizes(keys: ConfigKeys, family: Family | None, tree: ModuleTree | None) -> ModelFacts:
    structure = family.structure if family else None
    heads, hidden = keys.positive("num_attention_heads"), keys.positive("hidden_size")
    wide = hidden * structure.intermediate_per_hidden if structure and structure.intermediate_per_hidden else None
    names = tree.dropouts if tree else family.dropouts if family else ()
    shown: dict[str, Any] = {"without_sdpa": family.without_sdpa if family else ""}
    if tree:
        shown = {one.name: getattr(tree, one.name) for one in fields(Shown)}
    facts = ModelFacts(
        model_type=keys.text("model_type"),
        family=family,
        layers=keys.positive("num_hidden_layers", most=_MOST_LAYERS),
        hidden=hidden,
        intermediate=keys.positive("intermediate_size", default=wide),
        heads=heads,
        kv_heads=keys.positive("num_key_value_heads", default=heads),
        head_dim=keys.positive("head_dim", default=max(1, hidden // heads)),
        vocab=keys.positive("vocab_size"),
        tied=keys.flag("tie_word_embeddings", default=False),
        stored=keys.stored(),
        max_positions=keys.positive("max_position_embeddings"),
        attention_dropout=keys.share("attention_dropout"),
        modules=(),
        embedding=structure.embedding if structure else tree.embedding if tree else "",
        head=structure.head if structure else tree.head if tree else "",
        embedding_width=keys.positive("word_embed_proj_dim", default=hidden),
        gated=_gated(structure, tree),
        activation=str(keys.get("hidden_act") or ""),
        norms=tuple(norm.over for norm in structure.layer_norms) if structure else (),
        layer_norm=any(norm.bias for norm in structure.layer_norms) if structure else False,
        fused_rotary=_fused_rotary(structure),
        window=_window(keys, family),
        rotary_switch=_rotary_switch(keys),
        dropouts=tuple((keys.name(name), share) for name in names if (share := keys.share(name))),
        balance=_balance(keys, tree),
        balances=bool(keys.get("output_router_logits")) if tree else False,
        logit_cap=read_logit_change(keys.get)[1],
        **shown,
    )
    # Of a ratio that is no whole number every count of parameters, and so the memory forecast, would be wrong.
    if facts.heads % facts.kv_heads:
        keys.fault("num_key_value_heads", f"{facts.kv_heads} does not divide num_attention_heads {facts.heads}")
    for refusal in family.refusals if family else ():
        if keys.says(refusal.key):
            keys.fault(refusal.key.name, refusal.reason, "it is not a causal language model; use another one")
    return facts


def _balance(keys: ConfigKeys, tree: ModuleTree | None) -> float | None:
    value = keys.get("router_aux_loss_coef") if tree and tree.active else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gated(structure: Structure | None, tree: ModuleTree | None) -> bool:
    if structure is not None:
        return any("gate" in linear.roles for linear in structure.linears)
    return any("gate" in module.name for module in tree.modules if module.linear) if tree else True


def _fused_rotary(structure: Structure | None) -> bool:
    if structure is None or structure.positions is not None:
        return False
    return any(len(linear.roles) > 1 and "v" in linear.roles for linear in structure.linears)


def _window(keys: ConfigKeys, family: Family | None) -> int | None:
    """Return the sliding window, None if no layer uses it.

    If neither `layer_types` nor a row says which layers use it, it counts as used: a mask that is not needed costs
    time, while packing without a mask that is needed trains another model. A list of recurrent and full layers does not
    say it: MiniMax has the window in its full ones.
    """
    if keys.get("sliding_window") is None:
        return None
    kinds = keys.get("layer_types")
    rule = family.window if family else None
    if isinstance(kinds, list):
        used = set(kinds) != {_FULL}
    elif rule is None:
        used = (family is None or family.structure is None) and keys.get("use_sliding_window") is not False
    else:
        first = keys.get(rule.from_layer) or 0 if rule.from_layer else 0
        used = all(map(keys.says, rule.when)) and first < keys.positive("num_hidden_layers")
    return keys.positive("sliding_window") if used else None


def _rotary_switch(keys: ConfigKeys) -> int | None:
    """Return the switch position of longrope. Older keys: rope_scaling (before transformers 5), type "su"."""
    rotary = keys.get("rope_parameters") or keys.get("rope_scaling")
    if not isinstance(rotary, dict) or (rotary.get("rope_type") or rotary.get("type")) not in ("longrope", "su"):
        return None
    return rotary.get("original_max_position_embeddings") or keys.positive("original_max_position_embeddings")


def _expand(structure: Structure, facts: ModelFacts, keys: ConfigKeys) -> Iterator[ModuleFact]:
    """Yield all modules of a structure with this model's sizes."""

    def linear(row: Linear, name: str) -> ModuleFact:
        inputs, outputs = facts.size(row.inputs), sum(facts.size(part) for part in row.outputs)
        biased = row.bias if isinstance(row.bias, bool) else keys.says(row.bias)
        return ModuleFact(name, inputs * outputs + biased * outputs, (inputs, outputs))

    def norm(row: Norm, name: str) -> Iterator[ModuleFact]:
        if all(map(keys.says, row.when)):
            yield ModuleFact(name, facts.size(row.size) * (2 if row.bias else 1))

    yield ModuleFact(structure.embedding, facts.vocab * facts.embedding_width)
    if structure.positions is not None:
        rows = facts.max_positions + structure.positions.offset
        yield ModuleFact(structure.positions.path, rows * facts.hidden)
    if facts.embedding_width != facts.hidden:
        yield from (linear(row, row.path) for row in structure.projections)
    for number in range(facts.layers):
        yield from (linear(row, f"{structure.layers}.{number}.{row.path}") for row in structure.linears)
        for row in structure.layer_norms:
            yield from norm(row, f"{structure.layers}.{number}.{row.path}")
    yield from norm(structure.final_norm, structure.final_norm.path)
    yield ModuleFact(structure.head, facts.vocab * facts.embedding_width, (facts.embedding_width, facts.vocab))
