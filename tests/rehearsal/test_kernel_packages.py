"""Packages with kernels, installed beside torch: tried by the probes in a process of their own, taken only if they are
right. Which is faster says nothing here, so the plan is told which form is usual, or that no gain is asked for."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import stand_in_kernels
from helpers.path_runs import fast_paths as fast_paths_of
from helpers.tiers import representatives
from rehearsal.runs import BF16, ON_THE_PRETEND_GPU, STEPS, Died, config_of, dying, make_world, train
from surefoot.planning import fast_paths, packing
from surefoot.system.errors import InputError, SurefootError

pytestmark = ON_THE_PRETEND_GPU
FORM = "flash_attn_3"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("packages"))


def put_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Into this process and those that it starts."""
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # packages of one version are one to the cache


def with_package(world: Path, kind: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[float]]:
    """(plan.json, losses) of a packed run where such a package is installed; in children too."""
    put_in(stand_in_kernels.install(FORM, world / f"package-{kind.replace(' ', '-')}", kind), patch)
    patch.setattr(packing, "_usual", lambda forms, compute: FORM)
    patch.setattr(packing, "_CLEAR", float("inf"))
    config = config_of(world, f"run-{kind.replace(' ', '-')}", of_data={"packing": "on"}, **BF16)
    rows = train(config)
    return json.loads((Path(config["output"]) / "plan.json").read_text()), [row["loss"] for row in rows]


@pytest.mark.parametrize("kind", representatives(stand_in_kernels.KINDS, "wrong"))
def test_a_package_is_taken_only_if_it_is_right(world, monkeypatch, kind):
    found, losses = with_package(world, kind, monkeypatch)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    trials = {trial["form"]: trial for trial in found["plan"]["measurements"]["documents"]}
    form = found["plan"]["kernels"]["documents"]
    assert len(losses) == STEPS
    assert trials["varlen"]["failure"] == ""
    if kind == "right":
        assert (trials[FORM]["failure"], form["value"]) == ("", FORM)
    else:
        assert trials[FORM]["failure"]
        assert form["value"] == "varlen"
        assert f"{FORM}: {trials[FORM]['failure']}" in form["reason"]


def forget_liger() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


FUSED = ("pointwise", "rotary", "gated")  # keys of `kernels:`
PARTS = dict(zip(("norm", "rotary", "gated"), FUSED, strict=True))  # of the probe


@pytest.mark.parametrize("kind", representatives(stand_in_kernels.LIGER_KINDS, "gated wrong"))
def test_of_ligers_kernels_those_are_taken_that_are_right(world, monkeypatch, kind):
    forget_liger()
    name = f"liger-{kind.replace(' ', '-')}"
    put_in(stand_in_kernels.install_liger(world / name, kind), monkeypatch)
    monkeypatch.setattr(fast_paths, "_CLEAR", 0.0)
    config = config_of(world, f"{name}-run", adapter=None, **BF16)
    assert len(train(config)) == STEPS
    run = Path(config["output"])
    found = json.loads((run / "plan.json").read_text())["plan"]
    trials = {PARTS[trial["part"]]: trial for trial in found["measurements"]["pointwise"]}
    assert trials.keys() == set(FUSED)
    wrong = stand_in_kernels.LIGER_KINDS[kind]
    for key in FUSED:
        choice, record = found["kernels"][key], fast_paths_of(run).get(key)
        if wrong and key == wrong[0]:
            assert trials[key]["failure"]
            assert trials[key]["failure"] in choice["reason"]
            assert (choice["value"], record) == ("plain", None)
        else:
            assert (trials[key]["failure"], choice["value"]) == ("", "fused")
            assert (record["used"], record["form"]) == (True, "liger")
    asked = config_of(world, f"{name}-asked", kernels=dict.fromkeys(FUSED, "fused"), **BF16)
    if wrong is None:
        assert len(train(asked)) == STEPS
    else:
        with pytest.raises(InputError) as refused:
            train(asked)
        assert [one.where for one in refused.value.faults] == [f"kernels.{wrong[0]}"]


@pytest.mark.slow
def test_a_run_with_ligers_norms_does_not_go_on_without(world, monkeypatch):
    forget_liger()
    config = config_of(world, "liger-gone", kernels={"pointwise": "fused"}, checkpoint={"every": "1 steps"}, **BF16)
    with monkeypatch.context() as patch:
        put_in(stand_in_kernels.install_liger(world / "liger-here", "right"), patch)
        dying(patch, after=2)
        with pytest.raises(Died):
            train(config)
    forget_liger()
    with pytest.raises(SurefootError) as refused:
        train(config, resume=True)
    assert [one.where for one in refused.value.faults] == ["kernels.pointwise"]
