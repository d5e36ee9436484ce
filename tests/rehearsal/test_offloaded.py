"""An optimizer in host memory beside one on the device, on the pretend GPU: copies arrive as late as they may, and both
compute with the CPU's kernels, so that the bits are the same."""

import gc
from pathlib import Path

import pytest

from helpers.tiers import representatives
from rehearsal.runs import OFFLOADED, ON_THE_PRETEND_GPU, config_of, make_world, train
from surefoot.system.errors import Diverged
from surefoot.training.engine import offloaded
from training.engine.test_offloaded import EVERYTHING, same

pytestmark = ON_THE_PRETEND_GPU


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("offloaded"))


def run(world: Path, name: str, **changes: object) -> Path:
    config = config_of(world, name, **{"adapter": None, "seed": 5} | changes)
    train(config)
    return Path(config["output"])


@pytest.mark.parametrize("case", representatives(EVERYTHING, "bf16"))
def test_it_takes_the_same_steps(world, case):
    if case == "qat":
        pytest.importorskip("torchao")
    assert same(run(world, f"{case} plain", **EVERYTHING[case]), run(world, case, **EVERYTHING[case], **OFFLOADED))


@pytest.mark.parametrize("released", representatives([True, False], True))
def test_a_run_that_is_over_keeps_nothing_on_the_device(world, monkeypatch, released):
    """torch holds the hooks of parameters where Python's garbage collector does not see them."""
    from pretend_cuda import device

    if not released:
        monkeypatch.setattr(offloaded.OffloadedEngine, "release", lambda self: None)
    gc.collect()
    before = device().memory()["held"]
    run(world, f"over {released}", **EVERYTHING["bf16"], **OFFLOADED)
    gc.collect()
    assert (device().memory()["held"] <= before) is released


def test_a_gradient_that_is_read_too_early_is_found(world, monkeypatch):
    real = offloaded.OffloadedEngine._add
    monkeypatch.setattr(offloaded.OffloadedEngine, "_add", lambda self, name, one, *rest: real(self, name, one))
    with pytest.raises(Diverged):  # memory that no copy has reached yet holds NaN
        run(world, "early", **EVERYTHING["bf16"], **OFFLOADED)
