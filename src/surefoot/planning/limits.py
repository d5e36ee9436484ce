"""Count the arithmetic of an optimizer step, and so the best speed of a machine with a known matmul rate.

    flops = step_flops(model, Work(tokens, squares, supervised), adapter)
    flops.needed / rate / seconds     # fraction of the machine's peak matmul rate, 0 to 1

A multiply-add is two FLOPs. With P the weights of the layers' matrices (of a mixture's experts, those that a token is
routed to), R those of the adapter, H those of the output head, A the attention of a token and f the fraction of
supervised tokens, a token costs

    full    6 P + 3 A + 6 f H          forward 2 P + A, twice as much backward
    LoRA    4 P + 3 A + 6 R + 4 f H    no gradients of frozen matrices
    DoRA    the same, and once per step the norms of the rows of W + s B A

and less where the result is not needed: in the last layer a position without a label (half of an instruction's tokens
or more) needs only its keys and values, and the first layer passes no gradient back to a frozen embedding. Only matrix
products are counted; norms, activations and the optimizer are memory-bound, so no machine reaches 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.families.model_facts import MatrixFact, ModelFacts, ModuleFact
from surefoot.planning.plan import AdapterPlan


@dataclass(frozen=True)
class Work:
    """The input of a step.

    tokens: number of tokens without padding.
    squares: sum of the squared lengths of the examples: a token attends only to its own example.
    supervised: number of tokens with a label.
    """

    tokens: int
    squares: int
    supervised: int

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.squares + other.squares, self.supervised + other.supervised)


NO_WORK = Work(0, 0, 0)


def work_of(lengths: Iterable[int], supervised: int) -> Work:
    """Sum up examples. lengths: real tokens of every example. supervised: tokens with a label."""
    lengths = list(lengths)
    return Work(sum(lengths), sum(length * length for length in lengths), supervised)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step by phase; forward and backward include the output head. recomputed: forward passes
    repeated by gradient checkpointing, which are not needed for the result."""

    forward: float
    backward: float
    per_step: float
    recomputed: float

    @property
    def needed(self) -> float:
        return self.forward + self.backward + self.per_step


def step_flops(
    model: ModelFacts,
    work: Work,
    adapter: AdapterPlan | None,
    *,
    head: bool = True,
    checkpointed: float = 0.0,
    pruned: bool = True,
) -> StepFlops:
    """Count the arithmetic of one optimizer step.

    adapter: None for full fine-tuning.
    head: whether the output head is used (a reward model's is not).
    checkpointed: fraction of the layers whose forward pass is repeated in the backward pass.
    pruned: leave out what the result does not need, as the limit does even if the run computes it.
    """
    full = adapter is None
    layers = _layer_weights(model)
    added = _adapter_weights(model, adapter)
    attention = attention_flops(model, work.squares, work.tokens)
    passes = 4 if full else 2  # backward has a product for the input, and another one for a trained weight
    forward = 2 * (layers + added) * work.tokens + attention
    backward = (passes * layers + 4 * added) * work.tokens + 2 * attention
    recomputed = checkpointed * forward
    if pruned:
        unread = work.tokens - work.supervised
        rest = layers / model.layers - 2 * model.hidden * model.size("key_value")  # of the last layer, except k and v
        seen = attention / model.layers * unread / work.tokens if work.tokens else 0.0
        forward -= 2 * rest * unread + seen
        backward -= passes * rest * unread + 2 * seen
        if adapter is not None and not _is_saved(adapter, model.embedding):
            projections = model.size("query") + 2 * model.size("key_value")
            backward -= 2 * model.hidden * projections * work.tokens
    if head:
        product = 2 * model.vocab * model.embedding_width * work.supervised
        forward += product
        backward += 2 * product if full or _is_saved(adapter, model.head) else product
    return StepFlops(forward, backward, _row_norms(model, adapter), recomputed)


def layer_flops(model: ModelFacts, tokens: int) -> float:
    """Forward FLOPs of the layers' matrices."""
    return 2.0 * tokens * _layer_weights(model)


def attention_flops(model: ModelFacts, squares: int, tokens: int) -> float:
    """Forward FLOPs of attention in all layers: each token with itself and those before it, once for the scores and
    once for the values. Savings by a sliding window are not counted."""
    return 2.0 * model.layers * model.size("query") * (squares + tokens)


def _layer_weights(model: ModelFacts) -> float:
    """Weights that a token is multiplied with in all layers; of a mixture's experts, those it is routed to."""
    linears = sum(_weights(module) for module in model.layer_linears)
    matrices = (one for module in model.modules for one in module.matrices)
    return linears + sum(one.numbers * _active(model, one) for one in matrices)


def _active(model: ModelFacts, matrix: MatrixFact) -> float:
    """Fraction of the experts that a token is routed to; 1 for a router, which sees every token."""
    return min(1.0, model.active / matrix.experts) if matrix.experts > 1 else 1.0


def _weights(module: ModuleFact) -> int:
    assert module.linear is not None
    return module.linear[0] * module.linear[1]


def _targets(model: ModelFacts, adapter: AdapterPlan | None) -> list[tuple[int, int]]:
    """(inputs, outputs) of the adapted layers, without the output head."""
    names = set() if adapter is None else set(adapter.targets.value)
    return [module.linear for module in model.layer_linears if module.linear and module.name in names]


def _adapter_weights(model: ModelFacts, adapter: AdapterPlan | None) -> float:
    if adapter is None:
        return 0.0
    of_linears = sum(inputs + outputs for inputs, outputs in _targets(model, adapter))
    of_experts = sum(
        one.sides * _active(model, one)
        for module in model.modules
        for one in module.matrices
        if f"{module.name}.{one.name}" in adapter.parameters
    )
    return adapter.rank * (of_linears + of_experts)


def _row_norms(model: ModelFacts, adapter: AdapterPlan | None) -> float:
    """FLOPs of DoRA's row norms, factored into the products W A, A A and B B."""
    if adapter is None or adapter.kind.value != "dora":
        return 0.0
    rank = adapter.rank
    return float(sum(2 * rank * a * b + 2 * rank * rank * (a + b) for a, b in _targets(model, adapter)))


def _is_saved(adapter: AdapterPlan | None, name: str) -> bool:
    """Whether a module is trained in full with the adapter; PEFT's rule: its name ends with the given one."""
    return adapter is not None and any(name.endswith(saved) for saved in adapter.modules_to_save)
