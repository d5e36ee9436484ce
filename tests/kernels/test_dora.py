"""A row's factor moves its outputs by what it says, also where that is less than 16 bits can tell apart."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.dora import CYCLE, factors_of, scale_on_average_, scaled

OUTPUTS, TOKENS = 200, 8 * CYCLE + 3
# A share of the change. Outputs of one size share their first digits, so what a step to the next number adds differs by
# a fifth from row to row, and CYCLE tokens can be divided no finer; over rows it is within a twentieth.
IN_THE_MEAN = 0.06
OF_A_ROW = 0.3
CHANGES = [2e-4, -2e-4, 1e-3, -3e-3, 5e-3, 0.01, -0.2]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def outputs(request):
    draws = torch.Generator().manual_seed(0)
    sizes = torch.exp(3 * torch.rand(OUTPUTS, generator=draws))
    return (torch.randn(TOKENS, OUTPUTS, generator=draws) * sizes).to(request.param)


def factor(outputs, change):
    [found] = factors_of([(torch.full((OUTPUTS,), 1 + change), torch.ones(OUTPUTS), outputs.dtype)])
    return found


def on_average(outputs, change):
    return scale_on_average_(outputs.clone(), change)


def gained(outputs, found):
    """By row, the change of its outputs, by least squares."""
    wide = outputs.double()
    return (found.double() * wide).sum(dim=0) / wide.square().sum(dim=0) - 1


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_move_by_the_factor_in_the_mean(outputs, change):
    found = gained(outputs, on_average(outputs, factor(outputs, change))) / change
    assert found.mean().item() == pytest.approx(1, abs=IN_THE_MEAN)
    assert found.std().item() <= OF_A_ROW


def test_twin_the_nearest_number_loses_a_small_change():
    draws = torch.Generator().manual_seed(0)
    outputs = torch.randn(TOKENS, OUTPUTS, generator=draws).bfloat16()
    small = factor(outputs, 1e-3)
    assert torch.equal(scaled(outputs, small), outputs)
    assert not torch.equal(on_average(outputs, small), outputs)


def test_no_output_moves_further_than_to_the_next_number(outputs):
    found = on_average(outputs, factor(outputs, 4e-4))
    bits, before = found.view(torch.int16).int(), outputs.view(torch.int16).int()
    assert int((bits - before).abs().max()) == 1


def test_the_same_tokens_get_the_same_numbers_and_one_is_a_factor_of_1(outputs):
    change = factor(outputs, 2e-3)
    assert torch.equal(on_average(outputs, change), on_average(outputs.clone(), change))
    assert torch.equal(on_average(outputs[None], change)[0], on_average(outputs, change))
    assert torch.equal(on_average(outputs[:7], change), on_average(outputs, change)[:7])
    assert torch.equal(on_average(outputs, factor(outputs, 0.0)), outputs)


def test_far_from_one_the_product_is_rounded_once(outputs):
    found = on_average(outputs, factor(outputs, 1.234))
    assert torch.equal(found, (outputs.double() * float(torch.tensor(2.234))).to(outputs.dtype))


def test_32_bits_need_no_pattern():
    outputs = torch.randn(5, OUTPUTS)
    assert factor(outputs, 1e-3).rare is None
    torch.testing.assert_close(on_average(outputs, factor(outputs, 1e-3)), outputs * torch.tensor(1.001))


def rows(width: int, dtype: torch.dtype, change: float, wide: torch.dtype = torch.float32):
    norm = 1 + torch.rand(width, dtype=wide)
    return norm * (1 + change * torch.rand(width, dtype=wide)), norm, dtype


def numbers_of(found) -> list[torch.Tensor]:
    rare = () if found.rare is None else (found.rare.share, found.rare.then, found.rare.else_)
    return [one for one in (found.values, found.fine, found.magnitude, found.norm, *rare) if one is not None]


MIXED = [(5, torch.bfloat16, 0.01), (8, torch.float32, 0.3), (3, torch.bfloat16, 3.0), (7, torch.bfloat16, -1.0)]


def test_layers_together_have_the_factors_that_each_has_alone():
    torch.manual_seed(1)
    layers = [rows(*one) for one in MIXED] + [rows(4, torch.float64, 0.1, torch.float64)]
    layers[3][0][2] = 0.0  # a magnitude of nothing, by which no product can be divided
    for together, layer in zip(factors_of(layers), layers, strict=True):
        [alone] = factors_of([layer])
        assert (together.invertible, together.fine is None) == (alone.invertible, alone.fine is None)
        for one, other in zip(numbers_of(together), numbers_of(alone), strict=True):
            assert torch.equal(one, other)


def test_each_layer_has_its_own_checks():
    torch.manual_seed(1)
    layers = [rows(*one) for one in MIXED]
    layers[0][0][4] = 0.0
    layers[1][0][0] = float("nan")
    found = factors_of(layers)
    assert [one.invertible for one in found] == [False, False, True, True]
    assert [one.fine is not None for one in found] == [False, False, False, False]
    assert [one.rare is not None for one in factors_of([rows(*MIXED[0]), rows(*MIXED[1])])] == [True, False]
