"""Adapter targets: linear layers, and parameters that are not in a linear layer (experts, routers).

transformers stores the experts of a layer in one parameter [E, outputs, inputs] (or [E, inputs, outputs] if its module
is `is_transposed`). PEFT adapts it through `target_parameters`: W'_e = W_e + s B_e A_e, with

    A [E * r, inputs]    rows e * r + j         expert-major
    B [outputs, r * E]   columns j * E + e      expert index fastest: the columns of one expert are E apart

PEFT wraps the module once per parameter, the last one outermost; the file names are `experts.lora_A` for the outermost
and `experts.base_layer.lora_A` for the next one. vLLM reads the same order. PEFT supports neither DoRA nor dropout for
such parameters.

Shapes: E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.models.peft import LoraConfig, LoraLayer, ParamWrapper, PeftModel, convert_peft_config_for_transformers
from surefoot.models.precision import is_quantized, plain_weight
from surefoot.planning.plan import AdapterPlan
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_word

INNER = ".base_layer"  # PEFT's name for the module that one of its layers wraps
_TARGETS, _DORA = "SF-ADAPTER-TARGETS", "SF-ADAPTER-DORA"


def adapted_modules(model: PeftModel) -> list[str]:
    """Return the names, within the base model, of the linear layers that have an adapter."""
    return [name for name, layer in _layers(model) if is_linear(layer)]


def adapted_parameters(model: PeftModel) -> list[str]:
    """Return the full names, within the base model, of other parameters that have an adapter."""
    return [
        f"{name}.{layer.parameter_name}"
        for name, layer in _layers(model)
        if isinstance(layer, ParamWrapper) and not is_linear(layer)
    ]


def is_linear(layer: LoraLayer) -> bool:
    """Whether PEFT's layer wraps a linear layer. Some linear layers are adapted as parameters, see `peft_targets`."""
    return not isinstance(layer, ParamWrapper) or isinstance(layer.get_base_layer(), nn.Linear)


