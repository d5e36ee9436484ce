"""What the screen says before step 1."""

import io
import json
import re

import pytest

from helpers.faults import gives
from helpers.model_layouts import run_config
from helpers.seeing import seeing
from helpers.tiny_models import tiny_llama
from surefoot.data.audit import Sample
from surefoot.report.console import Console
from surefoot.runs import summary
from surefoot.runs.custom import NOTHING
from surefoot.runs.prepare import prepare
from surefoot.runs.run_folder import inspect_folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    tiny_llama(folder / "base", pad=True)
    return folder


def example(folder, stage, rows, max_length=64):
    """The answer that the line `example` has between its marks, with what stands before it."""
    (folder / "rows.json").write_text(json.dumps(rows))
    data = {"train": str(folder / "rows.json"), "max_length": max_length}
    config = run_config(stage=stage, model=str(folder / "base"), data=data, output=str(folder / "run"), adapter=None)
    screen = io.StringIO()
    prepare(config, inspect_folder(config, "new"), Console(screen), NOTHING)
    (line,) = re.findall(r"example +(.*?)\n\S", screen.getvalue(), re.DOTALL)
    return " ".join(line.split())


def pairs(rejected):
    return [{"prompt": f"Say {n}.", "chosen": "sky " * 6, "rejected": rejected} for n in range(3)]


def judged(*labels):
    return [
        {"prompt": f"Say {n}.", "completion": "sky " * (6 if label else 1), "label": label}
        for n, label in enumerate(labels)
    ]


def test_the_example_is_one_that_is_learned_as_good(workplace, monkeypatch):
    """Though the shortest sample is the worse answer of a pair, or an answer that is to become less likely."""
    assert "sky sky" in example(workplace, "dpo", pairs("no"))
    assert "sky sky" in example(workplace, "kto", judged(True, False, False, True, False))
    monkeypatch.setattr(Sample, "learned_as_good", True)  # twin
    assert "sky sky" not in example(workplace, "dpo", pairs("no"))


def test_where_no_sample_is_good_its_verdict_is_said(workplace):
    shown = example(workplace, "kto", judged(False, True, False, True, False))  # the first, the middle and the last
    assert "(bad)" in shown
    assert "sky sky" not in shown


def test_a_long_dialogue_is_shortened(workplace, monkeypatch):
    turns = [{"role": role, "content": f"word {n}"} for n in range(16) for role in ("user", "assistant")]
    rows = [{"messages": turns}] * 3
    shown = example(workplace, "sft", rows, 512)
    assert gives(shown, "0")
    assert gives(shown, "15")
    assert not gives(shown, "8")
    assert len(shown) < 1200
    monkeypatch.setattr(summary, "_EXAMPLE", 10_000)  # twin
    assert gives(example(workplace, "sft", rows, 512), "8")


def trains(base, folder, **asked):
    """The line `trains`, for a run of stage dpo that trains all weights."""
    (folder / "rows.json").write_text(json.dumps(pairs("no")))
    data = {"train": str(folder / "rows.json"), "max_length": 64}
    config = run_config(stage="dpo", model=str(base), data=data, output=str(folder / "run"), adapter=None, **asked)
    screen = io.StringIO()
    prepare(config, inspect_folder(config, "new"), Console(screen), NOTHING)
    (line,) = re.findall(r"trains +(.*?)\n\S", screen.getvalue(), re.DOTALL)
    return line


@pytest.mark.parametrize("parts", [(), ("projector",), ("tower", "projector")])
def test_what_trains_of_a_model_that_sees_is_said(tmp_path, parts):
    line = trains(seeing("qwen2_5_vl", tmp_path / "base"), tmp_path, vision=dict.fromkeys(parts, "trained"))
    assert tuple(part for part in ("tower", "projector") if gives(line, part)) == parts
    assert gives(line, "language")


def test_twin_of_a_text_model_no_part_is_named(workplace):
    assert not gives(trains(workplace / "base", workplace), "language")
