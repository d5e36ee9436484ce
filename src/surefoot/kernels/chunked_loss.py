"""Output head fused with a loss, a few positions at a time, with gradients computed in the forward pass.

    z = W h + b      l = log sum exp z - z[y]      dl/dz = softmax(z) - e_y      dl/dh = W' dl/dz      dl/dW = dl/dz h'

Some models change z first: to s z (Granite, Command R, Falcon-H1) or to c tanh(s z / c) (Gemma 2 and later), whose
derivative s (1 - tanh^2) then stands before the last two.

The gradient of a loss with respect to its logits depends on later computation only through a scalar factor. So it is
computed while the logits exist and immediately multiplied by the head, and the logits are discarded: no tensor of
positions x vocabulary exists in the forward or backward pass. A frozen head gets no gradient. (Idea: Liger-Kernel,
fused_linear_cross_entropy.py; Apple, Cut Your Losses, arXiv 2411.09009.)

The head's output is computed in the dtype of the plain path; its change, softmax, loss and the accumulated head
gradient are fp32 (fp64 for fp64). For fp16, gradients are scaled up ("lifted") before they are cast to fp16, because
the loss scale, which does this in the plain path, is part of the factor and known only in the backward pass. Tests
compare with the plain path, `plain_losses`.

The equations are those of cross entropy. Any loss of single positions that gives its gradient by the logits takes the
same way (`TokenLoss`, `summed`), and `summed_over` takes logits that a model has computed itself.

Trade-off: a trainable head is supported only for a *sum* of losses. For separate losses the factors are known only in
the backward pass, when the logits are gone.

Shapes: N positions, H hidden size, V vocabulary; hidden [N, H], weight [V, H], bias [V], targets [N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.kernels.operands import operand_type, wide_type

_WIDENED = 1024  # rows of a product that are converted to fp32 at once, to be added to a sum
_HIGHEST_LIFT = 14  # exponent of the largest lift: 2^14 is a quarter of fp16's largest number


@dataclass(frozen=True)
class Head:
    """The output head: weight [V, H], bias [V] or None.

    rows: positions whose logits exist at once; each takes 4 V bytes, in 16 bits 6 V, with a cap 4 V more.
    scale, cap: the model's logits are scale z, with a cap cap tanh(scale z / cap); scale is above 0.
    see: called with the head's output, [rows or fewer, V], before the loss.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: int
    scale: float = 1.0
    cap: float | None = None
    see: Callable[[torch.Tensor], None] | None = None

    def change(self, output: torch.Tensor, tanh: torch.Tensor | None = None) -> torch.Tensor:
        """Overwrite the head's output with the model's logits, and return these.

        tanh: tensor of the same shape for tanh(scale z / cap), where it is needed later.
        """
        if self.scale != 1:
            output.mul_(self.scale)
        if self.cap is None:
            return output
        bent = torch.div(output, self.cap, out=output if tanh is None else tanh).tanh_()
        return torch.mul(bent, self.cap, out=output)

    @property
    def trains(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)


