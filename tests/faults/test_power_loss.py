"""Power fails at a random moment, and of what was not flushed anything may be gone: nothing wrong is ever loaded."""

import json
from functools import partial

import pytest
import yaml

from faults.outages import IN_IT, fail_everywhere, fail_once, run_outage, start_of_publication, toy_outage
from faults.power import Node, Recording, disk_after, lose_power
from faults.soak import short_and_soak
from faults.trials import many
from helpers.tiny_models import tiny_llama
from surefoot.system import disk, durable

SHORT = 50  # trials of each of two outages


def write_config(folder, output):
    """Of a run of six steps."""
    base = tiny_llama(folder / "base")
    rows = [{"instruction": f"Say sky {k} times.", "output": " ".join(["sky"] * k)} for k in range(1, 9)]
    (folder / "train.json").write_text(json.dumps(rows))
    config = {
        "stage": "sft",
        "model": str(base),
        "data": {"train": str(folder / "train.json"), "eval": 2, "max_length": 64, "template": "plain"},
        "adapter": {"kind": "lora", "rank": 2},
        "precision": "fp32",
        "batch": {"size": 2, "micro": 2},
        "optim": {"lr": 1e-2},
        "duration": "6 steps",
        "eval_every": "3 steps",
        "checkpoint": {"every": "2 steps", "keep": 2},
        "output": str(output),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def outages(tmp_path_factory, without):
    folder = tmp_path_factory.mktemp("outages")
    place = folder / "place"
    return {
        "toy": toy_outage(folder, without),
        "run": run_outage(place, write_config(folder, place / IN_IT), without),
    }


@short_and_soak("power failures", SHORT)
@pytest.mark.parametrize("name", ["toy", "run"])
def test_nothing_wrong_is_loaded_after_a_power_failure(name, outages, trials, tmp_path):
    assert many(f"power failures, {name}", trials, partial(fail_once, outages[name]), tmp_path) == []


def test_nothing_is_lost_whichever_operation_was_the_last(outages, tmp_path):
    assert list(fail_everywhere(outages["toy"], tmp_path)) == []


def test_a_publication_is_whole_or_made_again(outages, tmp_path):
    first = start_of_publication(outages["run"])
    print(len(outages["run"].log) - first, "operations of a publication")
    assert list(fail_everywhere(outages["run"], tmp_path, first)) == []


@pytest.mark.soak("each operation of a run")
def test_nothing_of_a_run_is_lost_whichever_operation_was_the_last(outages, tmp_path):
    print(len(outages["run"].log), "operations")
    assert list(fail_everywhere(outages["run"], tmp_path)) == []


# --- the model of the disk is what it says ---------------------------------------------------------------------------


def states(log, draw, folder, count=60):
    found = set()
    for number in range(count):
        to = folder / f"state-{number}"
        to.mkdir()
        lose_power(disk_after(log), draw, to)
        names = sorted(path for path in to.rglob("*") if path.is_file())
        found.add(tuple((path.relative_to(to).as_posix(), path.read_bytes()) for path in names))
    return found


def test_what_is_flushed_is_there_and_what_is_not_may_be_gone(tmp_path, seeded):
    run = tmp_path / "run"
    run.mkdir()
    with Recording(run).installed() as recording:
        durable.write_text(run / "a", "old")
        recording.mark("a")
        (run / "b").write_text("never flushed")
        durable.append_lines(run / "log", "one")
    found = states(recording.log, seeded, tmp_path)
    assert all(dict(state)["a"] == b"old" for state in found)
    assert (("a", b"old"),) in found
    assert (("a", b"old"), ("b", b"never flushed"), ("log", b"one\n")) in found
    assert any(dict(state).get("b", b"x") not in (b"x", b"never flushed", b"") for state in found)  # torn or zeroed


def test_a_rename_without_a_flush_of_the_folder_may_be_undone_and_one_without_the_content_be_empty(tmp_path, seeded):
    run = tmp_path / "run"
    run.mkdir()
    durable.write_text(run / "a", "old")
    with Recording(run).installed() as recording:
        (run / "new").write_text("new")
        disk.replace(run / "new", run / "a")
    root = disk_after(recording.log)
    assert isinstance(root, Node)
    found = {dict(state).get("a") for state in states(recording.log, seeded, tmp_path)}
    assert {b"", b"new"} <= found
