"""What a mixture's layers keep for their backward pass besides a dense model's, and how wide their dense part is.

Per routed row (a token goes to k experts, and is a row of each), with h hidden, i the inner width of an expert and b
bytes of the experts' type, which products of experts are computed in:

    inputs               b * h, and b * i of the second product, where an adapter or the matrix itself trains
    gate and up          b * 2i as they come out of one product, b * i of the activation
    output               b * h, which the router's share is multiplied with
    places               40 bytes of indices

and per token the router's logits and probabilities, 8 bytes an expert. LoRA by PEFT's arithmetic keeps W + s B A of
all experts of a layer; by ours A x of each row, and one copy of B in another order.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.model_facts import MatrixFact, ModelFacts
from surefoot.planning.plan import AdapterPlan

_PLACES = 40
_ROUTER = 8


def as_dense(model: ModelFacts) -> ModelFacts:
    """The model as a dense one with layers alike: an MLP as wide as those that see every token are on average."""
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


def expert_bytes(
    model: ModelFacts, adapter: AdapterPlan | None, tokens: int, width: int, *, fast: bool, cast: bool
) -> int:
    """Of an average layer, for its backward pass.

    width: bytes of a number of the experts' matrices.
    fast: the adapter is by arithmetic of our own.
    cast: copies of A and B in another type are counted elsewhere.
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
        kept = width * sum(one.numbers for one in adapted) / model.layers
    return int(layers * (rows * row + tokens * _ROUTER * model.experts) + kept)
