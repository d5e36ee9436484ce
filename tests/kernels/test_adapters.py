"""LoRA's and DoRA's own forward and backward pass against the equations under autograd, in float64."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from surefoot.kernels import adapters
from surefoot.kernels.adapters import Layers, Projection, adapted, plain_projection
from surefoot.kernels.dora import factored_norms, factors_of, row_squares, scaled, scaled_rows

EXACT = 1e-10  # float64 in another order of sums; 1e-15 seen
INPUTS, OUTPUTS, RANK, SCALE = 24, (20, 12, 20), 4, 1.7


@dataclasses.dataclass
class Case:
    """Layers with one input, as the kernel and as the equations have them."""

    layers: Layers
    x: torch.Tensor
    parameters: list[torch.Tensor]
    magnitudes: list[torch.Tensor | None]

    def fast(self):
        return adapted(self.layers, self.x, self.parameters)

    def plain(self):
        step = 3 if self.magnitudes[0] is not None else 2
        masks = self.layers.dropped or [None] * len(self.layers.projections)
        return [
            plain_projection(
                self.x,
                one.weight,
                one.bias,
                *self.parameters[step * number : step * number + 2],
                one.scale,
                magnitude,
                None if masks[number] is None else self.x.masked_fill(masks[number], 0) * self.layers.kept,
            )
            for number, (one, magnitude) in enumerate(zip(self.layers.projections, self.magnitudes, strict=True))
        ]

    def gradients(self, outputs):
        """Of x and all parameters, for output gradients that are the same every time."""
        generator = torch.Generator().manual_seed(9)
        outer = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in outputs]
        return torch.autograd.grad(list(outputs), [self.x, *self.parameters], outer)


def case(kind: str, *, tokens: int = 40, bias=True, dropout=False, transposed=False, magnitude=1.0) -> Case:
    """magnitude: by what DoRA's m is off its start. More tokens than inputs put f into the weights."""
    torch.manual_seed(3)
    wide = torch.float64
    x = torch.randn(2, tokens // 2, INPUTS, dtype=wide, requires_grad=True)
    projections, downs, parameters, magnitudes = [], [], [], []
    for size in OUTPUTS:
        weight = torch.randn(INPUTS, size, dtype=wide).T if transposed else torch.randn(size, INPUTS, dtype=wide)
        a, b = torch.randn(RANK, INPUTS, dtype=wide), torch.randn(size, RANK, dtype=wide)
        m, factor = None, None
        if kind == "dora":
            norm = factored_norms(weight, row_squares(weight), a, b, SCALE)
            m = norm * magnitude * (1 + 0.1 * torch.randn(size, dtype=wide))
            [factor] = factors_of([(m, norm, wide)])
        offset = torch.randn(size, dtype=wide) if bias else None
        projections.append(Projection(weight, offset, b, SCALE, SCALE * b, factor))
        downs.append(a)
        magnitudes.append(m)
        parameters += [one.requires_grad_() for one in (a, b, m) if one is not None]
    masks = tuple(torch.rand(x.shape) < 0.3 for _ in OUTPUTS) if dropout else None
    down = tuple(one.detach() for one in downs)
    return Case(Layers(tuple(projections), down, torch.cat(down), masks, 1 / 0.7), x, parameters, magnitudes)


def worst(found, wanted):
    return max(
        float((one - two).detach().abs().max() / two.detach().abs().max())
        for one, two in zip(found, wanted, strict=True)
    )


CASES = [
    (kind, options)
    for kind in ("lora", "dora")
    for options in ({}, {"bias": False}, {"tokens": 6}, {"dropout": True}, {"transposed": True})
] + [("dora", {"magnitude": 3.0}), ("dora", {"magnitude": 1e-5}), ("dora", {"magnitude": 1e-5, "dropout": True})]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_equations(kind, options):
    one = case(kind, **options)
    fast, plain = one.fast(), one.plain()
    assert worst(fast, plain) < EXACT
    assert worst(one.gradients(fast), one.gradients(plain)) < EXACT


@pytest.mark.parametrize("options", [{}, {"dropout": True}], ids=str)
def test_magnitudes_learn_the_same_from_tokens_in_pieces(options, monkeypatch):
    monkeypatch.setattr(adapters, "_CACHED", 3 * max(OUTPUTS))  # 40 tokens, three or some more at once
    one = case("dora", **options)
    assert worst(one.gradients(one.fast()), one.gradients(one.plain())) < EXACT


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("broken", ["scale", "up", "weight"])
def test_twin_any_other_number_is_seen(kind, broken):
    one = case(kind)
    first, *others = one.layers.projections
    value = getattr(first, broken)
    changed = dataclasses.replace(first, **{broken: value * 1.001})
    plain = one.plain()
    one.layers = dataclasses.replace(one.layers, projections=(changed, *others))
    fast = one.fast()
    error = max(worst(fast, plain), worst(one.gradients(fast), one.gradients(plain)))
    assert error > 1e4 * EXACT


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_no_rows_have_outputs_of_no_rows(kind):
    """As of an expert that no token of a micro-batch goes to."""
    one = case(kind)
    one.x = one.x.detach()[:0].requires_grad_()
    fast = one.fast()
    assert [output.shape for output in fast] == [output.shape for output in one.plain()]
    assert not any(gradient.any() for gradient in one.gradients(fast))


def test_twin_the_width_cannot_be_told_from_no_numbers(monkeypatch):
    view = torch.Tensor.view
    monkeypatch.setattr(torch.Tensor, "view", lambda self, *shape: view(self, *shape[:-1], -1))
    with pytest.raises(RuntimeError):
        test_no_rows_have_outputs_of_no_rows("lora")


def test_gradients_by_finite_differences():
    """Neither form against the other: LoRA's loss itself, moved a little."""
    one = case("lora", tokens=6)
    assert torch.autograd.gradcheck(
        lambda x: adapted(one.layers, x, one.parameters), (one.x,), eps=1e-6, atol=1e-6, fast_mode=True
    )


def test_what_needs_no_gradient_gets_none():
    one = case("dora")
    one.x = one.x.detach()
    outputs = one.fast()
    sum(output.sum() for output in outputs).backward()
    assert one.x.grad is None
    assert all(parameter.grad is not None for parameter in one.parameters)
    assert all(projection.weight.grad is None for projection in one.layers.projections)


def test_only_input_and_thin_products_are_kept_for_lora():
    """Numbers kept for the backward pass: x once and h of every layer, no activation of an output's size."""
    one = case("lora")
    kept = [tensor for tensor in one.fast()[0].grad_fn.saved_tensors if tensor is not None]
    assert sum(tensor.numel() for tensor in kept) == one.x.numel() + 40 * RANK * len(OUTPUTS)
    plain = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: plain.append(tensor) or tensor, lambda tensor: tensor):
        one.plain()
    assert sum(tensor.numel() for tensor in plain) > 3 * sum(tensor.numel() for tensor in kept)  # the twin


