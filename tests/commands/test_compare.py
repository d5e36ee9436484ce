"""`surefoot compare` names what differs between two runs and nothing else; `verify --same-as` stays readable."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from helpers.faults import gives, prints_fault
from helpers.fork_server import ForkServer
from helpers.trained_runs import heron_config, heron_folder
from surefoot.commands.main import main
from surefoot.planning.plan import Difference
from surefoot.report import comparison
from surefoot.report.comparison import (
    Comparison,
    comparison_tables,
    fields_alone,
    first_difference,
    shared_curve,
    verdict_lines,
)
from surefoot.report.verification import MOST_SHOWN
from surefoot.system.durable import write_json
from surefoot.training.manifest import sealed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a, same (as a), other (another seed and rate), and cut (killed before its end)."""
    folder = heron_folder(tmp_path_factory.mktemp("runs"))
    data = {"train": str(folder / "train.json"), "eval": 2, "max_length": 64}
    with ForkServer() as server:
        for name, changes in {"a": {}, "same": {}, "other": {"seed": 7, "optim": {"lr": 1e-3}}}.items():
            path, log = heron_config(folder, name, data=data, duration="3 steps", **changes), folder / "log.txt"
            assert server.run(["train", str(path)], log) == 0, log.read_text()
    shutil.copytree(folder / "a", folder / "cut")
    for name in ("all_results.json", "adapter_model.safetensors"):
        (folder / "cut" / name).unlink()
    return folder


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def found(runs: Path, a: str, b: str) -> dict[str, Any]:
    result = call("compare", runs / a, runs / b, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_what_differs_in_a_rank_is_named(runs: Path) -> None:
    shutil.copytree(runs / "a", runs / "elsewhere")
    facts = json.loads((runs / "elsewhere" / "environment.json").read_text())
    facts["ranks"][0]["allocator"] = "another"
    (runs / "elsewhere" / "environment.json").write_text(json.dumps(facts))
    (differs,) = found(runs, "a", "elsewhere")["environment"]
    assert (differs["path"], differs["new"]) == ("rank 0.allocator", "another")


def test_equal_runs_differ_in_their_folder_only(runs: Path) -> None:
    facts = found(runs, "a", "same")
    assert [one["path"] for one in facts["config"]] == ["output"]
    assert facts["plan"] == facts["environment"] == facts["data"] == []
    assert facts["first"] is None
    assert facts["weights"] == 0


def test_what_differs_is_named(runs: Path) -> None:
    facts = found(runs, "a", "other")
    assert [one["path"] for one in facts["config"]] == ["optim.lr", "output", "seed"]
    assert facts["config"][0] == {"path": "optim.lr", "old": 2e-4, "new": 1e-3}
    assert facts["first"].startswith("step 1: ")
    assert facts["weights"] > 0
    assert facts["results"]["train_steps"] == [3, 3]
    assert facts["results"]["train_loss"][0] != facts["results"]["train_loss"][1]
    assert facts["results"]["peak_memory"][0] > 0
    assert [point[0] for point in facts["curves"]["loss"]] == [1, 2, 3]
    text = call("compare", runs / "a", runs / "other").stdout
    for part in ("optim.lr", dict(comparison.FIGURES)["train_loss"], "step 3", facts["first"]):
        assert part in text


def test_a_run_that_did_not_end_compares_too(runs: Path) -> None:
    facts = found(runs, "a", "cut")
    assert facts["weights"] is None
    assert facts["results"]["train_loss"][1] is None


def test_other_data_are_seen(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "b")
    for manifest in (tmp_path / "b").rglob("MANIFEST.json"):
        told = json.loads(manifest.read_text())
        told["identity"]["data"] = "f00" + told["identity"]["data"]
        write_json(manifest, sealed(told))
    facts = json.loads(call("compare", runs / "a", tmp_path / "b", "--json").stdout)
    assert [one["path"] for one in facts["data"]] == ["data"]


def spoilt(runs: Path, folder: Path) -> Path:
    """A copy of run a, one digit of a logged loss changed."""
    shutil.copytree(runs / "a", folder)
    log = folder / "trainer_log.jsonl"
    first, second, *rest = log.read_text().splitlines(keepends=True)
    other = re.sub(r'("loss": \d\.)(\d)', lambda found: f"{found[1]}{(int(found[2]) + 1) % 10}", second)
    assert other != second
    log.write_text("".join([first, other, *rest]))
    return folder


def test_one_digit_of_a_logged_loss_is_found_by_verify_and_mended_by_resume(runs: Path, tmp_path: Path) -> None:
    run = spoilt(runs, tmp_path / "run")
    told = call("verify", run)
    assert told.exit_code == 4
    assert f"{run}/trainer_log.jsonl: " in told.stderr
    assert "line 2 " in told.stderr
    folders = json.loads(call("verify", run, "--json").stdout)["folders"]
    assert [one["folder"] for one in folders if one["logs_as_of"] == "checkpoint-3"] == ["logs"]
    assert [file["file"] for one in folders for file in one["files"] if file["fault"]] == ["trainer_log.jsonl"]
    assert call("train", run / "config.yaml", "--resume", f"output={run}").exit_code == 0
    assert (run / "trainer_log.jsonl").read_bytes() == (runs / "a" / "trainer_log.jsonl").read_bytes()
    assert call("verify", run).exit_code == 0


def test_twin_checkpoints_of_an_earlier_version_verify_and_say_that_logs_are_not_covered(
    runs: Path, tmp_path: Path
) -> None:
    assert f"{runs / 'a'}: " not in call("verify", runs / "a").stdout
    run = spoilt(runs, tmp_path / "run")
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "logs.tar").unlink()
        told = json.loads((checkpoint / "MANIFEST.json").read_text())
        del told["files"]["logs.tar"]
        write_json(checkpoint / "MANIFEST.json", sealed(told))
    said = call("verify", run)
    assert said.exit_code == 0
    assert [line for line in said.stdout.splitlines() if line.startswith(f"{run}: ")]


