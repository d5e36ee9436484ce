"""Every method, and every command that takes a device, on a GPU. A pretended one also says where a step waits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers import pretend_gpu
from helpers.tiers import representatives
from rehearsal.runs import (
    BESIDES,
    BF16,
    CASES,
    NEEDED,
    ON_ANY_GPU,
    PER_PASS,
    STEPS,
    Died,
    config_of,
    dying,
    make,
    make_world,
    started,
    train,
    waits_of_a_step,
)
from surefoot.commands.main import main
from surefoot.models.rollout import EmbeddedRollouts
from surefoot.report.verification import compare_folders
from surefoot.runs import load_models
from surefoot.system.errors import SurefootError
from surefoot.training import loop

pytestmark = ON_ANY_GPU


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("rehearsal"))


@pytest.mark.parametrize("case", representatives(CASES, "dora", "packed", "ppo"))
def test_it_trains_waits_where_it_says_and_goes_on_bit_for_bit(world, case):
    for package in NEEDED.get(case, ()):
        pytest.importorskip(package)
    config, how = started(world, case, "whole")
    waits, rows = waits_of_a_step(config, **how)
    assert len(rows) == STEPS
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    beside = case if case in BESIDES else case.partition("-")[0]  # another loss of a method waits where that does
    assert set(waits) <= PER_PASS | BESIDES.get(beside, set())

    broken = started(world, case, "broken")[0]
    with pytest.MonkeyPatch.context() as patch:
        dying(patch, after=2)
        with pytest.raises(Died):
            train(broken, **how)
    train(broken, resume=True, **how)
    assert compare_folders(Path(config["output"]), Path(broken["output"])) == []


def command(*words: object) -> str:
    result = CliRunner().invoke(main, ["--debug", *map(str, words)], input="Say 3.\n")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(world) -> Path:
    config = config_of(world, "for-commands", **BF16)
    train(config)
    return Path(config["output"])


def sets(folder: Path) -> Path:
    """A set of questions, as `evaluate commonsense` reads it."""
    (folder / "boolq").mkdir(parents=True)
    row = {"instruction": "Is it so?", "input": "", "output": "the correct answer is true", "answer": "true"}
    (folder / "boolq" / "test.json").write_text(json.dumps([row, row]))
    return folder


COMMANDS = {
    "verify": ["verify", "RUN"],
    "generate": ["generate", "RUN", "--prompt", "Say 3.", "--max-new-tokens", "4"],
    "evaluate loss": ["evaluate", "loss", "RUN", "--data", "DATA"],
    "capture": ["capture", "RUN", "--seq-len", "16", "--out", "OUT"],
    "export": ["export", "RUN", "--merge", "--out", "OUT"],
    "export of the adapter": ["export", "RUN", "--out", "OUT"],
    "export as GGUF": ["export", "RUN", "--merge", "--gguf", "--out", "OUT"],
    "doctor": ["doctor", "CONFIG"],
    "plan": ["plan", "CONFIG"],
    "chat": ["chat", "RUN", "--max-new-tokens", "4"],
    "verify two": ["verify", "RUN", "--same-as", "RUN"],
    "evaluate answers": ["evaluate", "answers", "RUN", "--data", "GRADED", "--config", "GRPO.yaml", "--answers", "2"],
    "evaluate norms": ["evaluate", "norms", "RUN", "--out", "OUT"],
    "evaluate reward": ["evaluate", "reward", "JUDGE", "--data", "PAIRS"],
    "evaluate commonsense": ["evaluate", "commonsense", "RUN", "--data", "SETS", "--sets", "boolq", "--out", "OUT"],
    "convert": ["convert", "RUN", "--to", "old-dora", "--dry-run", "--out", "OUT"],
    "quickstart": ["quickstart", "--out", "OUT"],
    "tune": ["tune", "CONFIG", "--seconds", "0.5", "--out", "OUT.yaml"],
}


@pytest.mark.parametrize("name", representatives(COMMANDS, "generate", "export"))
def test_commands(world, trained, tmp_path, name):
    if "JUDGE" in COMMANDS[name] and not (world / "judge").exists():
        make("judge", world)
    if "GRPO.yaml" in COMMANDS[name]:
        (tmp_path / "grpo.yaml").write_text(json.dumps(started(world, "grpo-rewards", "asked")[0]))
    places = {
        "GRADED": world / "graded.jsonl",
        "GRPO.yaml": tmp_path / "grpo.yaml",
        "JUDGE": world / "judge",
        "PAIRS": world / "pairs.jsonl",
        "SETS": sets(tmp_path / "sets"),
        "OUT.yaml": tmp_path / "out.yaml",
        "RUN": trained,
        "DATA": world / "sft.jsonl",
        "OUT": tmp_path / "out",
        "CONFIG": trained / "config.yaml",
    }
    command(*(places.get(word, word) for word in COMMANDS[name]))


# Where the GPU's memory ends: a function that then finds none free.
NO_ROOM = {
    "a step": ("lora", loop, "train_step"),
    "a step, optimizer in host memory": ("offloaded", loop, "train_step"),
    "the base, while it is put there": ("nf4", load_models, "load_policy"),
    "an evaluation": ("evaluated", loop, "_evaluated"),
    "answers that are drawn": ("grpo", EmbeddedRollouts, "answer"),
}


@pytest.mark.skipif(not pretend_gpu.is_here(), reason="the limit is the pretend GPU's")
@pytest.mark.parametrize("where", representatives(NO_ROOM, "a step", "a step, optimizer in host memory"))
def test_too_little_memory_is_one_line(world, where):
    """The plan passes, and the GPU has less than it says: what fails is told, and nothing is half written."""
    from pretend_cuda import device

    case, module, name = NO_ROOM[where]
    config, how = started(world, case, f"no-memory-{len(where)}")
    with pytest.MonkeyPatch.context() as patch:
        real = getattr(module, name)

        def without_room(*given: Any, **named: Any) -> Any:
            device().set_limit(device().memory()["held"])
            return real(*given, **named)

        patch.setattr(module, name, without_room)
        try:
            with pytest.raises(SurefootError) as error:
                train(config, **how)
        finally:
            device().set_limit(80 << 30)
    assert error.value.exit_code == 3
    assert error.value.faults[0].code == "SF-MEMORY"
