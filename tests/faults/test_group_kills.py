"""SIGKILL at random moments of runs of stage grpo, on one process and on two: in answers, rewards, updates and saves.
Weights, log and every kept answer are those of the undisturbed run, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from faults.trials import Trial, fresh_seed, many
from helpers.fork_server import ForkServer
from helpers.run_position import Whereabouts, read
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders

KILLED = -9
REWARDS = """
import time

def vowels(prompts, responses, answer):
    time.sleep(0.003)  # long enough for a signal to fall in it
    return [sum(letter in "aeiou" for letter in text) * (int(one) % 3 == 0) for text, one in zip(responses, answer)]
"""
STEPS = 8
# Places of the smallest whole run: passes that draw tokens, times that rewards are asked, micro-batches, flushes and
# renames of its saves. On two ranks a place is one of the rank that is killed.
PLACES = {"rollout": 65, "reward": 13, "update": 16, "save": 171}
RANKS = {1: {}, 2: {"parallel": {"engine": "ddp"}}}


class Runs:
    def __init__(self, folder: Path, server: ForkServer):
        self.folder, self.server = folder, server
        self._straight: dict[int, Path] = {}
        tiny_llama(folder / "base")
        (folder / "score.py").write_text(REWARDS)
        rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(6)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, output: Path, ranks: int) -> str:
        config: dict[str, Any] = {
            "stage": "grpo",
            "model": str(self.folder / "base"),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {"train": str(self.folder / "prompts.jsonl"), "eval": 2, "max_length": 64},
            "grpo": {
                "rewards": [f"{self.folder / 'score.py'}:vowels", {"name": "json", "weight": 0}],
                "group": 2,
                "max_new_tokens": 5,
                "rollout_batches": 1,
                "epochs": 2,
                "ahead": 1,
                "redraw": 1,
                "top_p": 0.9,
                "kl": 0.1,
                "eval_answers": 2,
            },
            "batch": {"size": 4, "micro": 2},
            "optim": {"lr": 3e-3},
            "precision": "fp32",
            "duration": f"{STEPS} steps",
            "eval_every": "3 steps",
            "checkpoint": {"every": "1 steps", "keep": 2, "best": "none"},
            "output": str(output),
            **RANKS[ranks],
        }
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def straight(self, ranks: int) -> Path:
        if ranks not in self._straight:
            output = self.folder / f"straight-{ranks}"
            log = output.with_suffix(".txt")
            code = self.server.run(["train", self.config(output, ranks)], log, ranks=ranks)
            assert code == 0, log.read_text()[-3000:]
            self._straight[ranks] = output
        return self._straight[ranks]


def random_kill(draw: Random, ranks: int) -> dict[str, Any]:
    place = draw.choice([*PLACES])
    kill = {"at": place, "n": draw.randint(1, PLACES[place]), "delay": draw.choice([0.0, draw.uniform(1e-4, 0.01)])}
    return kill if ranks == 1 else {**kill, "rank": draw.randrange(ranks), "n": draw.randint(1, PLACES[place] // 2)}


class Killing:
    """kills: how many there were, by the place that was drawn for them and the part of the run in which they fell."""

    def __init__(self, runs: Runs, ranks: int = 1, most: int = 3, plan: list[dict[str, Any]] | None = None):
        self.runs, self.ranks, self.most, self.plan = runs, ranks, most, plan
        self.kills: Counter[str] = Counter()

    def __call__(self, trial: Trial) -> str:
        config, log = self.runs.config(trial.folder, self.ranks), trial.folder.with_suffix(".txt")
        where = log.with_suffix(".where")
        count = trial.draw.randint(1, self.most)
        plan = self.plan or [random_kill(trial.draw, self.ranks) for _ in range(count)]
        for kill in plan:
            code = self.runs.server.run(["train", config, "--resume"], log, kill, ranks=self.ranks, where=where)
            if code == 0:
                break
            found: Whereabouts = read(where)
            if not found.asked_at:
                return f"{plan}: exit {code}: {log.read_text()[-2000:]}"
            self.kills[f"{kill['at']}, in: {found.killed_in}"] += 1
        code = self.runs.server.run(["train", config, "--resume"], log, ranks=self.ranks)
        if code:
            return f"{plan}: exit {code}: {log.read_text()[-2000:]}"
        return told_apart(self.runs.straight(self.ranks), trial.folder, str(plan))


def told_apart(straight: Path, other: Path, plan: str) -> str:
    kept = [(folder / "answers.jsonl").read_bytes() for folder in (straight, other)]
    differences = [*(["answers.jsonl"] if kept[0] != kept[1] else []), *compare_folders(straight, other)]
    return f"{plan}: {differences[:3]}" if differences else ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("runs"), server)


CHOSEN = {
    "the second rollout, then a save": [{"at": "rollout", "n": 33}, {"at": "save", "n": 9}],
    "a reward, then an update": [{"at": "reward", "n": 5, "delay": 0.002}, {"at": "update", "n": 3}],
}


@pytest.mark.parametrize("plan", CHOSEN)
def test_killed_inside_a_cycle_every_answer_is_as_if_nothing_had_been(runs, tmp_path, plan):
    killing = Killing(runs, plan=CHOSEN[plan])
    assert many("killed runs of grpo", 1, killing, tmp_path) == []
    assert killing.kills.total() == 2


def test_two_ranks_of_which_one_is_killed(runs, tmp_path):
    killing = Killing(runs, 2, plan=[{"at": "rollout", "n": 12, "rank": 1}])
    assert many("killed runs of grpo on two ranks", 1, killing, tmp_path) == []
    assert killing.kills.total() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "trials"), [(1, 50), (2, 8)])
def test_many_killed_runs(runs, tmp_path, ranks, trials):
    killing = Killing(runs, ranks)
    assert many(f"killed runs of grpo on {ranks}", trials, killing, tmp_path, fresh_seed()) == []
    print("kills:", dict(killing.kills))
    assert {name.partition(",")[0] for name in killing.kills} == set(PLACES) or ranks > 1


def other_draws(rank: int) -> None:
    """Answers after a resume are drawn anew."""
    from surefoot.methods.grpo import start

    seed = start.answer_seed
    start.answer_seed = lambda own, rollout, attempt=0: seed(own + 1, rollout, attempt)


def test_twin_answers_that_are_drawn_anew_are_seen(runs, tmp_path):
    folder = tmp_path / "twin"
    config, log = runs.config(folder, 1), tmp_path / "twin.txt"
    assert runs.server.run(["train", config], log, {"at": "rollout", "n": 33}) == KILLED
    changed = "faults.test_group_kills:other_draws"
    assert runs.server.run(["train", config, "--resume"], log, change=changed) == 0, log.read_text()[-2000:]
    assert "answers.jsonl" in told_apart(runs.straight(1), folder, "")
