import pytest
import torch

from surefoot.planning.probes import threads
from surefoot.planning.probes.copy import copy_rate
from surefoot.planning.probes.matmul import tf32_rate
from surefoot.planning.probes.threads import thread_counts, thread_rates


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_counts(cores, counts):
    assert thread_counts(cores) == counts


def test_every_count_is_timed_with_that_many_threads_and_the_setting_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(threads.F, "linear", lambda x, weight: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    rates = thread_rates((64, 64), (1, 2), budget=0.01)
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == before
    assert set(rates) == {1, 2}
    assert all(rate > 0 for rate in rates.values())


def test_the_setting_is_put_back_after_an_error(monkeypatch):
    def fail(x, weight):
        raise RuntimeError("no")

    monkeypatch.setattr(threads.F, "linear", fail)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no"):
        thread_rates((64, 64), (1, 3))
    assert torch.get_num_threads() == before


def test_copying_has_a_rate():
    assert copy_rate(torch.device("cpu"), budget=0.01) > 1e7


def test_there_is_no_tf32_on_a_cpu():
    assert tf32_rate([(64, 64)], torch.device("cpu")) is None