def test_dora_keeps_the_output_itself_where_there_is_no_bias():
    one = case("dora", bias=False)
    outputs = one.fast()
    kept = outputs[0].grad_fn.saved_tensors
    assert {tensor.data_ptr() for tensor in outputs} <= {tensor.data_ptr() for tensor in kept}


def masks_held(kind, *, again: bool) -> tuple[int, list[torch.Tensor]]:
    """Masks alive between forward and backward pass, and the gradients, with and without gradient checkpointing.
    again: compute the layers again in the backward pass. As in a model, the masks are drawn inside."""
    one = case(kind)
    drawn = []

    def forward(x):
        masks = tuple(torch.rand(x.shape) < 0.3 for _ in OUTPUTS)
        drawn.extend(weakref.ref(mask) for mask in masks)
        return adapted(dataclasses.replace(one.layers, dropped=masks, kept=1 / 0.7), x, one.parameters)

    torch.manual_seed(7)
    outputs = checkpoint(forward, one.x, use_reentrant=False) if again else forward(one.x)
    held = sum(mask() is not None for mask in drawn)
    return held, list(one.gradients(outputs))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradient_checkpointing_lets_go_of_dropout_masks(kind):
    held, found = masks_held(kind, again=True)
    assert held == 0
    kept, plain = masks_held(kind, again=False)
    assert kept == len(OUTPUTS)  # a mask that is held is seen
    assert all(torch.equal(one, two) for one, two in zip(found, plain, strict=True))


def test_twin_masks_that_are_kept_beside_the_saved_tensors_are_seen(monkeypatch):
    plain = dataclasses.replace
    monkeypatch.setattr(
        adapters,
        "replace",
        lambda layers, dropped: plain(layers, dropped=layers.dropped if dropped is None else dropped),
    )
    assert masks_held("lora", again=True)[0] == len(OUTPUTS)


def test_an_output_that_is_changed_in_place_is_refused_and_not_used():
    one = case("dora", bias=False)
    outputs = one.fast()
    outputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):  # autograd's own
        one.gradients(outputs)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_factored_norms_are_those_of_the_dense_sum(size):
    torch.manual_seed(0)
    weight, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((30, 50), (4, 50), (30, 4)))
    dense = torch.linalg.norm(weight + size * b @ a, dim=1)
    found = factored_norms(weight, row_squares(weight), a, b, size)
    assert float(((found - dense) / dense).abs().max()) < EXACT
    without_last = (row_squares(weight) + 2 * size * ((weight @ a.T) * b).sum(dim=1)).clamp(min=0).sqrt()
    assert size < 1 or float(((without_last - dense) / dense).abs().max()) > 0.1  # the twin


def test_norms_from_16_bit_products_are_good_to_more_digits_than_16_bits_have():
    torch.manual_seed(0)
    weight, a, b = torch.randn(64, 128), torch.randn(8, 128), torch.randn(64, 8) * 0.1
    weight = weight.bfloat16().float()
    dense = torch.linalg.norm(weight.double() + 2 * b.double() @ a.double(), dim=1)
    found = factored_norms(weight.bfloat16(), row_squares(weight), a, b, 2.0)
    rounded = torch.linalg.norm((weight + 2 * b @ a).bfloat16().float(), dim=1).bfloat16()
    error = float(((found - dense) / dense).abs().max())
    assert error < 1e-3  # a quarter of a half unit in the last place of bf16, which is 2^-9
    assert error < float(((rounded - dense) / dense).abs().max())


@pytest.mark.parametrize("around", [1.0, 0.05, 4.0])
def test_a_factor_of_16_bits_rounds_as_one_of_32_does(around):
    torch.manual_seed(0)
    [factor] = factors_of([(around * (1 + 0.01 * torch.randn(64)), torch.ones(64), torch.bfloat16)])
    tokens = (1 + torch.rand(4000, 64)).bfloat16()
    exact = tokens.double() * factor.values.double()

    def off(found):
        """Root mean square, in units of an exact product rounded once."""
        once = (exact.bfloat16().double() - exact).square().mean()
        return float(((found.double() - exact).square().mean() / once).sqrt())

    assert off(scaled(tokens, factor)) < 1.02
    assert off(tokens * factor.values.bfloat16()) > 1.1  # the twin: f itself rounded
    assert torch.equal(scaled_rows(tokens.T.contiguous(), factor), scaled(tokens, factor).T)
