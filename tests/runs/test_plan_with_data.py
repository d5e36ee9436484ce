"""`surefoot plan` shows the plan that `surefoot train` goes by, and how lengths of examples are counted for it."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.growing_records import write_sky
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.loader import Layout
from surefoot.planning.plan import plan_to_json
from surefoot.planning.precision import NARROW
from surefoot.report.console import Console
from surefoot.runs import make_plan as planning
from surefoot.runs import plan_with_data as with_data
from surefoot.runs.custom import NOTHING
from surefoot.runs.make_plan import make_plan
from surefoot.runs.plan_with_data import plan_with_data, step_tokens
from surefoot.runs.prepare import prepare
from surefoot.runs.run import train_run
from surefoot.runs.run_folder import inspect_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a model that is wide enough to be measured, on examples of many lengths."""
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 60)
    tiny_llama(folder / "base", hidden=NARROW)
    return run_config(
        model=str(folder / "base"),
        data={"train": str(folder / "rows.json"), "max_length": 64},
        adapter={"kind": "lora", "rank": 4},
        batch={"size": 16},
        duration="2 steps",
        output=str(folder / "run"),
    )


def test_what_is_shown_is_what_a_run_goes_by(config):
    found = inspect_folder(config, "new")
    run = prepare(config, found, Console(io.StringIO()), NOTHING)
    shown, unread = plan_with_data(config)
    assert unread is None
    assert plan_to_json(shown) == plan_to_json(run.plan)
    assert shown.measurements is not None
    assert shown.measurements["documents"]  # lengths were looked at: documents were timed
    # Twin: a plan that knows no lengths is another one.
    blind = make_plan(config)
    assert plan_to_json(blind) != plan_to_json(run.plan)


def test_a_run_resolves_its_plan_once(config, tmp_path, monkeypatch):
    """And a draft before it reads the data, whose conflicts it refuses; the draft knows no lengths of examples."""

    def resolved(output):
        known = []
        with monkeypatch.context() as counting:
            original = planning.resolve
            counting.setattr(
                planning, "resolve", lambda *args, **kw: known.append(kw["lengths"]) or original(*args, **kw)
            )
            here = config.model_copy(update={"output": str(output)})
            assert train_run(here, "new", Console(io.StringIO())) == 0
        return ["draft" if lengths is None else "plan" for lengths in known]

    assert resolved(tmp_path / "once") == ["draft", "plan"]
    # Twin: whoever asks for the plan twice is seen.
    once = with_data.make_plan
    monkeypatch.setattr(with_data, "make_plan", lambda *args, **kw: (once(*args, **kw), once(*args, **kw))[1])
    assert resolved(tmp_path / "twice") == ["draft", "plan", "plan"]


def test_data_that_cannot_be_read_are_told_and_do_not_keep_the_plan(config, tmp_path):
    away = config.model_copy(update={"data": config.data.model_copy(update={"train": (_elsewhere(config, tmp_path),)})})
    shown, unread = plan_with_data(away)
    assert "absent.json" in str(unread)
    assert plan_to_json(shown) == plan_to_json(make_plan(away))


def _elsewhere(config, folder):
    return config.data.train[0].model_copy(update={"path": str(folder / "absent.json")})


class Examples:
    """Just what is counted: pairs that begin with the same `prompt` tokens."""

    def __init__(self, lengths, prompt: int = 0):
        self.lengths, self.prompt = np.array(lengths), prompt

    def __getitem__(self, place):
        ids = np.arange(self.lengths[place])
        ids[self.prompt :] += 1000 * (place % 2)
        return SimpleNamespace(ids=ids)


def test_the_share_of_padding():
    real, padded, shared = step_tokens(Examples([50] * 100), 1, 16, Layout(0, tokens=400))
    assert padded == real == shared
    mixed = Examples([10, 20] * 50)
    (real, whole, _), (_, less, _) = (step_tokens(mixed, 1, 16, Layout(0, tokens=room)) for room in (10_000, 60))
    assert 1 - real / whole == pytest.approx(0.25, abs=0.05)  # all beside the longest: a quarter
    assert less - real < (whole - real) / 2  # micro-batches of neighbors waste less


def test_pairs_are_two_rows_whose_beginning_counts_once():
    pairs = Examples([30, 20] * 8, prompt=16)
    steps = 64
    assert step_tokens(pairs, 2, 4, Layout(0, most=2)) == (steps * 4 * 50, steps * 4 * 60, steps * 4 * (16 + 2 * 14))
    _, padded, shared = step_tokens(Examples([30, 20] * 8, prompt=2), 2, 4, Layout(0, most=2))
    assert shared == padded  # too little to be worth a second pass
