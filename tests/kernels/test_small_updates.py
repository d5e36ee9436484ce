"""In 16 bits an adapter's first updates move an output by less than half its last digit. In the mean over tokens they
arrive."""

import pytest
import torch

from surefoot.kernels.adapters import Layers, Projection, adapted
from surefoot.kernels.dora import factored_norms, factors_of, row_squares

TOKENS, INPUTS, OUTPUTS, RANK, SCALE = 2048, 512, 512, 16, 2.0
RATE = 2e-4  # what Adam's first step moves each number of B by
ARRIVES = 0.03  # of 1; what rounding leaves to chance is some 0.003, by the number of outputs


@pytest.fixture
def numbers():
    """x, W, A and B after one update, as of a model at its start. On a CPU: cuBLAS rounds a product before it adds to
    it, so that 0.44 of an update arrives on an H200, in PEFT's order of operators too."""
    draws = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TOKENS, INPUTS, generator=draws), 0.05 * torch.randn(OUTPUTS, INPUTS, generator=draws)
    a = (2 * torch.rand(RANK, INPUTS, generator=draws) - 1) / INPUTS**0.5
    b = RATE * torch.randn(OUTPUTS, RANK, generator=draws).sign()
    return [one.bfloat16() for one in (x, weight, a, b)]


def outputs(kind: str, x, weight, a, b):
    """Of a layer whose magnitudes are its norms: f = 1."""
    factor = None
    if kind == "dora":
        norm = factored_norms(weight, row_squares(weight), a.float(), b.float(), SCALE)
        [factor] = factors_of([(norm, norm, x.dtype)])
    layer = Projection(weight, None, b, SCALE, SCALE * b, factor)
    parameters = [a, b] if factor is None else [a, b, factor.magnitude]
    return adapted(Layers((layer,), (a,), a), x, parameters)[0]


def arrived(found, before, x, a, b) -> float:
    """The share of what the update adds that the outputs show, by least squares."""
    added = SCALE * (x @ a.T).double() @ b.double().T
    return float(((found.double() - before.double()) * added).sum() / added.square().sum())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_update_smaller_than_the_last_digit_arrives_in_the_mean(kind, numbers):
    x, weight, a, b = numbers
    found, before = outputs(kind, x, weight, a, b), outputs(kind, x, weight, a, torch.zeros_like(b))
    assert arrived(found, before, x, a, b) == pytest.approx(1, abs=ARRIVES)


def test_twin_added_to_a_rounded_output_half_of_it_is_lost(numbers):
    x, weight, a, b = numbers
    before = x @ weight.T
    assert arrived(before + (x @ a.T) @ (SCALE * b).T, before, x, a, b) < 0.7
