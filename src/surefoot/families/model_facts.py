"""The shape of a model, read from config.json alone: enough to plan precision, adapter targets and memory.

No weights, no torch. Counts are exact for a known family. An unknown family is taken to have Llama's layout, or, where
the shapes of its stored tensors are given, the layout that those show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.errors import Fault, InputError
from surefoot.families import find
from surefoot.families.family import Dimension, Family
from surefoot.families.files import read_json
from surefoot.families.llama import LLAMA

Stored = Literal["fp32", "bf16", "fp16"]
_STORED: dict[str, Stored] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_IN_A_LAYER = re.compile(r"\.\d+\.")  # decoder layers are the elements of a numbered list


@dataclass(frozen=True)
class ModuleFact:
    """A module that holds parameters of its own. linear: (inputs, outputs) of a linear layer, else None."""

    name: str  # full name in the transformers model
    parameters: int
    linear: tuple[int, int] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """family: None for a model_type that no row describes. vocab: rows of the embedding. stored: dtype on disk."""

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

    @property
    def parameters(self) -> int:
        """All parameters; a head that is tied to the embedding is not counted again."""
        return sum(module.parameters for module in self.modules) - (self.vocab * self.hidden if self.tied else 0)

    @property
    def layer_linears(self) -> tuple[ModuleFact, ...]:
        """The linear layers inside the decoder layers: everything linear but the output head."""
        return tuple(module for module in self.modules if module.linear and module.name != self.head)


def read_model_facts(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelFacts:
    """Facts from folder/config.json. shapes: stored tensors by name, asked only for an unknown family.

    Raises InputError with one fault per missing or impossible key.
    """
    path = folder / "config.json"
    config = _Keys(read_json(path), str(path))
    model_type = config.text("model_type")
    family = find(model_type)
    layout = family or LLAMA
    unfamiliar = shapes if family is None and shapes else None
    heads = config.positive("num_attention_heads")
    hidden = config.positive("hidden_size")
    facts = ModelFacts(
        model_type=model_type,
        family=family,
        layers=config.positive("num_hidden_layers"),
        hidden=hidden,
        intermediate=config.positive("intermediate_size"),
        heads=heads,
        kv_heads=config.positive("num_key_value_heads", default=heads),
        head_dim=config.positive("head_dim", default=max(1, hidden // heads)),
        vocab=config.positive("vocab_size"),
        tied=config.flag(
            "tie_word_embeddings", default=unfamiliar is not None and f"{layout.head}.weight" not in unfamiliar
        ),
        stored=config.stored(),
        max_positions=config.positive("max_position_embeddings"),
        attention_dropout=config.share("attention_dropout"),
        modules=(),
        embedding=layout.embedding,
        head=layout.head,
    )
    if facts.heads % facts.kv_heads:
        config.fault("num_key_value_heads", f"{facts.kv_heads} does not divide num_attention_heads {facts.heads}")
    if config.faults:
        raise InputError(config.faults)
    modules = _stored_modules(unfamiliar, facts) if unfamiliar else _expand(layout, facts, config.values)
    return replace(facts, modules=tuple(modules))


def _expand(family: Family, facts: ModelFacts, config: Mapping[str, Any]) -> Iterator[ModuleFact]:
    """The family's row, written out for this model's sizes, in the order of the module tree."""
    size: dict[Dimension, int] = {
        "hidden": facts.hidden,
        "query": facts.heads * facts.head_dim,
        "key_value": facts.kv_heads * facts.head_dim,
        "intermediate": facts.intermediate,
    }
    yield ModuleFact(family.embedding, facts.vocab * facts.hidden)
    for number in range(facts.layers):
        for linear in family.linears:
            inputs, outputs = size[linear.inputs], size[linear.outputs]
            bias = outputs if config.get(linear.bias) else 0
            name = f"{family.layers}.{number}.{linear.path}"
            yield ModuleFact(name, inputs * outputs + bias, (inputs, outputs))
        for norm in family.layer_norms:
            yield ModuleFact(f"{family.layers}.{number}.{norm}", facts.hidden)
    yield ModuleFact(family.final_norm, facts.hidden)
    yield ModuleFact(family.head, facts.vocab * facts.hidden, (facts.hidden, facts.vocab))


def _stored_modules(shapes: Mapping[str, tuple[int, ...]], facts: ModelFacts) -> Iterator[ModuleFact]:
    """Modules by their stored tensors: a matrix inside a numbered layer is taken to be a linear layer."""
    parameters: dict[str, int] = {}
    linear: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        module, _, tensor = name.rpartition(".")
        parameters[module] = parameters.get(module, 0) + math.prod(shape)
        if tensor == "weight" and len(shape) == 2 and _IN_A_LAYER.search(name):
            linear[module] = (shape[1], shape[0])
    head = parameters.pop(facts.head, facts.vocab * facts.hidden)  # not stored where it is tied
    for module, count in parameters.items():
        yield ModuleFact(module, count, linear.get(module))
    yield ModuleFact(facts.head, head, (facts.hidden, facts.vocab))


class _Keys:
    """Typed reading of config.json that collects every fault before anything is refused."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where = values, where
        self.faults: list[Fault] = []

    def fault(self, key: str, what: str) -> None:
        self.faults.append(Fault(self.where, f"{key}: {what}", "this is not the config.json of a supported model"))

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.fault(key, "is missing" if value is None else f"{value!r} is not a positive whole number")
        return 1

    def share(self, key: str) -> float:
        value = self.values.get(key, 0.0)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
        self.fault(key, f"{value!r} is not a number from 0 to 1")
        return 0.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fault(key, f"{value!r} is neither true nor false")
        return bool(value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            self.fault(key, "is missing" if value is None else f"{value!r} is not text")
        return str(value)

    def stored(self) -> Stored:
        """`dtype`, called torch_dtype before transformers 5; without either, weights count as fp32."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if name not in _STORED:
            self.fault("dtype", f"{name!r} is not one of {', '.join(_STORED)}")
        return _STORED.get(name, "fp32")
