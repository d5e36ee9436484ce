"""LoRA and DoRA: forward and backward of linear layers with a common input, without gradients of frozen weights.

    h = x A^T        z = x W^T + h (s B)^T        y = z + b                        LoRA  (Hu et al. 2021)
    f = m / |W + s B A|, row by row, held constant in the backward pass
                     z = f (x W^T + h (s B)^T)    y = z + b                        DoRA  (Liu et al. 2024)

Backward, with dz = dy, and dz = f dy in the gradients of x, A and B:

    g = dz (s B)     dA = g^T x     dB = s dz^T h     dx = dz W + g A     dm = (sum over tokens of dy z) / m

Layers that share their input (q, k and v; gate and up) read it once: their A matrices are stacked, so that h, g A and
dA are one matrix product each. Saved for the backward pass are x and h, and for DoRA z, which is the output itself if
there is no bias. In the backward pass f is multiplied into the smaller of weights and activations. With dropout on the
adapter's input, every layer has its own mask, and DoRA's f - 1 applies to W x of the masked input, as in PEFT:

    y = x W^T + b + (f - 1) (u W^T) + f (u A^T) (s B)^T     u = masked x

`plain_projection` is the reference implementation that tests compare with.

Shapes: T tokens, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.kernels import dora
from surefoot.kernels.dora import Factor, scaled, scaled_rows

# Numbers of a product that is summed at once. On a CPU it stays in a cache; on a GPU launches of small pieces would
# take longer than the sums.
_CACHED, _LARGE = 1 << 22, 1 << 26


@dataclass(frozen=True)
class Projection:
    """One layer in one forward pass.

    weight: [O, I], frozen, any floating dtype and layout.
    bias: [O], frozen, or None.
    b: [O, r], the trainable parameter.
    scale: s.
    up: s B, [O, r], in the compute dtype.
    factor: DoRA's factor; None for LoRA.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor
    scale: float
    up: torch.Tensor
    factor: Factor | None = None


@dataclass(frozen=True)
class Layers:
    """Layers with a common input.

    down: A of each layer, [r, I], in the compute dtype.
    stacked: these concatenated, [sum of r, I].
    dropped: dropout mask of each layer, bool, shaped as the input, True where dropped; None without dropout.
    kept: factor for the other elements, 1 / (1 - p).
    """

    projections: tuple[Projection, ...]
    down: tuple[torch.Tensor, ...]
    stacked: torch.Tensor
    dropped: tuple[torch.Tensor, ...] | None = None
    kept: float = 1.0


