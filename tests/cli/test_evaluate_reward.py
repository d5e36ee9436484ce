"""`surefoot evaluate reward` as it is typed: lines, JSON, files, and refusals in one line."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from forkserver import ForkServer
from surefoot.report.record import read_run
from surefoot.report.views import commands
from tiny import tiny_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
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


def asked(place, *words: str) -> tuple[int, str]:
    folder, server = place
    log = folder / "asked.txt"
    return server.run(["evaluate", "reward", *words], log, folder=folder), log.read_text()


def test_lines_json_and_files(place):
    folder, server = place
    code, said = asked(place, "run", "pairs.jsonl", "--out", "measured")
    assert code == 0, said
    for words in ("12 pairs of 12 records", "accuracy ", "margin ", "expected calibration error", "confidence"):
        assert words in said
    found = json.loads((folder / "measured" / "reward.json").read_text())
    assert found["data"]["pairs"] == 12
    assert (folder / "measured" / "calibration.png").read_bytes().startswith(b"\x89PNG")
    code, said = asked(place, "run", "pairs.jsonl", "--json", "--batch-size", "1")
    assert code == 0, said
    printed = json.loads(said[said.index("{\n") :])
    assert printed["accuracy"] == found["accuracy"]
    assert printed["margin"] == pytest.approx(found["margin"], abs=1e-6)  # another batch: rounding
    log = folder / "verify.txt"
    assert server.run(["verify", "run"], log, folder=folder) == 0, log.read_text()


def test_what_the_run_offers_at_its_end_can_be_pasted(place):
    folder, _ = place
    (line,) = [line for line in (folder / "log.txt").read_text().splitlines() if "surefoot evaluate reward" in line]
    (told,) = [one for _, one in commands(read_run(folder / "run"), "finished") if "evaluate reward" in one]
    words = shlex.split(told)
    assert shlex.split(line) == words == ["surefoot", "evaluate", "reward", *words[3:]]
    assert words[4] == str(folder / "pairs.jsonl")
    code, said = asked(place, *words[3:], "--max-samples", "2")
    assert code == 0, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "reward", "base", "pairs.jsonl"], "is no reward model"),
        (["evaluate", "reward", "run", "missing.jsonl"], "missing.jsonl"),
        (["generate", "run", "--prompt", "Hello"], "it scores answers and writes none"),
        (["evaluate", "loss", "run", "pairs.jsonl"], "it scores answers and writes none"),
    ],
)
def test_refusals(place, words, said):
    folder, server = place
    log = folder / "refused.txt"
    assert server.run(words, log, folder=folder) == 2
    assert said in log.read_text()
    assert "Traceback" not in log.read_text()
