"""Merge an adapter into its base: the model then multiplies by W' where the adapted one multiplied by W, A and B.

LoRA (Hu et al. 2021):  W' = W + s B A.  DoRA (Liu et al. 2024):  W' = m / |W + s B A| * (W + s B A), by outputs.

In place, one layer at a time. `effective_weights` computes one layer's W' in fp32 whatever the base is held in, without
changing the model; the merged weight is stored in the dtype of the base (export holds it in fp32: in bf16 a small
update of a large weight is rounded away). Tensors that the adapter trained in full replace the base's. A head that
differs from the embedding afterwards is untied, and config.json says so: tied again on loading, one would be lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.models.adapter_targets import INNER, is_linear
from surefoot.models.adapters import ADAPTER
from surefoot.models.convert.tensors import as_bytes
from surefoot.models.embeddings import embedding_and_head, is_tied
from surefoot.models.peft import LoraLayer, ModulesToSaveWrapper, ParamWrapper, PeftModel
from surefoot.models.precision import is_finite, plain_weight
from surefoot.models.wrapped import says_tied
from surefoot.system.errors import Fault, InputError

_AT_ONCE = 1 << 22  # values that are compared at once: 16 MB in fp32


@dataclass(frozen=True)
class Merged:
    """A model with its adapter merged.

    model: a plain transformers model.
    layers: names of those that the adapter changed.
    replaced: of modules that it trained in full.
    untied: the head was tied to the embedding and no longer can be.
    """

    model: PreTrainedModel
    layers: tuple[str, ...]
    replaced: tuple[str, ...]
    untied: bool


@torch.no_grad()
def merge_adapter(adapted: PeftModel) -> Merged:
    """Consumes `adapted`. Raises InputError for a layer whose adapter cannot be written as one matrix."""
    base = adapted.get_base_model()
    assert isinstance(base, PreTrainedModel)
    was_tied = says_tied(base.config)
    layers, replaced = [], []
    for name, module in list(base.named_modules()):
        if isinstance(module, ParamWrapper) and not is_linear(module):
            if not name.endswith(INNER):  # those inside it go with the outermost
                layers += [f"{name}.{parameter}" for parameter in _merged_parameters(module)]
                base.set_submodule(name, module.get_base_layer())
        elif isinstance(module, LoraLayer):
            base.set_submodule(name, _merged_layer(name, module))
            layers.append(name)
        elif isinstance(module, ModulesToSaveWrapper):
            base.set_submodule(name, _trained_module(module))
            replaced.append(name)
    if hasattr(base, "peft_config"):
        del base.peft_config  # else PEFT takes it for an adapted model when the next adapter comes
    if was_tied:
        _tie_again(base)
    return Merged(base, tuple(layers), tuple(replaced), untied=was_tied and not is_tied(base))


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Every floating-point parameter, in place, one at a time. Raises InputError where a value does not fit.

    Returns by how much the worst value was moved, in units of the rounding that the dtype cannot avoid: at most 1 where
    all is right (see `_rounding`).
    """
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            before = parameter.data
            parameter.data = _cast(before, dtype)
            worst = max(worst, _rounding(before, parameter.data))
            if not is_finite(parameter):
                largest = f"{torch.finfo(dtype).max:g}"
                what = f"does not fit {str(dtype).removeprefix('torch.')}, whose largest value is {largest}"
                raise InputError(Fault(name, what, "export with --dtype bf16 or fp32", code="SF-MODEL-NUMBERS"))
    model.config.dtype = dtype
    return worst


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """Name -> SHA-256 of dtype, shape and bytes, of everything that a file of the model holds; tied names have equal
    ones."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype)


def _rounding(before: torch.Tensor, after: torch.Tensor) -> float:
    """The largest |after - before| over what rounding to nearest may do: half a unit in the last place of |before|.

    That is at most eps/2 · |before|, and below the smallest normal number of the dtype eps/2 · that number. Infinite
    where it is not finite. before: in fp32, of any shape; piece by piece, to take no second copy of a matrix.
    """
    kind, worst = torch.finfo(after.dtype), 0.0
    for old, new in zip(before.reshape(-1).split(_AT_ONCE), after.reshape(-1).split(_AT_ONCE), strict=True):
        allowed = old.abs().clamp(min=kind.tiny) * (kind.eps / 2)
        ratio = float(((new.to(old.dtype) - old).abs() / allowed).max())
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def _merged_layer(name: str, module: LoraLayer) -> nn.Module:
    assert isinstance(module, nn.Module)  # PEFT's layers are modules, each of them, and their common class is not
    inner = module.get_base_layer()
    if isinstance(inner, nn.Embedding) and ADAPTER in module.lora_magnitude_vector:
        what = "is an embedding under DoRA, which cannot be merged"
        raise InputError(Fault(name, what, "export the adapter alone", code="SF-ADAPTER-DORA"))
    weight = effective_weights(module).weight
    assert weight is not None
    before = inner.get_parameter("weight")
    # A parameter of its own: a tied head that an adapter changes must not change the embedding.
    inner.weight = nn.Parameter(weight.to(before.dtype), requires_grad=False)
    if module.lora_bias.get(ADAPTER):
        bias = inner.get_parameter("bias")
        added = module.lora_B[ADAPTER].get_parameter("bias") * module.scaling[ADAPTER]
        inner.bias = nn.Parameter(bias + added.to(bias.dtype), requires_grad=False)
    return inner


def _merged_parameters(outermost: ParamWrapper) -> list[str]:
    """Names of those of the module inside that an adapter changes, merged."""
    inner, layer, names = outermost.get_base_layer(), outermost, []
    while isinstance(layer, ParamWrapper):
        before = inner.get_parameter(layer.parameter_name)
        changed = before.float() + layer.get_delta_weight(ADAPTER).float()
        setattr(inner, layer.parameter_name, nn.Parameter(changed.to(before.dtype), requires_grad=False))
        names.append(layer.parameter_name)
        layer = layer.base_layer
    return names


def _trained_module(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """The base's module with the trained values: of tied ones PEFT makes another class of module."""
    module, trained = wrapper.original_module, wrapper.modules_to_save[ADAPTER]
    for name, parameter in list(trained.named_parameters()):
        place, _, last = name.rpartition(".")
        dtype = module.get_parameter(name).dtype
        setattr(module.get_submodule(place), last, nn.Parameter(parameter.data.to(dtype), requires_grad=False))
    return module