def _layers(model: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    """Yield (name of the wrapped module in the base model, PEFT layer)."""
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace(INNER, ""), module


def peft_targets(model: PreTrainedModel, plan: AdapterPlan) -> tuple[list[str], list[str]]:
    """Return `target_modules` and `target_parameters` for adapter_config.json.

    In families whose experts were linear layers before transformers 5, PEFT maps the targets gate_proj, up_proj and
    down_proj to the experts, even if they name shared experts or dense layers. These are therefore named as parameters
    (`gate_proj.weight`), which PEFT finds; the names in the adapter file are the same.
    """
    names = [name for name, _ in model.named_modules()]
    endings = {target.rpartition(".")[2] for target in plan.targets.value}
    renamed = {ending for ending in endings if is_renamed(model, ending)}
    linears = [target for target in plan.targets.value if target.rpartition(".")[2] not in renamed]
    weights = [f"{target}.weight" for target in plan.targets.value if target.rpartition(".")[2] in renamed]
    parameters = [name.replace(INNER, "") for name, _ in model.named_parameters()]
    return compact_targets(names, linears), compact_targets(parameters, [*plan.parameters, *weights], components=2)


def compact_targets(names: Collection[str], targets: Collection[str], components: int = 1) -> list[str]:
    """Return the shortest names that select `targets` among `names`: the last components if they match nothing else.

    `q_proj` is more readable than 32 full names, and works for tools that rename the prefix.
    """

    def ending(name: str) -> str:
        return ".".join(name.split(".")[-components:])

    endings = {ending(target) for target in targets}
    matched = {name for name in names if ending(name) in endings}
    return sorted(endings if matched == set(targets) else targets)


def check_targets(model: PreTrainedModel, plan: AdapterPlan) -> None:
    """Raises InputError for a target that the model does not have or that cannot be adapted."""
    modules = dict(model.named_modules())
    parameters = {name.replace(INNER, "") for name, _ in model.named_parameters()}
    faults = []
    for target in plan.targets.value:
        if target not in modules:
            near = nearest_word(target, modules)
            fix = f"did you mean {near}?" if near else "see `surefoot plan` for the model's linear layers"
            faults.append(Fault("adapter.targets", f"the model has no module {target}", fix, code=_TARGETS))
        elif not isinstance(plain_layer(modules[target]), nn.Linear | Conv1D):
            what = f"{target} is not a linear layer but {type(modules[target]).__name__}"
            faults.append(Fault("adapter.targets", what, "name linear layers", code=_TARGETS))
    for target in plan.parameters:
        if target not in parameters:
            what, fix = f"the model has no parameter {target}", "see `surefoot plan` for the model's experts"
            faults.append(Fault("adapter.targets", what, fix, code=_TARGETS))
        elif _is_turned(model, target):
            what = f"{target} holds a single transposed expert, to which PEFT would add B A without transposing it"
            faults.append(Fault("adapter.targets", what, "set adapter.experts: false", code=_TARGETS))
    if not plan.targets.value and not plan.parameters:
        faults.append(Fault("adapter.targets", "matches no module", "name linear layers", code=_TARGETS))
    faults = faults or [*_beyond_peft(model, plan), *_turned_factors(modules, plan)]
    if not faults and plan.kind.value == "dora":
        faults = _norm_faults(model, plan.targets.value)
    if faults:
        raise InputError(faults)


def _turned_factors(modules: Mapping[str, nn.Module], plan: AdapterPlan) -> Iterator[Fault]:
    """PEFT's OLoRA takes factors of the weight as it is stored, and Conv1D stores it transposed."""
    turned = [name for name in plan.targets.value if isinstance(plain_layer(modules[name]), Conv1D)]
    if turned and plan.start == "olora":
        what = f"olora has no form for {turned[0]}, which stores its weight transposed"
        yield Fault("adapter.start", what, "use pissa, or leave it out", code="SF-CONFIG-CONFLICT")


def _is_turned(model: nn.Module, parameter: str) -> bool:
    """Whether the parameter is [1, inputs, outputs]."""
    place, _, name = parameter.rpartition(".")
    module = plain_layer(model.get_submodule(place))
    return bool(getattr(module, "is_transposed", False)) and module.get_parameter(name).shape[0] == 1


def _beyond_peft(model: PreTrainedModel, plan: AdapterPlan) -> Iterator[Fault]:
    """Yield faults for combinations that PEFT does not support."""
    if any(map(is_quantized, model.modules())):
        packed = [name for name in plan.targets.value if is_renamed(model, name.rpartition(".")[2])]
        if packed:
            what = f"PEFT adapts {packed[0]} as a parameter, but it is quantized"
            yield Fault("adapter.targets", what, "leave it out, or set precision.base: auto", code=_TARGETS)
    if plan.kind.value == "lora" and not plan.dropout:
        return
    _, parameters = peft_targets(model, plan)
    if not parameters:
        return
    shown = ", ".join(parameters[:4]) + (", …" if len(parameters) > 4 else "")
    if plan.kind.value == "dora":
        what = f"DoRA does not support {shown}, which PEFT adapts as parameters"
        yield Fault("adapter.kind", what, "use adapter.kind: lora, or leave them out of adapter.targets", code=_DORA)
    if plan.dropout:
        what = f"{shown} cannot use dropout: PEFT adds B A to the parameter itself, so there is no input to drop"
        yield Fault("adapter.dropout", what, "set adapter.dropout: 0, or leave them out", code=_TARGETS)


def is_renamed(model: PreTrainedModel, ending: str) -> bool:
    """Whether PEFT maps a target of this name to a module that transformers has renamed."""
    config = LoraConfig(target_modules=[ending])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # names one of two modules that were merged, without the other
        return True
    return ending not in (config.target_modules or ())


def zero_norm_rows(model: nn.Module, targets: Collection[str]) -> dict[str, list[int]]:
    """Return module name -> rows of norm zero, by which DoRA would divide, for the modules named in `targets`."""
    norms = {name: row_norms(plain_layer(model.get_submodule(name))) for name in targets}
    return {name: rows for name, norm in norms.items() if (rows := (norm == 0).nonzero().flatten().tolist())}


def _norm_faults(model: nn.Module, targets: Sequence[str]) -> list[Fault]:
    faults = []
    for name, rows in zero_norm_rows(model, targets).items():
        shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
        what = f"{len(rows)} rows of its weight are zero ({shown}), but DoRA divides by their norm"
        faults.append(Fault(name, what, "use adapter.kind: lora, or leave it out of adapter.targets", code=_DORA))
    return faults


def plain_layer(module: nn.Module) -> nn.Module:
    """Return the layer without the adapter that may wrap it."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


@torch.no_grad()
def row_norms(layer: nn.Module) -> torch.Tensor:
    """Return the norm of W per output, [outputs] in fp32, as in DoRA's forward. Conv1D stores W as [inputs,
    outputs]."""
    return torch.linalg.norm(plain_weight(layer).float(), dim=0 if isinstance(layer, Conv1D) else 1)
