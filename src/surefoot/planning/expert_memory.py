"""Memory that a mixture's layers keep for the backward pass in addition to a dense model, and their dense width.

Per routed row (a token routed to k experts is k rows), with h hidden size, i inner size of an expert and b bytes of the
experts' dtype, in which their products are computed:

    inputs               b * h, and b * i of the second product, if an adapter or the matrix itself is trained
    gate and up          b * 2i as output of one product, b * i of the activation
    output               b * h, to be multiplied by the router weight
    indices              40 bytes

and per token the router's logits and probabilities, 8 bytes per expert. LoRA in PEFT keeps W + s B A of all experts of
a layer; surefoot's keeps A x of each row, and one transposed copy of B.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.model_facts import MatrixFact, ModelFacts
from surefoot.planning.plan import AdapterPlan

_PLACES = 40
_ROUTER = 8


def as_dense(model: ModelFacts) -> ModelFacts:
    """The model as a dense one with identical layers, with the average width of the MLPs that see every token."""
    if not model.experts:
        return model
    dense = [
        module.linear[0]
        for module in model.layer_linears
        if module.linear and module.linear[1] == model.hidden and _is_mlp(module.name) and not module.of_experts
    ]
    return replace(model, intermediate=sum(dense) // model.layers, gated=True)


def _is_mlp(name: str) -> bool:
    return "attn" not in name and name.rpartition(".")[2].startswith(("down", "w2", "fc2", "output"))


def _matrices(model: ModelFacts) -> list[tuple[str, MatrixFact]]:
    return [
        (f"{module.name}.{one.name}", one) for module in model.modules if not module.routes for one in module.matrices
    ]


def summed_bytes(model: ModelFacts, adapter: AdapterPlan, width: int) -> int:
    """Bytes of the copy W + s B A of an average layer's experts, which PEFT keeps for the backward pass."""
    adapted = (one for name, one in _matrices(model) if name in adapter.parameters)
    return width * sum(one.numbers for one in adapted) // model.layers


def expert_bytes(
    model: ModelFacts, adapter: AdapterPlan | None, tokens: int, width: int, *, fast: bool, cast: bool
) -> int:
    """Bytes that an average layer keeps for its backward pass.

    width: bytes per element of the experts' matrices.
    fast: whether surefoot's adapter kernel is used.
    cast: whether cast copies of A and B are counted elsewhere.
    """
    if not model.experts:
        return 0
    matrices = _matrices(model)
    adapted = [one for name, one in matrices if adapter is not None and name in adapter.parameters]
    learns = adapter is None or bool(adapted)
    layers = sum(one.outputs == model.hidden for _, one in matrices) / model.layers
    inner = next(one.inputs for _, one in matrices if one.outputs == model.hidden)
    widest = max(one.outputs for _, one in matrices if one.inputs == model.hidden)
    row = width * (widest + inner + model.hidden) + _PLACES
    row += width * (model.hidden + inner) if learns else 0
    rows, kept = tokens * model.active, 0.0
    if adapter is not None and fast:
        row += width * adapter.rank * min(2, len(adapted))
        kept = 0 if cast else width * adapter.rank * sum(one.experts * one.outputs for one in adapted) / model.layers
    elif adapter is not None:
        kept = summed_bytes(model, adapter, width)
    return int(layers * (rows * row + tokens * _ROUTER * model.experts) + kept)
