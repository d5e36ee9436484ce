"""Compare a model with its plan after set-up, and two models with each other.

Libraries change dtypes, unfreeze parameters, fall back to other kernels. So before step 1 every parameter is held
against the plan; the result goes into plan.json under "verified". `compare_logits` says how far two models are apart on
the same texts, in logits and in the next token, for exports.

Shapes: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surefoot.models.adapter_targets import adapted_modules, adapted_parameters
from surefoot.models.checkpointing import checkpointed_layers, has_gradient_checkpointing
from surefoot.models.decoder import decoder_layers
from surefoot.models.embeddings import is_tied
from surefoot.models.forward import causal_model, narrowed_logits
from surefoot.models.modes import eval_mode
from surefoot.models.peft import PeftModel
from surefoot.models.precision import CODES, TORCH_DTYPE, is_quantised
from surefoot.models.qat import not_rounded
from surefoot.models.wrapped import says_tied
from surefoot.planning.plan import OFF, RunPlan
from surefoot.system.errors import Diverged, EnvironmentFault, Fault

# Logits of a few positions and of all differ by nothing but the order of rounding; a model that mixes positions differs
# by orders of magnitude more.
_HEAD_TOLERANCE = 1e-2
# A later token changes nothing at all; where experts are grouped, the order of rounding: units in the last place.
_ROUNDING = 16


def verify_model(model: nn.Module, plan: RunPlan, device: str | None = None) -> dict[str, Any]:
    """Compare dtypes, trainable parameters, adapter targets, tying, attention, device and checkpointing with the plan.

    device: where the model lies now, where that is another than it will run on. Returns what was found, JSON-able.
    Raises EnvironmentFault with one line per difference.
    """
    base = causal_model(model)
    packed, held = plan.precision.packed, TORCH_DTYPE[plan.precision.unpacked]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    found: dict[str, Any] = {
        "trainable_dtypes": _dtypes(trainable.values()),
        "frozen_dtypes": _dtypes(frozen.values()),
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
    """The largest difference between logits of chosen positions and the model's own at these positions, relative to
    the largest logit.

    Raises EnvironmentFault where the model makes logits of one position from others, or does not call its head as a
    module: then the loss on supervised positions would not be the model's loss. And where a position sees those after
    it (BERT and other encoders have such a class too): then the answer would stand in the input. Diverged where the
    weights, each of them finite, are so large that logits are not.
    """
    base = causal_model(model)
    # A 16-bit base has fp32 parts besides (adapters, modules trained in full), which meet under autocast only.
    with eval_mode(model), torch.autocast(device.type, dtype=base.dtype, enabled=base.dtype != torch.float32):
        ids = torch.arange(8, device=device).unsqueeze(0)
        places = torch.tensor([1, 2, 6], device=device)
        own = base(input_ids=ids, use_cache=False).logits[0, places].float()
        ours = narrowed_logits(model, places, input_ids=ids, use_cache=False).float()
        later = base(input_ids=ids.clamp(max=6), use_cache=False).logits[0, places].float()
    name = type(base).__name__
    if not (torch.isfinite(own).all() and torch.isfinite(ours).all()):
        what = "its logits are not finite before any step is taken: its weights are finite, and too large"
        fix = "lower optim.lr and start from earlier weights, or take another base"
        raise Diverged(Fault(name, what, fix, code="SF-MODEL-NUMBERS"))
    difference = _relative(ours, own)
    if not difference <= _HEAD_TOLERANCE:
        what = f"its logits at a position depend on more than that position: off by {difference:.2g} of the largest"
        raise EnvironmentFault(Fault(name, what, "this model is not supported yet", code="SF-MODEL-NUMBERS"))
    if not _relative(later, own) <= min(_HEAD_TOLERANCE, _ROUNDING * torch.finfo(base.dtype).eps):
        what = "a position sees the tokens after it: it is not a causal language model"
        raise EnvironmentFault(Fault(name, what, "use a model that writes from left to right", code="SF-MODEL-NUMBERS"))
    return difference


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite for another shape."""
    return float((found - wanted).abs().max() / wanted.abs().max()) if found.shape == wanted.shape else math.inf


def _not_packed(base: nn.Module) -> list[str]:
    """Linear layers inside the decoder layers that are held in full although the plan packs them. An adapter's own
    matrices train and are not meant."""
    return [
        name
        for name, module in decoder_layers(base).named_modules()
        if isinstance(module, nn.Linear) and not is_quantised(module) and not module.weight.requires_grad
    ]


def _dtypes(parameters: Iterable[torch.Tensor]) -> list[str]:
    return sorted({_dtype_name(parameter.dtype) for parameter in parameters})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    """A short form: long lists as their length and first element."""
    if isinstance(value, list):
        return f"{len(value)} ({value[0]}, …)" if len(value) > 4 else ", ".join(value) or "none"
    return str(value)


@dataclass(frozen=True)
class Agreement:
    """How far two models are apart on the same texts.

    largest: difference of two logits.
    share: of the largest logit of the first model.
    top1: share of the positions whose likeliest token is the same. Not finite where a logit is not.
    """

    largest: float
    share: float
    top1: float
    positions: int


@torch.no_grad()
def logits_of(model: nn.Module, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[T, V] per text, in fp32 on the CPU. One text at a time: padding would be one more thing that could differ."""
    device = next(model.parameters()).device
    found = []
    for ids in texts:
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        found.append(logits[0].float().cpu())
    return found


def rounding_noise(model: nn.Module, texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]) -> float:
    """How far one rounding moves the logits of this model: every embedding of `texts` by one unit in the last place,
    up or down at random (the same in every call). A share of the largest logit.

    model: in the dtype whose rounding is meant.
    texts: token ids of each.
    logits: the model's own, as `logits_of` gives them.
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
    """Raises ValueError where the shapes differ."""
    largest, scale, same, positions = [0.0], [0.0], 0, 0
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"logits {list(a.shape)} and {list(b.shape)}")
        largest.append(float((a - b).abs().max()))
        scale.append(float(a.abs().max()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        positions += a.shape[0]
    difference = float(torch.tensor(largest).max())  # NaN wins, as it does not with Python's max
    return Agreement(difference, difference / max(float(torch.tensor(scale).max()), 1e-30), same / positions, positions)
