"""Statistics against numpy in float64, values that are not finite, and pieces smaller than the tensor."""

import math

import numpy as np
import pytest
import torch

from surefoot.evaluate import capture_tensors as statistics
from surefoot.evaluate.capture_tensors import first_mass, relative_difference, split_first, summarize

EXACT = 1e-12  # relative; both sides add in float64


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_a_summary_is_numpys(monkeypatch, piece):
    monkeypatch.setattr(statistics, "_PIECE", piece)
    tensor = torch.randn(13, 9) * 3 + 100  # a mean far from zero, where sums of squares alone would lose the spread
    tensor[2, :4] = 0.0
    found, values = summarize(tensor), tensor.double().numpy()
    assert found.count == 117
    assert found.mean == pytest.approx(values.mean(), rel=EXACT)
    assert found.std == pytest.approx(values.std(), rel=EXACT)
    assert found.rms == pytest.approx(np.sqrt((values**2).mean()), rel=EXACT)
    assert found.abs_max == np.abs(values).max()
    assert found.zeros == pytest.approx(4 / 117)
    assert found.non_finite == 0


def test_what_is_not_finite_is_counted_and_left_out():
    found = summarize(torch.tensor([1.0, math.nan, -3.0, math.inf]))
    assert (found.non_finite, found.mean, found.abs_max) == (2, -1.0, 3.0)
    assert summarize(torch.tensor([math.nan])).rms == 0.0


def test_the_first_position_stands_apart():
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 3.0]])
    found = split_first(rows)
    assert found.first == {"norm": 5.0, "rms": math.sqrt(12.5), "abs_max": 4.0}
    assert found.rest == {"norm": 2.0, "rms": math.sqrt(10 / 4), "abs_max": 3.0}
    assert split_first(rows[:1]).rest is None


def test_relative_differences():
    old = torch.tensor([3.0, 4.0])
    assert relative_difference(torch.tensor([3.0, 9.0]), old) == 1.0
    assert relative_difference(old, old) == 0.0
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(old, torch.zeros(2)) is None
    assert relative_difference(torch.tensor([math.nan, 0.0]), old) is None


def test_attention_on_the_first_leaves_the_first_query_out():
    maps = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.1, 0.2, 0.7]]])
    assert first_mass(maps) == pytest.approx(0.3)
    assert first_mass(maps[:, :1, :1]) is None
