"""Rates of matrix products: what is measured, and that a hopeless type does not hold up the start."""

import pytest
import torch

from surefoot.planning.probes import matmul
from surefoot.planning.probes.matmul import product_rates

CPU = torch.device("cpu")


@pytest.fixture
def recorded(monkeypatch):
    """Replace the clockwork: rows and shapes that were tried, and a rate that the test chooses."""
    tried = []

    def install(rate):
        def rates(rows, shape, device, dtypes, budget, rounds):
            tried.extend((rows, shape, dtype) for dtype in dtypes)
            return {dtype: rate[dtype] for dtype in dtypes}

        monkeypatch.setattr(matmul, "_rates", rates)
        return tried

    return install


def test_every_type_gets_a_positive_rate():
    rates = product_rates([(64, 96)], CPU, dtypes=("fp32", "bf16", "fp16"), budget=0.02)
    assert set(rates) == {"fp32", "bf16", "fp16"}
    assert all(rate > 0 for rate in rates.values())


def test_a_type_that_would_take_too_long_never_sees_the_full_shape(recorded):
    tried = recorded({"fp32": 1e11, "bf16": 2e8})
    product_rates([(1024, 2048)], CPU, dtypes=("fp32", "bf16"))
    assert [(rows, dtype) for rows, _, dtype in tried] == [(16, "fp32"), (16, "bf16"), (512, "fp32")]


def test_one_that_is_merely_slower_does(recorded):
    tried = recorded({"fp32": 1e11, "bf16": 2e10})
    product_rates([(1024, 2048)], CPU, dtypes=("fp32", "bf16"))
    assert (512, (1024, 2048), "bf16") in tried


def test_the_largest_shape_is_sliced_to_what_shows_the_rate(recorded):
    tried = recorded({"fp32": 1e12})
    product_rates([(64, 64), (4096, 14336)], CPU, dtypes=("fp32",))
    (_, small, _), (_, full, _) = tried
    assert small[0] * small[1] <= 2**18
    assert 2**20 < full[0] * full[1] <= 2**21


def test_thread_count_and_random_state_are_left_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    product_rates([(64, 64)], CPU, dtypes=("fp32",), budget=0.01)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_thread_count_comes_back_after_an_error(monkeypatch):
    def explode(*args, **kwargs):
        raise MemoryError

    threads = torch.get_num_threads()
    monkeypatch.setattr(matmul, "_rates", explode)
    with pytest.raises(MemoryError):
        product_rates([(64, 64)], CPU, dtypes=("fp32",))
    assert torch.get_num_threads() == threads
