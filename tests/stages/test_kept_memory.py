"""On a CPU a run holds as much freed memory as its plan has room for, and no more."""

from pathlib import Path

import pytest

from layouts import run_config
from surefoot import process
from surefoot.allocator import is_glibc
from surefoot.stages.planned import make_plan
from surefoot.stages.setup import planned_tokenizer, set_up
from tiny import tiny_llama


def limit(base):
    config = run_config(model=str(base), data={"train": "unused.jsonl", "max_length": 64})
    plan = make_plan(config)
    settings = set_up(config, plan, Path(base), planned_tokenizer(Path(base), plan.tokenizer), None).settings
    kept = getattr(settings.after_step, "__self__", None)
    return None if kept is None else kept.limit - plan.memory.total


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("left_alone", [False, True], ids=["kept", "twin: the user sets the allocator"])
def test_the_plan_is_the_limit(tmp_path, monkeypatch, left_alone):
    monkeypatch.setattr(process, "settle_allocator", lambda kind: "" if left_alone else "freed memory is kept")
    found = limit(tiny_llama(tmp_path / "base"))
    assert found is None if left_alone else found == 0
