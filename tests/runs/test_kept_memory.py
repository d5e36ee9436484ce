"""On a CPU a run holds as much freed memory as its plan has room for, and no more."""

from pathlib import Path

import pytest

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.runs import load_models as loading
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan
from surefoot.system import process
from surefoot.system.allocator import is_glibc


def kept_of(base, **settings):
    config = run_config(model=str(base), data={"train": "unused.jsonl", "max_length": 64}, **settings)
    plan = make_plan(config)
    done = load_models(config, plan, Path(base), None)
    return getattr(done.settings.after_step, "__self__", None), plan.memory, done.model


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("left_alone", [False, True], ids=["kept", "twin: the user sets the allocator"])
def test_the_plan_is_the_limit(tmp_path, monkeypatch, left_alone):
    monkeypatch.setattr(process, "settle_allocator", lambda kind: "" if left_alone else "freed memory is kept")
    kept, planned, _ = kept_of(tiny_llama(tmp_path / "base"), precision={"compute": "bf16"}, adapter={"kind": "lora"})
    assert kept is None if left_alone else kept.limit == planned.total


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("told", [True, False], ids=["told", "twin: not told"])
def test_weights_that_stay_in_their_file_are_no_room_for_freed_memory(tmp_path, monkeypatch, told):
    """The plan counts them and the pages of files are not counted: fp32 on the disk, frozen, and fp32 in the run."""
    monkeypatch.setattr(process, "settle_allocator", lambda kind: "freed memory is kept")
    if not told:
        monkeypatch.setattr(loading, "mapped_bytes", lambda blocks: 0)
    kept, planned, model = kept_of(
        tiny_llama(tmp_path / "base"), precision={"compute": "fp32"}, adapter={"kind": "lora"}
    )
    frozen = sum(one.numel() * one.element_size() for one in model.parameters() if not one.requires_grad)
    assert (planned.total - kept.limit == frozen) == told
