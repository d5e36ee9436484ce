"""Rates of matrix products: what is measured, and that a hopeless type does not hold up the start."""

import pytest
import torch

from surefoot.planning.probes import matmul
from surefoot.planning.probes.matmul import product_rates, tf32_rate, thread_counts, thread_rates
from surefoot.planning.probes.timing import copy_rate

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


LAUNCH_BOUND = {"fp32": 2.9e11, "bf16": 3.2e11}  # 16 rows on an H200, whose bf16 is sixteen times as fast as its fp32


def test_a_gpu_multiplies_the_full_shape_in_every_type(recorded):
    tried = recorded(LAUNCH_BOUND)
    product_rates([(4096, 14336)], torch.device("cuda"), dtypes=("fp32", "bf16"))
    assert tried == [(4096, (4096, 14336), "fp32"), (4096, (4096, 14336), "bf16")]


def test_twin_a_cpu_with_such_rates_does_not(recorded):
    tried = recorded({dtype: rate / 100 for dtype, rate in LAUNCH_BOUND.items()})
    product_rates([(4096, 14336)], CPU, dtypes=("fp32", "bf16"))
    assert {rows for rows, _, _ in tried} == {16}


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


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_counts(cores, counts):
    assert thread_counts(cores) == counts


def test_every_count_is_timed_with_that_many_threads_and_the_setting_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(matmul.F, "linear", lambda x, weight: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    rates = thread_rates((64, 64), (1, 2), budget=0.01)
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == before
    assert set(rates) == {1, 2}
    assert all(rate > 0 for rate in rates.values())


def test_the_setting_is_put_back_after_an_error(monkeypatch):
    def fail(x, weight):
        raise RuntimeError("no")

    monkeypatch.setattr(matmul.F, "linear", fail)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no"):
        thread_rates((64, 64), (1, 3))
    assert torch.get_num_threads() == before


def test_copying_has_a_rate():
    assert copy_rate(torch.device("cpu"), budget=0.01) > 1e7


def test_there_is_no_tf32_on_a_cpu():
    assert tf32_rate([(64, 64)], torch.device("cpu")) is None
