"""SIGKILL at random moments of runs of stage grpo, on one process and on two: in answers, rewards, updates and saves,
and with an environment between turns and in its calls. Weights, log and every kept answer are those of the undisturbed
run, bit for bit, and no reply that was recorded is asked for again."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from faults.trials import Trial, fresh_seed, many
from helpers.fork_server import ForkServer
from helpers.run_position import Whereabouts, read
from helpers.tiny_models import curt, tiny_llama
from surefoot.report.verification import compare_folders

KILLED = -9
REWARDS = """
import time

def vowels(prompts, responses, answer):
    time.sleep(0.003)  # long enough for a signal to fall in it
    return [sum(letter in "aeiou" for letter in text) * (int(one) % 3 == 0) for text, one in zip(responses, answer)]

class Tool:
    def reset(self, record):
        self.turns = 0

    def step(self, answer):
        time.sleep(0.003)
        self.turns += 1
        return {"observation": f"so {len(answer)}", "reward": len(answer) % 3, "done": self.turns + len(answer) % 2 > 2}
"""
STEPS = 8


@dataclass(frozen=True)
class Kind:
    """base: makes the policy. grpo: its own settings. places: of a whole run: passes that draw tokens, times that
    rewards are asked, turns, calls, micro-batches, flushes and renames of its saves. On two ranks a place is one of the
    rank that is killed."""

    base: Callable[[Path], object]
    grpo: dict[str, Any]
    places: dict[str, int]


ONE = Kind(
    tiny_llama,
    {"rewards": ["OWN:vowels", {"name": "json", "weight": 0}], "max_new_tokens": 5, "redraw": 1, "kl": 0.1},
    {"rollout": 65, "reward": 13, "update": 16, "save": 171},
)
TURNS = Kind(
    curt,
    {"environment": {"name": "OWN:Tool", "turns": 3}, "max_new_tokens": 48},
    {"rollout": 215, "reward": 10, "turn": 20, "tool": 92, "update": 16, "save": 171},
)
RANKS = {1: {}, 2: {"parallel": {"engine": "ddp"}}}


class Runs:
    def __init__(self, folder: Path, server: ForkServer, kind: Kind):
        self.folder, self.server, self.kind = folder, server, kind
        self._straight: dict[int, Path] = {}
        kind.base(folder / "base")
        (folder / "score.py").write_text(REWARDS)
        rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(6)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, output: Path, ranks: int) -> str:
        config: dict[str, Any] = {
            "stage": "grpo",
            "model": str(self.folder / "base"),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {"train": str(self.folder / "prompts.jsonl"), "eval": 2, "max_length": 128},
            "grpo": {"group": 2, "epochs": 2, "ahead": 1, "top_p": 0.9, "eval_answers": 2, **self.kind.grpo},
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
        path.write_text(yaml.safe_dump(config).replace("OWN:", f"{self.folder / 'score.py'}:"))
        return str(path)

    def straight(self, ranks: int) -> Path:
        if ranks not in self._straight:
            output = self.folder / f"straight-{ranks}"
            log = output.with_suffix(".txt")
            code = self.server.run(["train", self.config(output, ranks)], log, ranks=ranks)
            assert code == 0, log.read_text()[-3000:]
            self._straight[ranks] = output
        return self._straight[ranks]


def random_kill(draw: Random, places: dict[str, int], ranks: int) -> dict[str, Any]:
    place = draw.choice([*places])
    kill = {"at": place, "n": draw.randint(1, places[place]), "delay": draw.choice([0.0, draw.uniform(1e-4, 0.01)])}
    return kill if ranks == 1 else {**kill, "rank": draw.randrange(ranks), "n": draw.randint(1, places[place] // 2)}


class Killing:
    """kills: how many there were, by the place that was drawn for them and the part of the run in which they fell."""

    def __init__(self, runs: Runs, ranks: int = 1, most: int = 3, plan: list[dict[str, Any]] | None = None):
        self.runs, self.ranks, self.most, self.plan = runs, ranks, most, plan
        self.kills: Counter[str] = Counter()

    def __call__(self, trial: Trial) -> str:
        config, log = self.runs.config(trial.folder, self.ranks), trial.folder.with_suffix(".txt")
        where = log.with_suffix(".where")
        count = trial.draw.randint(1, self.most)
        plan = self.plan or [random_kill(trial.draw, self.runs.kind.places, self.ranks) for _ in range(count)]
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
    asked = [recorded(folder) for folder in (straight, other)]  # one line for each call, however often it was killed
    differences += ["turns"] if asked[0] != asked[1] else []
    return f"{plan}: {differences[:3]}" if differences else ""


def recorded(run: Path) -> list[str]:
    """The calls of an environment and their replies, of all ranks: threads append them in any order."""
    return sorted(line for path in run.glob("turns-*.jsonl") for line in path.read_text().splitlines())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("runs"), server, ONE)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("talking"), server, TURNS)


CHOSEN = {
    "the second rollout, then a save": [{"at": "rollout", "n": 33}, {"at": "save", "n": 9}],
    "a reward, then an update": [{"at": "reward", "n": 5, "delay": 0.002}, {"at": "update", "n": 3}],
}


@pytest.mark.parametrize("plan", CHOSEN)
def test_killed_inside_a_cycle_every_answer_is_as_if_nothing_had_been(runs, tmp_path, plan):
    killing = Killing(runs, plan=CHOSEN[plan])
    assert many("killed runs of grpo", 1, killing, tmp_path) == []
    assert killing.kills.total() == 2


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed(runs, tmp_path):
    killing = Killing(runs, 2, plan=[{"at": "rollout", "n": 12, "rank": 1}])
    assert many("killed runs of grpo on two ranks", 1, killing, tmp_path) == []
    assert killing.kills.total() == 1


@pytest.mark.slow
def test_killed_in_a_call_and_between_turns_no_recorded_reply_is_asked_for_again(talking, tmp_path):
    killing = Killing(talking, plan=[{"at": "tool", "n": 21, "delay": 0.001}, {"at": "turn", "n": 2}])
    assert many("killed runs of grpo with turns", 1, killing, tmp_path) == []
    assert killing.kills.total() == 2
    assert len(recorded(talking.straight(1))) == TURNS.places["tool"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "trials"), [("runs", 1, 50), ("runs", 2, 8), ("talking", 1, 25), ("talking", 2, 8)]
)
def test_many_killed_runs(request, tmp_path, kind, ranks, trials):
    killing = Killing(request.getfixturevalue(kind), ranks)
    assert many(f"{kind} of grpo killed on {ranks}", trials, killing, tmp_path, fresh_seed()) == []
    print("kills:", dict(killing.kills))
    assert {name.partition(",")[0] for name in killing.kills} == set(killing.runs.kind.places) or ranks > 1


def other_draws(rank: int) -> None:
    """Answers after a resume are drawn anew."""
    from surefoot.methods.grpo import start

    seed = start.answer_seed
    start.answer_seed = lambda own, rollout, attempt=0: seed(own + 1, rollout, attempt)


def differs_when_resumed(runs, tmp_path, kill, change):
    """A run is killed and resumed with `change`, a function of this file. Returns what sets it apart."""
    folder = tmp_path / "twin"
    config, log = runs.config(folder, 1), tmp_path / "twin.txt"
    assert runs.server.run(["train", config], log, kill) == KILLED
    changed = f"faults.test_group_kills:{change.__name__}"
    assert runs.server.run(["train", config, "--resume"], log, change=changed) == 0, log.read_text()[-2000:]
    return told_apart(runs.straight(1), folder, "")


def test_twin_answers_that_are_drawn_anew_are_seen(runs, tmp_path):
    assert "answers.jsonl" in differs_when_resumed(runs, tmp_path, {"at": "rollout", "n": 33}, other_draws)


def forgets(rank: int) -> None:
    """Replies are recorded, and not found again."""
    from surefoot.methods.environments.recorded import Recorded

    Recorded.find = lambda recorded, key: None


@pytest.mark.slow
def test_twin_replies_that_are_asked_for_again_are_seen(talking, tmp_path):
    assert differs_when_resumed(talking, tmp_path, {"at": "tool", "n": 21}, forgets).endswith("['turns']")
