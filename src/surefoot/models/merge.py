"""Merge an adapter into its base model.

LoRA (Hu et al. 2021):  W' = W + s B A.  DoRA (Liu et al. 2024):  W' = m / |W + s B A| * (W + s B A), by outputs.

Works in place, one layer at a time. `effective_weights` computes one layer's W' in fp32 without changing the model; the
merged weight is stored in the base's dtype (export loads the base in fp32, because in bf16 small updates of large
weights are rounded away). Fully trained tensors of the adapter replace the base's. If the head then differs from the
embedding, they are untied, also in config.json: otherwise one of them would be lost on loading.
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

_AT_ONCE = 1 << 22  # values compared at once: 16 MB in fp32


@dataclass(frozen=True)
class Merged:
    """A model with its adapter merged.

    model: a plain transformers model.
    layers: names of the layers that the adapter changed.
    replaced: names of the modules that were fully trained.
    untied: whether the head was tied to the embedding and no longer is.
    """

    model: PreTrainedModel
    layers: tuple[str, ...]
    replaced: tuple[str, ...]
    untied: bool


@torch.no_grad()
def merge_adapter(adapted: PeftModel) -> Merged:
    """Merge the adapter; `adapted` must not be used afterwards. Raises InputError for a layer that cannot be merged."""
    base = adapted.get_base_model()
    assert isinstance(base, PreTrainedModel)
    was_tied = says_tied(base.config)
    layers, replaced = [], []
    for name, module in list(base.named_modules()):
        if isinstance(module, ParamWrapper) and not is_linear(module):
            if not name.endswith(INNER):  # inner wrappers are merged with the outermost one
                layers += [f"{name}.{parameter}" for parameter in _merged_parameters(module)]
                base.set_submodule(name, module.get_base_layer())
        elif isinstance(module, LoraLayer):
            base.set_submodule(name, _merged_layer(name, module))
            layers.append(name)
        elif isinstance(module, ModulesToSaveWrapper):
            base.set_submodule(name, _trained_module(module))
            replaced.append(name)
    if hasattr(base, "peft_config"):
        del base.peft_config  # otherwise PEFT would treat it as an adapted model when another adapter is added
    if was_tied:
        _tie_again(base)
    return Merged(base, tuple(layers), tuple(replaced), untied=was_tied and not is_tied(base))


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Cast every floating-point parameter in place, one at a time. Raises InputError if a value overflows.

    Returns the largest change in units of unavoidable rounding: at most 1 if the cast is correct (see `_rounding`).
    """
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            before = parameter.data
            parameter.data = _cast(before, dtype)
            worst = max(worst, _rounding(before, parameter.data))
            if not is_finite(parameter):
                largest = f"{torch.finfo(dtype).max:g}"
                what = f"overflows {str(dtype).removeprefix('torch.')}, whose largest value is {largest}"
                raise InputError(Fault(name, what, "export with --dtype bf16 or fp32", code="SF-MODEL-NUMBERS"))
    model.config.dtype = dtype
    return worst


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """Return name -> SHA-256 of dtype, shape and bytes for all tensors of the state dict."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype)


def _rounding(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest |after - before| relative to the bound of round-to-nearest; inf for non-finite values.

    The bound is eps/2 · |before|, or eps/2 times the dtype's smallest normal number if |before| is below that. Works in
    pieces, to need no second copy of a matrix.

    before: fp32, of any shape.
    """
    kind, worst = torch.finfo(after.dtype), 0.0
    for old, new in zip(before.reshape(-1).split(_AT_ONCE), after.reshape(-1).split(_AT_ONCE), strict=True):
        allowed = old.abs().clamp(min=kind.tiny) * (kind.eps / 2)
        ratio = float(((new.to(old.dtype) - old).abs() / allowed).max())
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def _merged_layer(name: str, module: LoraLayer) -> nn.Module:
    assert isinstance(module, nn.Module)  # all of PEFT's layers are modules, but their common base class is not
    inner = module.get_base_layer()
    if isinstance(inner, nn.Embedding) and ADAPTER in module.lora_magnitude_vector:
        what = "is an embedding with DoRA, which cannot be merged"
        raise InputError(Fault(name, what, "export the adapter alone", code="SF-ADAPTER-DORA"))
    weight = effective_weights(module).weight
    assert weight is not None
    before = inner.get_parameter("weight")
    # A new parameter, so that an adapter on a tied head does not change the embedding.
    inner.weight = nn.Parameter(weight.to(before.dtype), requires_grad=False)
    if module.lora_bias.get(ADAPTER):
        bias = inner.get_parameter("bias")
        added = module.lora_B[ADAPTER].get_parameter("bias") * module.scaling[ADAPTER]
        inner.bias = nn.Parameter(bias + added.to(bias.dtype), requires_grad=False)
    return inner


def _merged_parameters(outermost: ParamWrapper) -> list[str]:
    """Merge all adapted parameters of the wrapped module; return their names."""
    inner, layer, names = outermost.get_base_layer(), outermost, []
    while isinstance(layer, ParamWrapper):
        before = inner.get_parameter(layer.parameter_name)
        # Added in fp32 and rounded once; in bf16 a small change of a large weight would be lost.
        changed = before.float() + layer.get_delta_weight(ADAPTER).float()
        setattr(inner, layer.parameter_name, nn.Parameter(changed.to(before.dtype), requires_grad=False))
        names.append(layer.parameter_name)
        layer = layer.base_layer
    return names


def _trained_module(wrapper: ModulesToSaveWrapper) -> nn.Module:
    """Return the base's module with the trained values (for tied modules PEFT uses another module class)."""
    module, trained = wrapper.original_module, wrapper.modules_to_save[ADAPTER]
    for name, parameter in list(trained.named_parameters()):
        place, _, last = name.rpartition(".")
        dtype = module.get_parameter(name).dtype
        setattr(module.get_submodule(place), last, nn.Parameter(parameter.data.to(dtype), requires_grad=False))
    return module


def _tie_again(model: PreTrainedModel) -> None:
    """Tie head and embedding again if they are equal; otherwise set tie_word_embeddings to False in the config."""
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
    """The effective weights of a module.

    weight: in the base's layout ([out, in]; Conv1D: [in, out]); fp32 if an adapter changes it.
    bias: None if there is none.
    before: the base's weight if an adapter changes it.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    before: torch.Tensor | None = None


@torch.no_grad()
def effective_weights(module: nn.Module) -> Weights:
    """Return the weights of a linear layer or norm, with the adapter's changes. A norm may have no weight."""
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
    # In fp32: in 16 bits most of a small update would be rounded away, and DoRA's norm would be wrong.
    changed = before.float() + module.get_delta_weight(ADAPTER).float()  # pyright: ignore[reportAttributeAccessIssue]
    if ADAPTER not in module.lora_magnitude_vector:
        return changed
    inputs = 0 if isinstance(base, Conv1D) else 1
    magnitude = module.lora_magnitude_vector[ADAPTER].get_parameter("weight").float()
    return changed * (magnitude / torch.linalg.norm(changed, dim=inputs)).unsqueeze(inputs)


def _own(module: nn.Module, name: str) -> torch.Tensor | None:
    return dict(module.named_parameters(recurse=False)).get(name)
