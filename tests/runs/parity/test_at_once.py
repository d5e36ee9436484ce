"""Everything that is planned is held against the plain model in two passes; what cannot be seen so is looked at one by
one."""

import pytest
import torch

from helpers.faults import raises_fault
from helpers.growing_records import sky_workplace
from helpers.path_runs import fast_paths, path_config, start, weights
from helpers.tiers import diagonal
from surefoot.models import forward as documents
from surefoot.models.fast import adapters as fast_adapters
from surefoot.runs.parity import fast_paths as module
from surefoot.runs.parity.passes import one_pass

ALL = {"adapter", "documents", "last_block", "loss"}
TOGETHER = 2  # passes: plain and with everything


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 16, hidden=64)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Grows by one for each forward and backward pass before step 1."""
    counted: list[int] = []
    plain = one_pass

    def count(*given):
        counted.append(1)
        return plain(*given)

    monkeypatch.setattr(module, "one_pass", count)
    return counted


def one_by_one(monkeypatch):
    """What is seen of all together says nothing."""
    monkeypatch.setattr(module._Comparison, "_together", lambda own, paths: {})
    monkeypatch.setattr(module, "_all_right", lambda records: False)


def train(workplace, output, **way):
    usual = {"batch": {"size": 8, "micro": 4}, "precision": "fp32", "data": {"packing": "on"}}
    start(path_config(workplace, output, **(usual | way)))
    return fast_paths(output), weights(output)


def test_two_passes_do_for_all_and_the_run_is_the_one_that_looked_one_by_one(workplace, tmp_path, passes, monkeypatch):
    found, weights = train(workplace, tmp_path / "run")
    assert len(passes) == TOGETHER
    assert found.keys() == ALL
    assert all(one["used"] and one["together"] for one in found.values())
    assert all(one["differs"][name] < limit for one in found.values() for name, limit in one["limits"].items())
    assert (found["documents"]["form"], found["documents"]["leak"]) == ("sdpa", 0)
    one_by_one(monkeypatch)
    alone, other = train(workplace, tmp_path / "other")
    assert len(passes) > 2 * TOGETHER
    assert alone.keys() == ALL
    assert all(one["used"] and "together" not in one for one in alone.values())
    assert weights == other


def test_twin_one_that_differs_is_found_among_all_and_the_others_stay(workplace, tmp_path, monkeypatch):
    plain = fast_adapters._up
    monkeypatch.setattr(fast_adapters, "_up", lambda *given: plain(*given) * 1.5)
    found, weights = train(workplace, tmp_path / "run")
    assert {name for name, one in found.items() if not one["used"]} == {"adapter"}
    assert not any("together" in one for one in found.values())
    assert weights == train(workplace, tmp_path / "other", kernels={"adapter": "plain"})[1]


def test_where_something_is_dropped_packed_rows_come_first_and_the_others_together(workplace, tmp_path):
    found, _ = train(workplace, tmp_path / "run", adapter={"kind": "lora", "rank": 4, "dropout": 0.1})
    assert all(one["used"] for one in found.values())
    assert {name for name, one in found.items() if "together" not in one} == {"documents"}


def test_one_path_alone_needs_no_look_at_all(workplace, tmp_path, passes):
    way = {"kernels": {"adapter": "plain", "loss": "plain", "last_block": "plain"}}
    found, _ = train(workplace, tmp_path / "run", **way)
    assert found.keys() == {"documents"}
    assert "together" not in found["documents"]
    assert len(passes) == TOGETHER


ENVIRONMENT = {
    "SF-DEVICE": torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    "SF-MEMORY": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
}


@pytest.mark.parametrize(("where", "code"), diagonal(["together", "packed rows", "packed pass", "alone"], ENVIRONMENT))
def test_no_path_is_blamed_for_a_device_that_fails_or_has_no_memory(workplace, tmp_path, monkeypatch, where, code):
    def fail(*_):
        raise ENVIRONMENT[code]

    packing, way = "packed" in where, {}
    if where != "together":
        one_by_one(monkeypatch)
    if packing:
        monkeypatch.setitem(documents.FORMS, "sdpa", fail)
        way = {"kernels": {"adapter": "plain"}}
    else:
        monkeypatch.setattr(fast_adapters, "adapted", fail)
    if where == "packed pass":
        monkeypatch.setattr(module, "leak_of", lambda *_: (0.0, ""))
    with raises_fault(code, "set-up", "cpu"):
        train(workplace, tmp_path / "run", **way)
    assert not (tmp_path / "run").exists()
