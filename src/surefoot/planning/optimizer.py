"""Choose the optimizer, and compute the size of its state.

Bytes per trainable element, exact (a test steps each optimizer and compares):
    adamw       8: two fp32 moments
    rmsprop     4, or 8 with momentum
    sgd         0, or 4 with momentum
    adafactor   4 per row and per column of a matrix, 4 per element of a vector
    muon        4 for a matrix inside a decoder layer, 8 for the rest
    adamw_8bit  2 + 8/256, and two tables of 1 KiB, for such a matrix of at least 4 096 elements; 8 for the rest
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from surefoot.config.schema import OptimConfig
from surefoot.families.model_facts import ModelFacts, ModuleFact
from surefoot.planning.notes import Notes
from surefoot.planning.plan import NO_RATES, AdapterPlan, Choice
from surefoot.system.errors import Fault
from surefoot.system.messages import first_few

_FP32 = 4
_BLOCK = 256  # elements that share two fp32 scales in bitsandbytes' 8-bit moments
_TABLES = 2 * 256 * _FP32  # code tables of the two moments, 256 entries each
_MIN_8BIT_SIZE = 4096  # bitsandbytes keeps the moments of smaller tensors in fp32

VALUE_HEAD = "v_head.summary.weight"
_NAMED = 6  # names of parameters in a message
_HIGHEST_RATE = 0.1  # a thousand times the usual rate of adapters, and about the size of model weights

_REASONS = {
    "adamw": "two fp32 moments, 8 bytes per trainable parameter",
    "adamw_8bit": "matrices of the decoder layers in 8 bits, about 2 bytes each; the rest by adamw",
    "adafactor": "the second moment factored by rows and columns; optim.lr is the absolute rate",
    "rmsprop": "a second moment and no first, 4 bytes per trainable parameter",
    "sgd": "no second moment: needs a much higher rate than adamw",
    "muon": "matrices of the decoder layers by orthogonalized steps of adamw's size, 4 bytes each; the rest by adamw",
}


@dataclass(frozen=True)
class Tensor:
    """A trainable parameter. inside: whether it is in a decoder layer. name: as `optim.rates` finds it."""

    shape: tuple[int, ...]
    inside: bool
    name: str = ""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def plan_optimizer(request: OptimConfig) -> Choice[str]:
    requested = "name" in request.model_fields_set
    reason = _REASONS[request.name]
    return Choice(request.name, f"asked for: {reason}" if requested else reason, "user" if requested else "default")


def caution_rate(request: OptimConfig, notes: Notes) -> None:
    """Caution about a too high rate: all optimizers but sgd normalize the gradient, so a step changes weights by about
    lr."""
    rates = {"optim.lr": request.lr, **{f"optim.rates {part.of}": part.lr for part in request.rates}}
    for key, rate in rates.items():
        if request.name != "sgd" and rate > _HIGHEST_RATE:
            notes.caution(
                f"{key} {rate:g} lets {request.name} move every weight by about that much in each step, and "
                f"nearly all of a model's are below {_HIGHEST_RATE:g}: it will hardly learn; usual are 1e-5 to 1e-3"
            )


def rate_of(name: str, request: OptimConfig) -> float:
    """Return the peak learning rate of a parameter. name: in the model, without what PEFT adds."""
    return next((part.lr for part in request.rates if re.search(part.of, name)), request.lr)


def plan_rates(request: OptimConfig, names: Collection[str], notes: Notes) -> Choice[str]:
    """Describe `optim.rates`, and refuse patterns that no trained parameter has in its name. names: of these."""
    if unfit := unfitting(request, names):
        notes.refuse(unfit.where, unfit.what, unfit.fix, unfit.code)
    if not request.rates:
        return NO_RATES
    own = sum(rate_of(name, request) != request.lr for name in names)
    shown = ", ".join(f"{part.of} {part.lr:g}" for part in request.rates)
    return Choice(shown, f"asked for: {own:,} of {len(names):,} trained tensors; the others optim.lr", "user")


def unfitting(request: OptimConfig, names: Collection[str]) -> Fault | None:
    """Return a fault for patterns of `optim.rates` that are found in no name."""
    unfit = [part.of for part in request.rates if not any(re.search(part.of, name) for name in names)]
    if not unfit:
        return None
    some = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    what = f"no trained parameter has {' or '.join(map(repr, unfit))} in its name"
    return Fault("optim.rates", what, f"there are {first_few(some, _NAMED)}", code="SF-CONFIG-CONFLICT")


def state_bytes(request: OptimConfig, tensors: Iterator[Tensor]) -> int:
    """Bytes of optimizer state for these parameters after the first step, without step counters."""
    return sum(_bytes(request, tensor) for tensor in tensors)


def _bytes(request: OptimConfig, tensor: Tensor) -> int:
    matrix, numbers = len(tensor.shape) == 2, tensor.numbers
    match request.name:
        case "rmsprop" | "sgd":
            moments = (request.name == "rmsprop") + bool(request.momentum)
            return _FP32 * numbers * moments
        case "adafactor" if len(tensor.shape) > 1:  # for a convolution the last two dimensions are factored
            return _FP32 * sum(numbers // side for side in tensor.shape[-2:])
        case "adafactor":
            return _FP32 * numbers
        case "muon" if matrix and tensor.inside:
            return _FP32 * numbers
        case "adamw_8bit" if matrix and tensor.inside and numbers >= _MIN_8BIT_SIZE:
            return 2 * numbers + 2 * _FP32 * math.ceil(numbers / _BLOCK) + _TABLES
    return 2 * _FP32 * numbers


def trainable_tensors(model: ModelFacts, adapter: AdapterPlan | None, added_rows: int) -> Iterator[Tensor]:
    """Yield every trained parameter, a tied head once. added_rows: rows appended to embedding and head."""
    if adapter is None:
        yield from _whole(model, list(model.modules), added_rows)
        return
    targets = set(adapter.targets.value)
    for module in (*model.modules, *model.vision_linears):
        if module.name in targets and module.linear:
            inputs, outputs = module.linear
            outputs += added_rows if module.name == model.head else 0
            yield Tensor((adapter.rank, inputs), module.in_layer, f"{module.name}.lora_A.weight")
            yield Tensor((outputs, adapter.rank), module.in_layer, f"{module.name}.lora_B.weight")
            if adapter.kind.value == "dora":
                yield Tensor((outputs,), module.in_layer, f"{module.name}.lora_magnitude_vector.weight")
    for module in model.modules:
        for matrix in module.matrices:
            if f"{module.name}.{matrix.name}" in adapter.parameters:
                rows = adapter.rank * matrix.experts
                yield Tensor((rows, matrix.inputs), module.in_layer, f"{module.name}.lora_A.weight")
                yield Tensor((matrix.outputs, rows), module.in_layer, f"{module.name}.lora_B.weight")
    saved = [module for module in model.modules if any(module.name.endswith(name) for name in adapter.modules_to_save)]
    yield from _whole(model, saved, added_rows)


def _whole(model: ModelFacts, modules: list[ModuleFact], added_rows: int) -> Iterator[Tensor]:
    ends = [module for module in modules if module.name in (model.embedding, model.head)]
    for module in ends[:1] if model.tied else ends:
        rows = model.embedding_rows if module.name == model.embedding else model.vocab
        yield Tensor((rows + added_rows, model.embedding_width), False, f"{module.name}.weight")
    for module in modules:
        if module in ends:
            continue
        if module.linear:
            inputs, outputs = module.linear
            yield Tensor((outputs, inputs), module.in_layer, f"{module.name}.weight")
            yield Tensor((module.parameters - inputs * outputs,), module.in_layer, f"{module.name}.bias")
        elif module.parameters > 2 * model.hidden:  # learned positions; a norm has a scale and perhaps a bias
            shape = (module.parameters // model.hidden, model.hidden)
            yield Tensor(shape, module.in_layer, f"{module.name}.weight")
        else:
            yield Tensor((module.parameters,), module.in_layer, f"{module.name}.weight")
