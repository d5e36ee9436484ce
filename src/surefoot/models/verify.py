"""Compare a model with its plan after set-up, and two models with each other.

Libraries change dtypes, unfreeze parameters and fall back to other kernels, so before step 1 every parameter is checked
against the plan; the result is saved in plan.json under "verified". `compare_logits` measures how much two models
differ on the same texts, in logits and in the most likely token; exports use it.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.models.adapter_targets import adapted_modules, adapted_parameters
from surefoot.models.checkpointing import checkpointed_layers, has_gradient_checkpointing
from surefoot.models.decoder import decoder_layers
from surefoot.models.embeddings import is_tied
from surefoot.models.facts import plain_parameter
from surefoot.models.forward import causal_model, narrowed_logits
from surefoot.models.modes import eval_mode
from surefoot.models.peft import PeftModel
from surefoot.models.precision import CODES, TORCH_DTYPE, is_quantized
from surefoot.models.qat import not_rounded
from surefoot.models.wrapped import says_tied
from surefoot.planning.plan import OFF, RunPlan
from surefoot.system.errors import Diverged, EnvironmentFault, Fault

# Logits of some positions and of all positions differ only by rounding; if a model mixes positions in its logits, the
# difference is orders of magnitude larger.
_HEAD_TOLERANCE = 1e-2
# Units in the last place: a later token changes nothing at all, except for rounding if experts are grouped.
_ROUNDING = 16


def verify_model(model: nn.Module, plan: RunPlan, device: str | None = None) -> dict[str, Any]:
    """Compare dtypes, trainable parameters, adapter targets, tying, attention, device and checkpointing with the plan;
    return what was found, JSON-able.

    device: device type of the model now, if it differs from the planned one.

    Raises EnvironmentFault with one line per difference.
    """
    base = causal_model(model)
    packed, held = plan.precision.packed, TORCH_DTYPE[plan.precision.unpacked]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    found: dict[str, Any] = {
        "trainable_dtypes": _dtypes(trainable.values()),
        "frozen_dtypes": _dtypes(frozen.values() if held == torch.float32 else _narrowed(base, frozen, held)),
        "not_packed": _not_packed(base) if packed else [],
        "not_rounded": not_rounded(base) if plan.precision.qat.value != OFF else [],
        "trainable": sum(p.numel() for p in trainable.values()),
        "trainable_tensors": len(trainable),
        "targets": adapted_modules(model) if isinstance(model, PeftModel) else [],
        "parameters": adapted_parameters(model) if isinstance(model, PeftModel) else [],
        "tied": is_tied(base),
        "attention": base.config._attn_implementation,
        "devices": sorted({p.device.type for p in model.parameters()}),
        "gradient_checkpointing": has_gradient_checkpointing(model),
        "recomputed_layers": checkpointed_layers(model),
    }
    expected: dict[str, Any] = {
        "trainable_dtypes": [_dtype_name(TORCH_DTYPE[plan.precision.trainable.value])],
        "frozen_dtypes": [*([_dtype_name(CODES[packed])] if packed else []), _dtype_name(held)] if frozen else [],
        "not_packed": [],
        "not_rounded": [],
        "trainable": plan.trainable,
        "targets": list(plan.adapter.targets.value) if plan.adapter else [],
        "parameters": list(plan.adapter.parameters) if plan.adapter else [],
        "tied": says_tied(base.config),
        "attention": plan.attention.implementation.value,
        "devices": [device or plan.device.value],
        "gradient_checkpointing": plan.memory.gradient_checkpointing.value,
        "recomputed_layers": plan.memory.layers_again(len(decoder_layers(model))),
    }
    faults = [
        Fault(f"plan: {key}", f"planned {_shown(wanted)}, found {_shown(found[key])}", code="SF-PLAN-BROKEN")
        for key, wanted in expected.items()
        if _unordered(found[key]) != _unordered(wanted)
    ]
    if faults:
        raise EnvironmentFault(faults)
    return found


@torch.no_grad()
def verify_head(model: nn.Module, device: torch.device) -> float:
    """Check that computing logits at selected positions only gives the model's own logits there, and that attention is
    causal. Returns the largest difference relative to the largest logit.

    Raises EnvironmentFault if the logits of a position depend on others or the head is not called as a module (then the
    loss on supervised positions would not be the model's loss), and if a position depends on later tokens (as in BERT
    and other encoders, which also have causal classes). Raises Diverged if finite weights give non-finite logits.
    """
    base = causal_model(model)
    # A 16-bit base also has fp32 parts (adapters, fully trained modules), which need autocast.
    with eval_mode(model), torch.autocast(device.type, dtype=base.dtype, enabled=base.dtype != torch.float32):
        ids = torch.arange(8, device=device).unsqueeze(0)
        places = torch.tensor([1, 2, 6], device=device)
        own = base(input_ids=ids, use_cache=False).logits[0, places].float()
        ours = narrowed_logits(model, places, input_ids=ids, use_cache=False).float()
        later = base(input_ids=ids.clamp(max=6), use_cache=False).logits[0, places].float()
    name = type(base).__name__
    if not (torch.isfinite(own).all() and torch.isfinite(ours).all()):
        what = "its logits are not finite before the first step: its weights are finite but too large"
        fix = "lower optim.lr and start from earlier weights, or take another base"
        raise Diverged(Fault(name, what, fix, code="SF-MODEL-NUMBERS"))
    difference = _relative(ours, own)
    if not difference <= _HEAD_TOLERANCE:
        what = f"its logits at a position depend on other positions: relative difference {difference:.2g}"
        raise EnvironmentFault(Fault(name, what, "this model is not supported yet", code="SF-MODEL-NUMBERS"))
    if not _relative(later, own) <= min(_HEAD_TOLERANCE, _ROUNDING * torch.finfo(base.dtype).eps):
        what = "a position attends to the tokens after it: it is not a causal language model"
        raise EnvironmentFault(Fault(name, what, "use a causal (decoder-only) model", code="SF-MODEL-NUMBERS"))
    return difference


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; inf if the shapes differ."""
    return float((found - wanted).abs().max() / wanted.abs().max()) if found.shape == wanted.shape else math.inf


