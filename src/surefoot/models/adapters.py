"""LoRA and DoRA adapters with PEFT, made reproducible and exact.

LoRA (Hu et al. 2021):  y = W x + s B A x.  DoRA (Liu et al. 2024):  y = m / |W + s B A| * (W + s B A) x, by rows.
The base is frozen; A, B and m are fp32 whatever the base's dtype. Differences from plain PEFT: the initialization of A
depends only on the seed, and m is initialized to the fp32 norm of W (PEFT rounds it to the base's dtype, so a bf16
model would change before its first step).

`CachedNorms` computes DoRA's row norms once for many forward passes with the same weights. In decoding, B A and the
norm are most of PEFT's work: a full matrix per token. PEFT's own cache also stores B A, as much memory as the model;
here only the norms are stored, and the arithmetic is bit-identical to PEFT's:

    y = (m / |W + s B A| - 1) * W x + m / |W + s B A| * s B A x     (W x without its bias)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.models.adapter_targets import check_targets, peft_targets, plain_layer, row_norms
from surefoot.models.checkpointing import leave_inputs_constant
from surefoot.models.embeddings import is_tied
from surefoot.models.peft import (
    DoraLinearLayer,
    LoraConfig,
    LoraLayer,
    ModulesToSaveWrapper,
    PeftModel,
    TaskType,
    dequantize_module_weight,
    get_peft_model,
)
from surefoot.models.precision import hold_in_fp32
from surefoot.models.quiet import quiet_libraries
from surefoot.planning.plan import ZERO, AdapterPlan

ADAPTER = "default"  # PEFT's name for the only adapter
AdaptedLayer = LoraLayer | ModulesToSaveWrapper


def add_adapter(
    model: PreTrainedModel,
    plan: AdapterPlan,
    *,
    seed: int,
    base: str,
    revision: str | None = None,
    autocast: bool = False,
) -> PeftModel:
    """Freeze `model` and add the planned adapter, in place.

    seed: seed of the initialization.
    base, revision: base model as the user named it, for adapter_config.json.
    autocast: whether every forward pass will run under autocast (then it must); saves casts without changing results.

    Raises InputError for a target that the model does not have, and for DoRA on rows of norm zero.
    """
    check_targets(model, plan)
    with quiet_libraries(), torch.random.fork_rng(devices=[]):  # PEFT draws A on the CPU
        torch.manual_seed(seed)
        adapted = get_peft_model(model, _lora_config(model, plan))
    leave_inputs_constant(adapted)
    config = adapted.peft_config[ADAPTER]
    config.base_model_name_or_path, config.revision = base, revision
    hold_in_fp32(adapted)
    if plan.kind.value == "dora":
        _start_at_exact_norms(adapted, ADAPTER)
    elif autocast:
        leave_casts_to_autocast(adapted)
    return adapted


def add_copy(model: PeftModel, name: str, like: str) -> None:
    """Add another adapter on the same modules as a bit-identical copy of `like`; tied weights stay tied. PEFT changes
    requires_grad of the other adapters."""
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        model.add_adapter(name, copy.deepcopy(model.peft_config[like]))
    memo: dict[int, Any] = {}
    for layer in adapted_layers(model):
        for group in (getattr(layer, part) for part in layer.adapter_layer_names):
            if like in group:
                # One memo for all layers, so that modules that share a parameter share it in the copy too.
                group[name] = copy.deepcopy(group[like], memo)


def add_another(model: PeftModel, name: str, plan: AdapterPlan, *, seed: int) -> None:
    """Add another adapter with its own shape and modules, initialized as in `add_adapter`. PEFT changes requires_grad
    of the other adapters. Raises InputError as `add_adapter` does."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    check_targets(base, plan)
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(name, _lora_config(base, plan))
    if plan.kind.value == "dora":
        _start_at_exact_norms(model, name)


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """Return the layers that have an adapter, and modules fully trained along with it (modules_to_save)."""
    return [module for module in model.modules() if isinstance(module, AdaptedLayer)]


def _lora_config(model: PreTrainedModel, plan: AdapterPlan) -> LoraConfig:
    modules, parameters = peft_targets(model, plan)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    saved = set(plan.modules_to_save)
    pair = {name.rpartition(".")[2] for name, module in model.named_modules() if module in embeddings}
    ties = is_tied(model) and bool(saved & pair)
    if ties:  # PEFT ties them only if the head is named; of embeddings it knows only embed_tokens
        saved = saved - pair | {name for name, module in model.named_modules() if module is embeddings[1]}
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=plan.rank,
        lora_alpha=int(plan.alpha) if plan.alpha.is_integer() else plan.alpha,  # type: ignore[arg-type]
        lora_dropout=plan.dropout,
        use_rslora=plan.rslora,
        use_dora=plan.kind.value == "dora",
        init_lora_weights=True if plan.start == ZERO else plan.start,  # type: ignore[arg-type]
        target_modules=modules,
        target_parameters=parameters or None,
        fan_in_fan_out=any(isinstance(plain_layer(model.get_submodule(name)), Conv1D) for name in plan.targets.value),
        modules_to_save=sorted(saved) or None,
        ensure_weight_tying=ties,
    )


@torch.no_grad()
def _start_at_exact_norms(model: PeftModel, name: str) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer) and name in module.lora_magnitude_vector:
            magnitude = module.lora_magnitude_vector[name].get_parameter("weight")
            magnitude.copy_(row_norms(module.get_base_layer()))


def leave_casts_to_autocast(model: PeftModel) -> None:
    """Disable PEFT's cast of every adapter input to fp32, which autocast reverses at once: a fifth of a LoRA step.

    Layers with DoRA keep it, because DoRA takes the dtype of its row norms from that input.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = bool(module.lora_variant)


class CachedNorms:
    """Caches DoRA's row norms while no weight of `model` changes. A norm is computed when its layer first runs, because
    sharded weights are gathered only then."""

    def __init__(self, model: nn.Module):
        self._layers = [module for module in model.modules() if type(module) is DoraLinearLayer]
        self._scales: dict[DoraLinearLayer, torch.Tensor] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which forward passes use the cached norms; the model is restored afterwards."""
        for layer in self._layers:
            layer.forward = self._forward(layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _forward(self, layer: DoraLinearLayer) -> Any:
        def forward(
            x: torch.Tensor,
            *,
            lora_A: nn.Module,
            lora_B: nn.Module,
            scaling: float,
            base_layer: nn.Module,
            base_result: torch.Tensor,
            adapter_name: str = "default",
        ) -> torch.Tensor:
            if layer not in self._scales:
                self._scales[layer] = _scale(layer, x.dtype, lora_A, lora_B, scaling, base_layer)
            scale = self._scales[layer]
            bias = getattr(base_layer, "bias", None)
            plain = base_result if bias is None else base_result - bias
            return (scale - 1) * plain + scale * lora_B(lora_A(x)) * scaling

        return forward


def _scale(
    layer: DoraLinearLayer, dtype: torch.dtype, lora_A: nn.Module, lora_B: nn.Module, scaling: float, base: nn.Module
) -> torch.Tensor:
    """Return m / |W + s B A|, [1, outputs], computed as in PEFT's forward."""
    change = layer.get_lora_weight(lora_A=lora_A, lora_B=lora_B).to(dtype)
    norm = layer.get_weight_norm(weight=dequantize_module_weight(base).to(dtype), lora_weight=change, scaling=scaling)
    return (layer.get_parameter("weight") / norm).view(1, -1)