def _tie_again(model: PreTrainedModel) -> None:
    """Embedding and head are one parameter where they are equal; else the config says that they are two."""
    embedding, head = embedding_and_head(model)
    if torch.equal(embedding, head):
        for module in _holders(model, head):
            module.weight = embedding
        return
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)


def _holders(model: PreTrainedModel, parameter: nn.Parameter) -> Iterator[nn.Module]:
    return (
        module for module in model.modules() if dict(module.named_parameters(recurse=False)).get("weight") is parameter
    )


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(as_bytes(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Weights:
    """As the module works with them.

    weight: as the base holds it ([out, in]; Conv1D: [in, out]), fp32 where an adapter changes it.
    before: the base's own, where an adapter changes it.
    bias: None where there is none.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    before: torch.Tensor | None = None


@torch.no_grad()
def effective_weights(module: nn.Module) -> Weights:
    """Of a linear layer or a norm, under an adapter or not. A norm may have no weight at all."""
    if isinstance(module, LoraLayer):
        base = module.get_base_layer()
        before = plain_weight(base)
        return Weights(_adapted(module, base, before), _own(base, "bias"), before)
    if isinstance(module, ModulesToSaveWrapper):
        trained = module.modules_to_save[ADAPTER]
        return Weights(_own(trained, "weight"), _own(trained, "bias"), _own(module.original_module, "weight"))
    weight = plain_weight(module) if isinstance(module, nn.Linear) else _own(module, "weight")
    return Weights(weight, _own(module, "bias"))


def _adapted(module: LoraLayer, base: nn.Module, before: torch.Tensor) -> torch.Tensor:
    # In fp32: in 16 bits most of a small update would be rounded away, and DoRA's norm would be of another matrix.
    changed = before.float() + module.get_delta_weight(ADAPTER).float()  # pyright: ignore[reportAttributeAccessIssue]
    if ADAPTER not in module.lora_magnitude_vector:
        return changed
    inputs = 0 if isinstance(base, Conv1D) else 1
    magnitude = module.lora_magnitude_vector[ADAPTER].get_parameter("weight").float()
    return changed * (magnitude / torch.linalg.norm(changed, dim=inputs)).unsqueeze(inputs)


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return dict(module.named_parameters(recurse=False)).get(name)
