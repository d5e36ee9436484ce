"""Bad and hostile inputs: the right exit code, one line with code and place, nothing written, run or left outside."""

import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from jinja2 import Environment
from safetensors.torch import load_file

from faults import data_cases, hostile_cases, model_cases, run_cases
from faults.model_cases import Payload, from_under_an_adapter, fused
from faults.place import ROWS, Case, Place
from faults.run_cases import raising
from helpers.tiers import representatives
from surefoot.data.chat import sandbox
from surefoot.data.sources.records import read_rows
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.system.errors import InputError
from surefoot.training.checkpoint import list_checkpoints

CASES = [*data_cases.CASES, *model_cases.CASES, *run_cases.CASES, *hostile_cases.CASES]
MOST = 700  # characters of an output that a failing test shows


def check(case: Case, place: Place, result: Result, before: dict[str, str]) -> None:
    seen = result.stderr[-MOST:] or result.stdout[-MOST:]
    assert result.exit_code == case.exit, seen
    assert "Traceback" not in result.output, seen
    errors = re.findall(r"^(?:\S.*: )?error: .*$", result.stderr, re.MULTILINE)
    assert len(errors) == (case.faults if case.exit not in (0, 75) else 0), seen
    assert all(shown in result.output for shown in case.shows), seen
    if errors:
        first = errors[0].removeprefix("error: ").replace(": error: ", ": ")  # of a line in a file, or of anything else
        for folder in (place.folder, place.base.parent):
            first = first.replace(f"{folder}/", "").replace(f"{folder}:", ".:")
        assert re.match(rf"{re.escape(case.where)}(?![\w:]\d|\w)", first), seen
        assert first.endswith(f" [{case.code}]" if case.code else "."), seen
    if not case.writes:
        assert place.snapshot() == before
    assert left(place) == []


def left(place: Place) -> list[Path]:
    """What ran or escaped. Above the folder only what lies beside it: the folders of all other tests are there too."""
    seen = [*place.folder.parent.iterdir(), *place.folder.rglob("*")]
    return [path for path in seen if path.name in ("marker", "escaped", "escaped.json")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Case, place: Place, forked_python: str) -> None:
    for limit in ("STEPS", "ITEMS"):
        place.patch.setattr(sandbox, limit, 50_000)  # a template without end is stopped sooner
    place.patch.setattr(sys, "executable", forked_python)  # of the child that opens pickles
    words = case.prepare(place) or ["train", place.config()]
    before = place.snapshot()
    check(case, place, place.call(*words), before)


def test_the_tables_are_long_and_name_every_case_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 280


@pytest.mark.parametrize("other", [{"code": "SF-DATA-ROW"}, {"where": "train.json"}, {"exit": 3}, {"faults": 2}])
def test_twin_another_code_place_or_number_is_noticed(place: Place, other: dict[str, object]) -> None:
    case = next(case for case in CASES if case.name == "empty file")
    case.prepare(place)
    config = place.config()
    before, result = place.snapshot(), place.call("train", config)
    check(case, place, result, before)
    with pytest.raises(AssertionError):
        check(Case(**(vars(case) | other)), place, result, before)


def test_twin_what_is_written_or_runs_is_noticed(place: Place) -> None:
    case = next(case for case in CASES if case.name == "empty file")
    case.prepare(place)
    before = place.snapshot()
    with pytest.raises(AssertionError):
        check(case, place, place.call("train", place.config()), before)  # run.yaml is new
    pickle.loads(pickle.dumps(Payload(place.folder / "marker")))  # opened by a plain library it does run
    assert left(place) == [place.folder / "marker"]
    assert "os" in Environment().from_string("{{ lipsum.__globals__['os'] }}").render()


def test_the_last_line_cut_at_every_byte_is_named(place: Place) -> None:
    """All of it gone, or its end of line alone, is a whole file of one record less, or of as many."""
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in [*ROWS[:1], {**ROWS[1], "output": "ä 😀"}]]
    path = place.text("train.jsonl", b"")
    place.change(data={"train": str(path)})
    for cut in range(1, len(lines[1])):
        path.write_bytes(lines[0] + b"\n" + lines[1][:cut])
        (source,) = open_sources(SourceSpec(str(path)))
        with pytest.raises(InputError) as refused:
            list(read_rows(source))
        assert "train.jsonl:2" in refused.value.faults[0].where, cut
    assert place.call("train", place.config()).exit_code == 2
    assert not (place.folder / "out").exists()


@pytest.mark.parametrize("change", representatives([fused, from_under_an_adapter], fused))
def test_a_base_in_another_layout_trains_to_the_same_bits(place: Place, change) -> None:
    place.weights(change)
    result = place.call("train", place.config())
    assert result.exit_code == 0, result.output
    found, expected = (load_file(run / "adapter_model.safetensors") for run in (place.folder / "out", place.run))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_device_that_fails_saves_nothing_of_its_step(place: Place) -> None:
    run = place.own_run()
    raising(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), step=9)(place)
    result = place.call("train", place.config(), "--resume", "duration=12 steps")
    assert result.exit_code == 3
    assert max(checkpoint.step for checkpoint in list_checkpoints(run)) == 8
    place.patch.undo()
    assert place.call("train", place.config(), "--resume", "duration=12 steps").exit_code == 0
    assert max(checkpoint.step for checkpoint in list_checkpoints(run)) == 12
