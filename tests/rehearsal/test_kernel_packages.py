"""A package with an attention kernel, installed beside torch: tried by the probes in a process of its own, taken only
if it is right. Which is faster says nothing here, so the plan is told which form is usual."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import stand_in_kernels
from helpers.tiers import representatives
from rehearsal.runs import BF16, ON_THE_PRETEND_GPU, STEPS, config_of, make_world, train
from surefoot.planning import packing

pytestmark = ON_THE_PRETEND_GPU
FORM = "flash_attn_3"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("packages"))


def with_package(world: Path, kind: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[float]]:
    """(plan.json, losses) of a packed run where such a package is installed; in children too."""
    folder = stand_in_kernels.install(FORM, world / f"package-{kind.replace(' ', '-')}", kind)
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # packages of one version are one to the cache
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