def _narrowed(
    base: PreTrainedModel, parameters: Mapping[str, nn.Parameter], held: torch.dtype
) -> Iterator[nn.Parameter]:
    """Yield the parameters without those that transformers keeps in fp32 whatever type it is asked for: routers and
    rates of decay of some families."""
    if not any(one.dtype == torch.float32 for one in parameters.values()):
        yield from parameters.values()
        return
    strict = getattr(base, "_keep_in_fp32_modules_strict", None) or ()
    with torch.device("meta"):
        made = type(base)._from_config(base.config, dtype=held)
    wide = {name for name, one in made.named_parameters() if one.dtype == torch.float32 or any(map(name.count, strict))}
    for name, one in parameters.items():
        if one.dtype != torch.float32 or plain_parameter(name).replace(".base_layer", "") not in wide:
            yield one


def _not_packed(base: nn.Module) -> list[str]:
    """Return the frozen linear layers of the decoder that are not quantized, although the plan says so."""
    return [
        name
        for name, module in decoder_layers(base).named_modules()
        if isinstance(module, nn.Linear) and not is_quantized(module) and not module.weight.requires_grad
    ]


def _dtypes(parameters: Iterable[torch.Tensor]) -> list[str]:
    return sorted({_dtype_name(parameter.dtype) for parameter in parameters})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    """Format a value; long lists as their length and first element."""
    if isinstance(value, list):
        return f"{len(value)} ({value[0]}, …)" if len(value) > 4 else ", ".join(value) or "none"
    return str(value)


@dataclass(frozen=True)
class Agreement:
    """How much two models differ on the same texts. `largest` and `share` are not finite if a logit is not.

    largest: largest difference of two logits.
    share: the same relative to the largest logit of the first model.
    top1: fraction of positions with the same most likely token.
    positions: number of positions compared.
    """

    largest: float
    share: float
    top1: float
    positions: int


@torch.no_grad()
def logits_of(model: nn.Module, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return logits [T, V] per text, in fp32 on the CPU. Runs one text at a time, so that padding cannot matter."""
    device = next(model.parameters()).device
    found = []
    for ids in texts:
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        found.append(logits[0].float().cpu())
    return found


def rounding_noise(model: nn.Module, texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]) -> float:
    """Measure how much a rounding changes this model's logits: every embedding of `texts` moves by one unit in the last
    place, up or down at random (the same in every call). Returns the change relative to the largest logit.

    model: model in the dtype whose rounding is measured.
    texts: token ids of each text.
    logits: the model's own, from `logits_of`.
    """

    def one_unit(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        up = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(output)
        return torch.nextafter(output, towards)

    handle = model.get_input_embeddings().register_forward_hook(one_unit)  # type: ignore[operator]
    try:
        return compare_logits(logits, logits_of(model, texts)).share
    finally:
        handle.remove()


def compare_logits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Agreement:
    """Compare two models' logits, [T, V] per text. Raises ValueError if the shapes differ."""
    largest, scale, same, positions = [0.0], [0.0], 0, 0
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"logits {list(a.shape)} and {list(b.shape)}")
        largest.append(float((a - b).abs().max()))
        scale.append(float(a.abs().max()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        positions += a.shape[0]
    difference = float(torch.tensor(largest).max())  # torch's max propagates NaN, unlike Python's
    return Agreement(difference, difference / max(float(torch.tensor(scale).max()), 1e-30), same / positions, positions)
