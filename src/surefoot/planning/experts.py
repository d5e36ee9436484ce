"""Memory that a mixture's layers keep for the backward pass in addition to a dense model, and their dense width.

Per routed row (a token routed to k experts is k rows), with h hidden size, i inner size of an expert and b bytes of the
experts' dtype, in which their products are computed:

    inputs               b * h, and b * i of the second product, if an adapter or the matrix itself is trained
    gate and up          b * 2i as output of one product, b * i of the activation
    output               b * h, to be multiplied by the router weight
    indices              40 bytes

and per token the router's logits and probabilities, 8 bytes per expert. LoRA in PEFT keeps W + s B A of all experts of
a layer; surefoot's keeps A x of each row, and one transposed copy of B.

Also the coefficient of the load-balancing loss. Mixtures are pretrained with this loss. Fine-tuning code mostly omits
it: transformers adds it only if config.json says `output_router_logits: true`, whatever `router_aux_loss_coef` is, and
published configs say false. `auto` follows config.json, so that a run equals that of transformers' Trainer.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import MatrixFact, ModelFacts
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, Choice

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


def largest_gradient(model: ModelFacts) -> int:
    """Bytes of the largest gradient of experts in full training; 0 without experts."""
    return 4 * max((one.numbers for _, one in _matrices(model)), default=0) if model.experts else 0


def adapts_experts(model: ModelFacts, adapter: AdapterPlan | None) -> bool:
    return adapter is not None and any(name in adapter.parameters for name, _ in _matrices(model))


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


_KEY = "model.router_aux_loss_coef"


def plan_balance(config: RunConfig, model: ModelFacts, notes: Notes) -> Choice[float] | None:
    """Return the coefficient; None for a model without experts."""
    requested = config.model.router_aux_loss_coef
    if requested != "auto" and requested and (why := _obstacle(config, model)):
        notes.refuse(_KEY, why, "leave it out, or set it to 0")
    if not model.experts:
        return None
    if requested == "own":
        return Choice(model.balance or 0.0, "asked for: the coefficient of config.json", "user")
    if requested != "auto":
        return Choice(requested, "asked for", "user")
    if model.balance is None:
        return Choice(0.0, "the family defines no load-balancing loss", "family")
    if not model.balances:
        return Choice(
            0.0, f"config.json says output_router_logits: false; its coefficient is {model.balance:g}", "family"
        )
    if why := _obstacle(config, model):
        notes.caution(f"config.json trains with a load-balancing loss, but this run does not: {why}")
        return Choice(0.0, why, "default")
    return Choice(model.balance, "config.json trains with it (output_router_logits: true)", "family")


def _obstacle(config: RunConfig, model: ModelFacts) -> str:
    """Return why the loss cannot be computed; empty if it can."""
    if not model.experts:
        return f"{model.model_type} has no experts"
    if model.balance is None:
        return f"{model.model_type} defines no load-balancing loss"
    if config.method.rollouts or config.method.scores:
        return f"stage {config.stage} sends some tokens through the model more than once a step"
    return "torch.compile cannot trace what looks at the routers" if config.compile != "off" else ""
