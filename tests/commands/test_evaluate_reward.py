"""`surefoot evaluate reward` as it is typed: lines, JSON, files, and refusals in one line."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import yaml

from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.report.record import read_run
from surefoot.report.tables.evaluation import wilson
from surefoot.report.views import commands


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    tiny_llama(folder / "base")
    rows = [{"prompt": f"Say {n}.", "chosen": "good " * (n % 3 + 1), "rejected": "bad"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = {
        "stage": "reward",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {
            "train": str(folder / "pairs.jsonl"),
            "eval": str(folder / "pairs.jsonl"),
            "max_length": 96,
            "template": "plain",
        },
        "duration": "2 steps",
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with ForkServer() as server:
        log = folder / "log.txt"
        assert server.run(["train", str(folder / "run.yaml")], log) == 0, log.read_text()
        yield folder, server


def asked(opened, *words: str) -> tuple[int, str]:
    folder, server = opened
    log = folder / "asked.txt"
    log.unlink(missing_ok=True)  # else what was said before stays
    return server.run(["evaluate", "reward", *words], log, folder=folder), log.read_text()


def test_lines_json_and_files(opened):
    folder, server = opened
    code, said = asked(opened, "run", "pairs.jsonl", "--out", "measured")
    assert code == 0, said
    for words in ("12 pairs of 12 records", "accuracy ", "margin ", "expected calibration error", "confidence"):
        assert words in said
    found = json.loads((folder / "measured" / "reward.json").read_text())
    assert found["data"]["pairs"] == 12
    assert (folder / "measured" / "calibration.png").read_bytes().startswith(b"\x89PNG")
    code, said = asked(opened, "run", "pairs.jsonl", "--json", "--batch-size", "1")
    assert code == 0, said
    printed = json.loads(said[said.index("{\n") :])
    assert printed["accuracy"] == found["accuracy"]
    assert printed["margin"] == pytest.approx(found["margin"], abs=1e-6)  # another batch: rounding
    log = folder / "verify.txt"
    assert server.run(["verify", "run"], log, folder=folder) == 0, log.read_text()


def test_what_the_run_offers_at_its_end_can_be_pasted(opened):
    folder, _ = opened
    (line,) = [line for line in (folder / "log.txt").read_text().splitlines() if "surefoot evaluate reward" in line]
    (told,) = [one for _, one in commands(read_run(folder / "run"), "finished") if "evaluate reward" in one]
    assert shlex.split(line) == shlex.split(told) == ["surefoot", "evaluate", "reward", str(folder / "run")]
    assert found_by(opened, "run") == found_by(opened, "run", "pairs.jsonl")


def test_what_an_export_of_it_offers_can_be_pasted(opened):
    folder, server = opened
    log = folder / "export.txt"
    assert server.run(["export", "run", "--merge", "--out", "exported"], log, folder=folder) == 0, log.read_text()
    (line,) = log.read_text().partition("next:")[2].split("\n")[1:-1]
    tool, *words, data = shlex.split(line)
    assert (tool, data) == ("surefoot", "DATA")
    assert server.run([*words, "pairs.jsonl"], log, folder=folder) == 0, log.read_text()
    twin = shutil.copytree(folder / "exported", folder / "headless")
    (twin / VALUE_HEAD_FILE).unlink()
    assert server.run(["generate", "headless", "--prompt", "Hello"], log, folder=folder) == 0, log.read_text()


def test_pairs_that_were_split_off_are_measured_as_the_run_evaluated_them(opened):
    folder, server = opened
    log = folder / "split.txt"
    words = ["data.eval=4", "output=split", "duration=6 steps", "optim.lr=0.02"]
    assert server.run(["train", "run.yaml", *words], log, folder=folder) == 0, log.read_text()
    results = json.loads((folder / "split" / "all_results.json").read_text())
    found = found_by(opened, "split")
    assert found["data"]["pairs"] == results["eval_pairs"] == 4
    assert found["accuracy"] == results["eval_reward_accuracy"]
    assert found["margin"] == pytest.approx(results["eval_reward_margin"], rel=1e-5)
    assert results["eval_reward_accuracy"] == 1
    assert not cautions(log)  # twin of the next test: all of four are more than a coin's
    everything = found_by(opened, "split", "pairs.jsonl")  # twin: no command could name those four
    assert everything["data"]["pairs"] == 12
    assert everything["margin"] != pytest.approx(results["eval_reward_margin"], rel=1e-5)


@pytest.mark.parametrize("held_out", ["alike.jsonl", "none"])
def test_a_reward_model_that_is_no_better_than_a_coin_says_so_at_its_end(opened, held_out):
    folder, server = opened
    rows = [{"prompt": f"Say {n}.", "chosen": "good", "rejected": "good"} for n in range(30)]
    (folder / "alike.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = folder / f"{held_out}.txt"
    words = ["train", "run.yaml", f"data.eval={held_out}", f"output=coin-{held_out}"]
    assert server.run(words, log, folder=folder) == 0, log.read_text()
    (caution,) = cautions(log)
    if held_out == "none":
        assert "data.eval" in caution
        assert "evaluate reward" not in log.read_text()  # there is nothing that it could measure
    else:
        low, high = wilson(0.5, 30)
        assert f"50.0% of 30 pairs (95 % interval {low:.1%} to {high:.1%})" in caution


def cautions(log) -> list[str]:
    """What the end of a run has to say of its reward model."""
    said = log.read_text().partition("saved checkpoint")[2]
    return [line for line in said.splitlines() if "prefers the better answer" in line]


def test_how_sure_the_accuracy_is(opened):
    found = found_by(opened, "run")
    low, high = found["accuracy_interval"]
    assert low <= found["accuracy"] <= high
    assert high - low > 0.2  # of twelve
    code, said = asked(opened, "run")
    assert code == 0, said
    assert f"{low:.1%} to {high:.1%}" in said


def found_by(opened, *words: str) -> dict:
    code, said = asked(opened, *words, "--json")
    assert code == 0, said
    found = json.loads(said[said.index("{\n") :])
    del found["seconds"], found["data"]["file"]
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "reward", "base", "pairs.jsonl"], "is no reward model"),
        (["evaluate", "reward", "run", "missing.jsonl"], "missing.jsonl"),
        (["evaluate", "reward", "run", "--max-samples", "2"], "DATA: is needed"),
        (["evaluate", "reward", "scored"], "DATA: is needed"),
        (["generate", "run", "--prompt", "Hello"], "it scores answers and writes none"),
        (["generate", "scored", "--prompt", "Hello"], "it scores answers and writes none"),
        (["evaluate", "loss", "run", "pairs.jsonl"], "it scores answers and writes none"),
    ],
)
def test_refusals(opened, words, said):
    folder, server = opened
    if "scored" in words and not (folder / "scored").exists():  # a reward model that no run of surefoot left
        shutil.copytree(folder / "run", folder / "scored", ignore=shutil.ignore_patterns("plan.json", "checkpoint-*"))
    log = folder / "refused.txt"
    assert server.run(words, log, folder=folder) == 2
    assert said in log.read_text()
    assert "Traceback" not in log.read_text()