def adapted(layers: Layers, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Compute the outputs [..., O] of all layers for x [..., I], in the compute dtype.

    parameters: for each layer A [r, I], B [O, r] and, with a factor, m [O]. They receive the gradients; their values
        are taken from `layers`.
    """
    return _Adapted.apply(layers, x, *parameters)  # pyright: ignore[reportReturnType]


def plain_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference for one layer, differentiated by autograd.

    masked: the adapter's input after dropout; None for x.
    """
    u = x if masked is None else masked
    update = u @ a.T @ b.T * scale
    base = F.linear(x, weight, bias)
    if magnitude is None:
        return base + update
    factor = magnitude / torch.linalg.norm(weight + scale * b @ a, dim=1).detach()
    return base + (factor - 1) * F.linear(u, weight) + factor * update


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Layers, x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Masks are saved like activations, so that gradient checkpointing and saved-tensor hooks can free them too.
        ctx.layers, ctx.masked = replace(layers, dropped=None), layers.dropped is not None
        ctx.dtypes = [x.dtype, *(one.dtype for one in parameters)]
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(layers.stacked.dtype)
            inputs = _inputs(layers, x)
            thin = _thin(layers, inputs)
            made = [
                _output(one, x, u, h, masked=layers.dropped is not None)
                for one, u, h in zip(layers.projections, inputs, thin, strict=True)
            ]
        ctx.save_for_backward(x, *thin, *(kept for _, kept in made), *(layers.dropped or ()))
        return tuple(output for output, _ in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *saved = ctx.saved_tensors
        count = len(ctx.layers.projections)
        thin, kept, masks = saved[:count], saved[count : 2 * count], saved[2 * count :]
        layers: Layers = replace(ctx.layers, dropped=tuple(masks) if ctx.masked else None)
        with torch.autocast(x.device.type, enabled=False):
            dy, layers, sums = _through_factors(layers, kept, [_flat(gradient) for gradient in outer])
            g = [one @ _scaled_up(projection) for one, projection in zip(dy, layers.projections, strict=True)]
            own = _own_gradients(layers, x, thin, kept, dy, g)
            if sums:
                own = [one for number, dm in enumerate(sums) for one in (*own[2 * number : 2 * number + 2], dm)]
            dx = _input_gradient(layers, x, dy, g) if ctx.needs_input_grad[1] else None
        return None, *(
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip([dx, *own], ctx.dtypes, strict=True)
        )


def _inputs(layers: Layers, x: torch.Tensor) -> list[torch.Tensor]:
    """Return u of each layer."""
    if layers.dropped is None:
        return [x] * len(layers.projections)
    return [_masked(x, dropped, layers.kept) for dropped in layers.dropped]


def _masked(x: torch.Tensor, dropped: torch.Tensor, kept: float) -> torch.Tensor:
    return x.masked_fill(dropped, 0).mul_(kept)


def _thin(layers: Layers, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return h of each layer, [T, r]."""
    if layers.dropped is None:
        return (_flat(inputs[0]) @ layers.stacked.T).split([len(a) for a in layers.down], dim=1)
    return [_flat(u) @ a.T for u, a in zip(inputs, layers.down, strict=True)]


def _output(
    layer: Projection, x: torch.Tensor, u: torch.Tensor, h: torch.Tensor, *, masked: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a layer's output and what its backward pass needs: z, or u W^T with dropout."""
    weight, factor = layer.weight.to(x.dtype), layer.factor
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if masked and factor is not None:
        output, base = F.linear(x, weight, bias), F.linear(u, weight)
        # f base - base, not (f - 1) base: the pattern of `scale_on_average_` decides at which tokens f takes effect.
        output += dora.scale_on_average_(base.clone(), factor).sub_(base)
        _flat(output).addmm_(h, _scaled_up(layer).T)
        return output, base
    # The wide product adds to the thin one. The other way round the whole output would be read and written once more,
    # and rounded once more: what small updates add would be lost wherever it is less than half a unit of the output.
    # (On a GPU it is: cuBLAS rounds a product before it adds to it.)
    # Not x (f W)^T for DoRA: rounding f W would increase the error in 16 bits by a tenth.
    z = x.new_empty(*x.shape[:-1], len(weight))
    if bias is None or factor is not None:
        torch.mm(h, layer.up.T, out=_flat(z))
    else:
        torch.addmm(bias, h, layer.up.T, out=_flat(z))
    _flat(z).addmm_(_flat(x), weight.T)
    if factor is None:
        return z, None
    (_fused(z, factor) or dora).scale_on_average_(z, factor)
    return (z if bias is None else z + bias), z if factor.invertible else None


def _fused(tensor: torch.Tensor, factor: Factor | None) -> ModuleType | None:
    """Return the kernels that multiply this tensor by f in one pass; None where torch's operators do."""
    return _gpu_kernels(tensor.device) if tensor.is_cuda and factor is not None and factor.rare is not None else None


@cache
def _gpu_kernels(device: torch.device) -> ModuleType | None:
    try:
        from surefoot.kernels import dora_gpu
    except ImportError:  # a torch without Triton
        return None
    return dora_gpu if dora_gpu.is_usable(device) else None


def _through_factors(
    layers: Layers, kept: Sequence[torch.Tensor | None], dy: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Layers, list[torch.Tensor]]:
    """Return dz, the layers as those of LoRA, and dm of each, where one pass over dy gives both; otherwise dy and the
    layers as they are, and nothing.

    kept: see `_output`.
    """
    kernels = [_fused(gradient, layer.factor) for layer, gradient in zip(layers.projections, dy, strict=True)]
    if layers.dropped is not None or None in kernels or any(z is None for z in kept):
        return dy, layers, []
    found, sums = [], []
    for layer, gradient, z, fused in zip(layers.projections, dy, kept, kernels, strict=True):
        assert fused is not None
        assert z is not None
        assert layer.factor is not None
        dz, total = fused.through_factor(gradient.contiguous(), _flat(z), layer.factor)
        found.append(dz)
        sums.append(total / layer.factor.magnitude)
    plain = tuple(replace(one, factor=None) for one in layers.projections)
    return found, replace(layers, projections=plain), sums


def _scaled_up(layer: Projection) -> torch.Tensor:
    """Return f s B; s B for LoRA."""
    return layer.up if layer.factor is None else scaled_rows(layer.up, layer.factor)


def _own_gradients(
    layers: Layers,
    x: torch.Tensor,
    thin: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor | None],
    dy: Sequence[torch.Tensor],
    g: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return dA, dB and, with a factor, dm of each layer."""
    inputs = _inputs(layers, x)
    if layers.dropped is None:
        downs = (torch.cat(list(g), dim=1).T @ _flat(x)).split([len(a) for a in layers.down])
    else:
        downs = [one.T @ _flat(u) for one, u in zip(g, inputs, strict=True)]
    found: list[torch.Tensor] = []
    for number, layer in enumerate(layers.projections):
        # Not dy^T h: with the thin operand first the product is twice as fast on CPUs.
        product = (thin[number].T @ dy[number]).T.to(torch.promote_types(x.dtype, torch.float32))
        if layer.factor is None:
            found += [downs[number], product * layer.scale]
            continue
        change = (product * layer.b.to(product.dtype)).sum(dim=1) * layer.scale  # sum over tokens of dy * (s h B^T)
        found += [downs[number], product * (layer.factor.values * layer.scale).unsqueeze(1)]
        found.append(
            _magnitude_gradient(
                layer,
                layer.factor,
                inputs[number],
                saved[number],
                dy[number],
                change,
                masked=layers.dropped is not None,
            )
        )
    return found


def _magnitude_gradient(
    layer: Projection,
    factor: Factor,
    u: torch.Tensor,
    kept: torch.Tensor | None,
    dy: torch.Tensor,
    change: torch.Tensor,
    *,
    masked: bool,
) -> torch.Tensor:
    """Return dm.

    kept: see `_output`; None if z cannot be divided by f, in which case a dense product is computed instead.
    """
    if kept is None:
        dense = (dy.T @ _flat(u)).to(change.dtype) * layer.weight.to(change.dtype)
        return (dense.sum(dim=1) + change) / factor.norm
    sums = torch.zeros_like(change)
    rows = max(1, (_CACHED if dy.device.type == "cpu" else _LARGE) // dy.shape[1])
    for own, output in zip(dy.split(rows), _flat(kept).split(rows), strict=True):
        # A matrix product accumulates in fp32 at full speed.
        sums += (own.new_ones(1, len(own)) @ (own * output)).squeeze(0)
    return (sums + change) / factor.norm if masked else sums / factor.magnitude


def _input_gradient(
    layers: Layers, x: torch.Tensor, dy: Sequence[torch.Tensor], g: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return dx, shaped as x."""
    if layers.dropped is None:
        # All layers add to one buffer: autograd would make a dx of each and add them up.
        dx = torch.cat(list(g), dim=1) @ layers.stacked
        for layer, one in zip(layers.projections, dy, strict=True):
            dx.addmm_(*_through(layer, one))
        return dx.view(x.shape)
    dx = torch.zeros_like(_flat(x))
    for layer, one, thin, a, dropped in zip(layers.projections, dy, g, layers.down, layers.dropped, strict=True):
        weight = layer.weight.to(x.dtype)
        dx.addmm_(one, weight)
        inner = thin @ a
        if layer.factor is not None:
            inner.addmm_(scaled(one, layer.factor).sub_(one), weight)
        dx += _masked(inner, _flat(dropped), layers.kept)
    return dx.view(x.shape)


def _through(layer: Projection, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of dz W, with f multiplied into the smaller one."""
    weight = layer.weight.to(dy.dtype)
    if layer.factor is None:
        return dy, weight
    # Scaling costs a pass over T x O or O x I numbers.
    if len(dy) > weight.shape[1]:
        return dy, scaled_rows(weight, layer.factor)
    return scaled(dy, layer.factor), weight


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [T, N]."""
    return tensor.reshape(-1, tensor.shape[-1])