def test_the_picture(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(b"mine")
    assert call("compare", runs / "a", runs / "other", "--plot", tmp_path / "mine.png").exit_code == 2
    assert (tmp_path / "mine.png").read_bytes() == b"mine"
    for _ in range(2):  # what it drew before is its own
        assert call("compare", runs / "a", runs / "other", "--plot", tmp_path / "both.png").exit_code == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_cut_file_of_weights_is_one_line_that_names_it(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "b")
    weights = tmp_path / "b" / "adapter_model.safetensors"
    for size in (3000, 4, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        told = call("compare", runs / "a", tmp_path / "b")
        assert told.exit_code == 4
        assert [line for line in told.stderr.splitlines() if "error" in line and str(weights) in line]
        assert "internal" not in told.stderr


def test_what_is_no_run_is_refused(runs: Path) -> None:
    result = call("compare", runs / "a", runs / "base")
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-USE-FOLDER", runs / "base", "plan.json")


def row(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"current_steps": step, "loss": loss, "elapsed_time": f"0:00:0{step}", **more}


def test_curves_meet_on_shared_steps() -> None:
    a, b = [row(step, step) for step in range(1, 101)], [row(step, -step) for step in range(2, 101, 2)]
    points = shared_curve(a, b, "loss")
    assert len(points) == comparison.GRID
    assert (points[0], points[-1]) == ((2, 2, -2), (100, 100, -100))
    assert shared_curve(a, b, "eval_loss") == ()


LOGS = [
    [{"current_steps": step, "eval_loss": loss, **more} for step, loss in enumerate(losses)]
    for losses, more in (([2.0, 1.0], {"eval_exact_match": 0.0}), ([2.0, 1.5], {}))
]


def parts(first: str | None, kind: str = "step") -> tuple[int, list[tuple[str, str, str]]]:
    """Of a first difference: its step, and each field with its two values. kind: the word that it begins with."""
    assert first is not None
    place, _, fields = first.partition(": ")
    begins, *_, step = place.split()
    assert begins == kind
    return int(step), [(name, a, b) for name, a, _, b in map(str.split, fields.split(", "))]


def check_a_metric_of_one_run() -> None:
    """It is no difference of step 0: there both logged the same loss."""
    assert parts(first_difference(*LOGS), "evaluation") == (1, [("eval_loss", "1", "1.5")])
    assert fields_alone(*LOGS) == (("eval_exact_match",), ())


def test_a_metric_that_one_run_lacks_is_listed_apart() -> None:
    check_a_metric_of_one_run()
    train = [{"current_steps": 1, "loss": 1.0}]
    assert fields_alone([*train, *LOGS[0]], train) == ((), ()), "nothing to compare an evaluation with"
    found = Comparison(("a", "b"), (), (), (), (), {}, {}, None, (("eval_exact_match",), ()), None)
    same, only, _ = verdict_lines(found)
    assert only.endswith("a: eval_exact_match")
    *others, differ = verdict_lines(replace(found, first="step 1: loss 1 and 2"))  # twin: its own line for the last
    assert others == [same, only]
    assert differ.endswith("step 1: loss 1 and 2")


def test_twin_taken_for_none_it_would_be_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "fields_alone", lambda a, b: ((), ()))
    with pytest.raises(AssertionError):
        check_a_metric_of_one_run()


def shown(**parts: Any) -> list[list[str]]:
    """Cells of the only table."""
    empty: dict[str, Any] = {"config": (), "plan": (), "environment": (), "data": (), "results": {}, "curves": {}}
    found = Comparison(names=("a", "b"), first=None, alone=((), ()), weights=None, **empty | parts)
    (table,) = comparison_tables(found)
    return [list(cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]


def test_figures_have_the_units_of_the_rest_of_the_screen() -> None:
    results = {
        "train_loss": (8.98975, 9.12783),
        "eval_accuracy": (0.25, 0.5),
        "train_runtime": (7.006, 634.0),
        "train_tokens_per_second": (6222.0, 4563.95),
        "peak_memory": (677_462_016, None),
        "eval_tokens": (2686, 2686),
    }
    rows = shown(results=results)
    names = dict(comparison.FIGURES) | {"eval_tokens": rows[-1][0]}
    assert rows == [
        [names["train_loss"], "8.990", "9.128"],
        [names["eval_accuracy"], "25.0%", "50.0%"],
        [names["train_runtime"], "7.0 s", "10 min 34 s"],
        [names["train_tokens_per_second"], "6,222", "4,564"],
        [names["peak_memory"], "646 MiB", "none"],
        [names["eval_tokens"], "2,686", "2,686"],
    ]
    assert gives(names["eval_tokens"], "tokens")
    assert shown(plan=(Difference("memory.holes", 148_041_728, 169_236_070),)) == [
        ["memory.fragmentation", "141 MiB", "161 MiB"]
    ]
    assert shown(config=(Difference("optim.lr", 2e-4, 1e-5),)) == [["optim.lr", "2e-4", "1e-5"]]
    assert shown(plan=(Difference("report_to", ("tensorboard",), ()),)) == [["report_to", "[tensorboard]", "[]"]]


def test_what_differs_never_reads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    near: dict[str, Any] = {"curves": {"loss": ((1, 8.8160291, 8.8160294), (2, 0.5, 0.5000000000000001))}}
    assert shown(**near) == [
        ["step 1", "8.8160291", "8.8160294"],
        ["step 2", "0.5", "0.5000000000000001"],
    ]
    assert shown(plan=(Difference("memory.weights", 4_531_200, 4_550_656),)) == [
        ["memory.weights", "4.3 MiB (4,531,200 bytes)", "4.3 MiB (4,550,656 bytes)"]
    ]
    monkeypatch.setattr(comparison, "_DIGITS", (4,))  # twin: cut to one length they do
    (step, *_) = shown(**near)
    assert step[1] == step[2]


def names_of(environment: dict[str, tuple[Any, Any]]) -> list[list[str]]:
    return shown(environment=tuple(Difference(path, *values) for path, values in environment.items()))


def test_what_differs_has_names_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(plan=(Difference("batch.size.value", 32, 16),)) == [["batch.size", "32", "16"]]
    finding = {"name": "OMP_NUM_THREADS", "value": "1", "effect": "read by torch", "verdict": "fine"}
    assert len(shown(plan=(Difference("environment", [finding], []), Difference("trainable", 1, 2)))) == 1
    alone: dict[str, tuple[Any, Any]] = {
        "environment.OMP_NUM_THREADS": ("1", None),
        "device.memory": (2**34, 2**35),
        "rank 0.of": (1000, 2000),
        "rank 0.fast_paths.adapter.used": (True, False),
        "rank 0.fast_paths.adapter.differs.loss": (1e-7, 2e-3),
        "rank 0.fast_paths.adapter.limits.loss": (1e-3, 1e-2),
        "rank 0.allocator": ("a", "b"),
    }
    rows = names_of(alone)
    parameters, path = rows[2][0], rows[3][0]
    assert rows == [
        ["OMP_NUM_THREADS", "1", "not set"],
        ["device.memory", "16.0 GiB", "32.0 GiB"],
        [parameters, "1,000", "2,000"],
        [path, "True", "False"],
        ["allocator", "a", "b"],
    ]
    assert gives(parameters, "parameters")
    assert gives(path, "adapter.used")
    assert not gives(parameters, 0), "there is one rank"
    assert [row[0] for row in names_of({"rank 0.of": (1, 2), "rank 1.engine": ("a", "b")})] == [
        f"rank 0: {parameters}",
        "rank 1: engine",
    ]
    monkeypatch.setattr(comparison, "spoken", lambda part, found: [(one.path, one) for one in found])  # twin
    assert names_of(alone)[2][0] == "rank 0.of"


def test_a_section_that_only_one_run_has_is_told_without_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    path = {"used": True, "outside": False, "differs": {"gradient": 8.4e-07}, "limits": {"gradient": 1e-3}}
    kind = {"value": "lora", "reason": "asked for", "source": "user"}
    both = {"loss": path, "adapter": path | {"used": False}}
    plan = (Difference("adapter", {"kind": kind, "rank": 8}, None),)
    assert names_of({"rank 0.fast_paths.documents": (None, path), "rank 0.fast_paths": (both, None)}) == [
        ["fast path documents", "none", "used"],
        ["fast_paths", "loss used, adapter not used", "none"],
    ]
    assert shown(plan=plan) == [["adapter", "{kind: lora, rank: 8}", "none"]]
    monkeypatch.setattr(comparison, "_value_alone", lambda value: value)  # twin
    assert "reason" in shown(plan=plan)[0][1]


def test_a_first_difference_has_the_digits_that_tell_it() -> None:
    a, b = (
        [row(1, loss, grad_norm=norm, skipped=count)]
        for loss, norm, count in ((4.72216, 13.17, 0), (4.7017, 13.17000001, 1200))
    )
    digits = [("loss", "4.722", "4.702"), ("grad_norm", "13.17", "13.17000001"), ("skipped", "0", "1200")]
    assert parts(first_difference(a, b)) == (1, digits)


def test_the_first_difference_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = [row(1, 0.5), row(2, 0.25)], [row(1, 0.5), row(2, 0.25000000000000006), row(3, 1.0)]
    assert parts(first_difference(a, b)) == (2, [("loss", "0.25", "0.25000000000000006")])
    assert first_difference(a, b[:1]) is None
    monkeypatch.setattr(comparison, "without_timing", lambda row: {**row, "loss": round(row["loss"], 9)})
    assert first_difference(a, b) is None, "twin: rounded numbers hide it"


def test_verify_names_the_damaged_file_alone(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "a" / "plan.json").write_bytes(b"{}")
    result = call("verify", tmp_path / "a")
    assert result.exit_code == 4
    assert result.output.count("plan.json") == 1
    assert "README.md" not in result.output  # twin: what is well has no row
    well, of = re.findall(r"(\d+) of (\d+) ", result.stdout)[0]
    assert int(well) == int(of) - 1


def test_verify_shows_the_cause_and_a_few_rows(runs: Path) -> None:
    result = call("verify", runs / "a", "--same-as", runs / "other")
    assert result.exit_code == 4
    _, verdict, *_, hint = lines = result.stdout.splitlines()
    written = json.loads(call("verify", runs / "a", "--same-as", runs / "other", "--json").stdout)
    count = len(written["differences"])
    assert all(gives(verdict, value) for value in (str(runs / "a"), str(runs / "other"), count))
    assert hint.endswith(f"surefoot compare {runs / 'a'} {runs / 'other'}")
    assert [line.startswith("config: ") for line in lines].index(True) == 2
    assert any(line.startswith("config: optim.lr ") and gives(line, 0.0002) for line in lines)
    tensors = {one["where"].split()[-1] for one in written["differences"]}
    assert 0 < len([word for word in result.stdout.split() if word in tensors]) <= MOST_SHOWN
    rest = re.findall(r"(\d+)\s+in\s+[\w-]+\.", result.stdout)
    assert sum(map(int, rest)) == count - MOST_SHOWN
    newest = [next((runs / name).glob("checkpoint-*")) for name in ("a", "other")]
    assert "surefoot compare" not in call("verify", newest[0], "--same-as", newest[1]).stdout  # it takes runs alone
    same = call("verify", runs / "a", "--same-as", runs / "same")
    assert same.exit_code == 0
    assert len(same.stdout.splitlines()) == 2, "a count for all files that are well, and the verdict"
    written = json.loads(call("verify", runs / "a", "--same-as", runs / "same", "--json").stdout)
    files = sum(len(folder["files"]) for folder in written["folders"])
    assert int(same.stdout.split()[0]) == files