class TokenLoss(Protocol):
    """A loss of single positions, whose gradient by the logits adds up to 0 over the vocabulary, as through a softmax.

    bound: largest sum of the gradient's magnitudes at a position; None: not known, so it is measured where fp16 asks.
    """

    @property
    def bound(self) -> float | None: ...

    def __call__(
        self, logits: torch.Tensor, part: slice, wanted: bool, narrow: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses [n] of the positions `part`, and their gradient by the logits [n, V] if it is wanted.

        logits: [n, V], fp32 or fp64; may be overwritten.
        narrow: [n, V] in 16 bits, in which the gradient is needed; it may be written there at once.
        """
        ...


TokenWeight = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits up to a constant [n, V], log p of the targets [n, 1]) -> weights [n, 1], which count as constants."""


class CrossEntropy:
    """The `TokenLoss` of the tokens `targets` [N].

    weight: of each token; None: 1.
    """

    def __init__(self, targets: torch.Tensor, weight: TokenWeight | None = None):
        self._targets, self._weight = targets, weight
        self.bound = 2.0 if weight is None else None  # softmax(z) - e_y

    def __call__(
        self, logits: torch.Tensor, part: slice, wanted: bool, narrow: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        words = self._targets[part].unsqueeze(1)
        # Into its own input: another tensor of this size is what the chunks are there to avoid.
        log_p = torch.log_softmax(logits, dim=1, out=logits)  # pyright: ignore[reportCallIssue]
        chosen = log_p.gather(1, words)  # before `exp` below overwrites the logits in place
        losses, at_target = -chosen, chosen.exp() - 1
        weights = None if self._weight is None else self._weight(log_p, chosen)
        if weights is not None:
            losses, at_target = losses * weights, at_target * weights
        if not wanted:
            return losses.squeeze(1), None
        if weights is not None:
            log_p += weights.log()  # so that the gradient, exp of this, is rounded once
        gradient = torch.exp(log_p, out=log_p if narrow is None else narrow)
        return losses.squeeze(1), gradient.scatter_(1, words, at_target.to(gradient.dtype))


def summed(hidden: torch.Tensor, head: Head, loss: TokenLoss) -> torch.Tensor:
    """Return a loss summed over all positions, a scalar; differentiable in hidden and head."""
    return _losses(hidden, head, loss, summed=True)


def summed_over(logits: torch.Tensor, loss: TokenLoss, rows: int) -> torch.Tensor:
    """Return a loss summed over all positions, from their logits [N, V]; differentiable in these.

    rows: positions that are compared at once.
    """
    found: Any = _OfLogits.apply(logits, loss, rows, torch.is_grad_enabled())
    return found


def summed_loss(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, weight: TokenWeight | None = None
) -> torch.Tensor:
    """Return the cross entropy summed over all positions, a scalar; differentiable in hidden and head. weight: as in
    `CrossEntropy`."""
    return summed(hidden, head, CrossEntropy(targets, weight))


def separate(hidden: torch.Tensor, head: Head, loss: TokenLoss) -> torch.Tensor:
    """Return the loss of every position, [N]; differentiable in hidden. ValueError for a trainable head."""
    if head.trains and torch.is_grad_enabled():
        raise ValueError("a trainable head needs the sum of the losses")
    return _losses(hidden, head, loss, summed=False)


def token_losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of every position, [N]; otherwise as `separate`."""
    return separate(hidden, head, CrossEntropy(targets))


def head_output(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W' + b, [n, V]; in `out` where it is given. `F.linear` may round 16 bits otherwise."""
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


@torch.no_grad()
def first_choices(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Return the most likely token at every position, [N]."""
    # As in the losses' products: in another dtype nearly equal logits could change their order; scale and cap do not.
    weight, bias = _cast(head.weight, head.bias, operand_type(hidden.dtype, hidden.device))
    with torch.autocast(hidden.device.type, enabled=False):
        parts = hidden.to(weight.dtype).split(head.rows)
        return torch.cat([head_output(part, weight, bias).argmax(dim=-1) for part in parts])


def plain_losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Reference for `token_losses` with all logits at once: [N], differentiable in all inputs."""
    logits = F.linear(hidden, head.weight, head.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = logits.to(wide_type(logits.dtype)) * head.scale
        logits = logits if head.cap is None else torch.tanh(logits / head.cap) * head.cap
        return F.cross_entropy(logits, targets, reduction="none")


def _losses(hidden: torch.Tensor, head: Head, loss: TokenLoss, *, summed: bool) -> torch.Tensor:
    differentiable = torch.is_grad_enabled()
    found: Any = _Chunked.apply(hidden, head.weight, head.bias, loss, head, summed, differentiable)
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        loss: TokenLoss,
        head: Head,
        summed: bool,
        differentiable: bool,
    ) -> torch.Tensor:
        dtype = operand_type(hidden.dtype, hidden.device)
        x = hidden.to(dtype)
        w, b = _cast(weight, bias, dtype)
        # needs_input_grad is True for trainable inputs even under no_grad.
        needs_hidden, needs_weight, needs_bias = (one and differentiable for one in ctx.needs_input_grad[:3])
        losses = torch.empty(len(x), dtype=wide_type(dtype), device=x.device)
        d_hidden = torch.empty_like(x) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide_type(dtype)) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide_type(dtype)) if needs_bias and bias is not None else None
        wanted = needs_hidden or needs_weight or needs_bias
        lifts = torch.ones(len(x), 1, device=x.device) if wanted and dtype == torch.float16 else None
        largest = None if lifts is None else _largest(w)
        with torch.autocast(x.device.type, enabled=False):
            rows = min(head.rows, len(x))
            room = _Room(rows, len(w), dtype, losses.dtype, x.device, tanh=wanted and head.cap is not None)
            for start in range(0, len(x), head.rows):
                part = slice(start, start + head.rows)
                output = room.output(x[part], w, b)
                if head.see is not None:
                    head.see(output)
                tanh = room.tanh(len(output))
                logits = head.change(room.wide(output), tanh)
                # The output has been copied, so the gradient may take its place; a bias wants its sum in fp32.
                at_once = b is None and lifts is None and tanh is None and _casts_in_kernels(output)
                losses[part], gradient = loss(logits, part, wanted, output if at_once else None)
                if gradient is None:
                    continue
                lift = own_lift = None
                if lifts is not None and largest is not None:
                    magnitude = _magnitude(gradient) if loss.bound is None else loss.bound
                    lifts[part] = lift = _lift(magnitude * largest)
                    # Those of d_weight are over positions; of numbers that add up to 0 none is above half of all.
                    own_lift = _lift(magnitude / 2 * len(gradient) * _largest(x[part]))
                if tanh is not None:  # gradient *= 1 - tanh^2, without room for the factor
                    torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
                if d_bias is not None:
                    d_bias += gradient.sum(dim=0)
                if d_hidden is not None:
                    torch.mm(room.narrow(gradient, lift), w, out=d_hidden[part])
                if d_weight is not None:
                    _add_product(d_weight, room.narrow(gradient, own_lift).T, x[part], own_lift)
        ctx.lifts, ctx.scale = lifts, head.scale
        # Attributes, not saved tensors: backward scales them in place and frees them at once.
        ctx.gradients = (d_hidden, d_weight, d_bias)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return losses.sum() if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """factor: gradient of the sum, or of each loss [N]."""
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        factor = factor * ctx.scale
        hidden_type, weight_type, bias_type = ctx.types
        if d_hidden is not None:
            own = factor.reshape(-1, 1) if ctx.lifts is None else factor.reshape(-1, 1) / ctx.lifts
            d_hidden = (d_hidden * own).to(hidden_type)
        if d_weight is not None:
            d_weight = d_weight.mul_(factor).to(weight_type)
        if d_bias is not None:
            d_bias = d_bias.mul_(factor).to(bias_type)
        return d_hidden, d_weight, d_bias, None, None, None, None


class _OfLogits(torch.autograd.Function):
    """Keeps the gradient in the dtype of the softmax: a loss scale is known in the backward pass only, and in 16 bits
    what is small would be lost before."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, loss: TokenLoss, rows: int, differentiable: bool
    ) -> torch.Tensor:
        wide = wide_type(logits.dtype)
        wanted = ctx.needs_input_grad[0] and differentiable
        losses = torch.empty(len(logits), dtype=wide, device=logits.device)
        gradient = torch.empty(logits.shape, dtype=wide, device=logits.device) if wanted else None
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, len(logits), rows):
                part = slice(start, start + rows)
                # A copy also in the same dtype: a loss overwrites its logits, and these belong to the model's graph.
                losses[part], own = loss(logits[part].to(wide, copy=True), part, wanted)
                if gradient is not None and own is not None:
                    gradient[part] = own
        ctx.gradient, ctx.type = gradient, logits.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(factor).to(ctx.type), None, None, None


class _Room:
    """Buffers for the logits of a part and values computed from them, allocated once for all parts: an allocation of
    this size comes from the operating system, which zeroes its pages each time."""

    def __init__(
        self, rows: int, words: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device, *, tanh: bool
    ):
        """dtype: dtype of the matrix products. wide: dtype of the softmax. tanh: whether a cap's tanh is kept."""
        self._products = torch.empty(rows, words, dtype=dtype, device=device)
        self._softmax = self._products if wide == dtype else torch.empty(rows, words, dtype=wide, device=device)
        self._tanh = torch.empty(rows, words, dtype=wide, device=device) if tanh else None

    def tanh(self, rows: int) -> torch.Tensor | None:
        return None if self._tanh is None else self._tanh[:rows]

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return head_output(x, weight, bias, self._products[: len(x)])

    def wide(self, output: torch.Tensor) -> torch.Tensor:
        """Return the result of `output` in the dtype of the softmax: [rows, V], to be overwritten."""
        wide = self._softmax[: len(output)]
        return wide if wide.dtype == output.dtype else wide.copy_(output)

    def narrow(self, gradient: torch.Tensor, lift: torch.Tensor | None) -> torch.Tensor:
        """Return gradient * lift in the dtype of the products; overwrites the logits."""
        if gradient.dtype == self._products.dtype:
            return gradient
        found = self._products[: len(gradient)]
        return found.copy_(gradient) if lift is None else torch.mul(gradient, lift, out=found)


def _casts_in_kernels(products: torch.Tensor) -> bool:
    """Whether an fp32 operator can write its result in the dtype of these products, without a pass of its own: on a
    GPU. A CPU would make a tensor for it first."""
    return products.is_cuda and products.dtype in (torch.bfloat16, torch.float16)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lift: torch.Tensor | None) -> None:
    """Compute total += a @ b / lift, in the dtype of `total`."""
    if lift is not None:
        total.addcdiv_(a @ b, lift)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # a few rows at a time: torch would convert the whole product first
        for rows, more in zip(total.split(_WIDENED), (a @ b).split(_WIDENED), strict=True):
            rows += more


def _lift(bound: torch.Tensor) -> torch.Tensor:
    """Return the factor for softmax gradients (at most 1) before the cast to fp16, in which numbers below 6e-8 become
    0. It is a power of two, so it is exact.

    bound: upper bound of the product that follows; with the factor it must not overflow.
    """
    room = torch.finfo(torch.float16).max / 2 / bound
    return room.log2().floor().clamp(0, _HIGHEST_LIFT).exp2()


def _magnitude(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest sum of magnitudes of a row, in fp32; at least the smallest normal number."""
    most = torch.linalg.vector_norm(gradient, 1, dim=1, dtype=torch.float32).max()
    return most.clamp(min=torch.finfo(torch.float32).tiny)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, in fp32."""
    return torch.linalg.vector_norm(tensor, torch.inf, dtype=torch.float32)


def _cast(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)
