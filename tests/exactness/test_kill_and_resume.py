"""Kill -9 anywhere, run the same command again, and the end is the same: weights, moments, state, logged losses.

Three adapters x three precisions. Each run is killed several times: at random steps (two of them within one epoch),
between a step and its log row, and in the middle of a save. Dropout is on, every step has two micro-batches, and the
epochs end with a short batch. The seed is drawn anew and printed.
"""

import json
import random
import shutil
from itertools import product

import pytest
import yaml

from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders
from surefoot.system import durable
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.manifest import sealed

ADAPTERS = ["full", "lora", "dora"]
PRECISIONS = ["fp32", "bf16", "fp16"]
QUICK = [("dora", "fp16")]
STEPS = 12  # 11 examples, 4 a step: 3 steps an epoch, the last of them short; 4 epochs
KILLED = -9
LOGGED_AFTER_THE_END = 12  # about so many lines of run.log follow the last write of the publication


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    base = tiny_llama(folder / "base", attention_dropout=0.1)
    rows = [
        {"instruction": f"Say {word} {k} times.", "input": "", "output": " ".join([word] * k)}
        for word in ("one", "two", "heron", "sky")
        for k in (1, 2, 4)
    ]
    (folder / "train.json").write_text(json.dumps(rows[:11]))
    (folder / "eval.json").write_text(json.dumps(rows[10:]))
    return folder, base


def write_config(world, adapter, precision, output):
    folder, base = world
    config = {
        "stage": "sft",
        "model": str(base),
        "data": {"train": str(folder / "train.json"), "eval": str(folder / "eval.json"), "max_length": 128},
        "precision": precision,
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2, "warmup": "2 steps"},
        "duration": f"{STEPS} steps",
        "eval_every": "5 steps",
        "checkpoint": {"every": "2 steps", "keep": 2},
        "output": str(output),
    }
    if adapter != "full":
        config["adapter"] = {"kind": adapter, "rank": 4, "alpha": 8, "dropout": 0.1}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def uninterrupted(server, world):
    """Adapter, precision -> run folder of a run that nothing disturbed; each is made once."""
    done = {}

    def get(adapter, precision):
        if (adapter, precision) not in done:
            output = world[0] / f"straight-{adapter}-{precision}"
            config = write_config(world, adapter, precision, output)
            log = output.with_suffix(".txt")
            assert server.run(["train", config], log) == 0, log.read_text()
            done[adapter, precision] = output
        return done[adapter, precision]

    return get


def random_kills(draw):
    """Two kills within one epoch, one before a log row, one in a save; each lies after what was reached before."""
    first = draw.randint(1, 2)
    return [
        {"at": "step", "n": first},
        {"at": "step", "n": first + 1},
        {"at": "log", "n": draw.randint(4, 7)},
        {"at": "sync", "n": draw.randint(1, 25)},
        {"at": "step", "n": draw.randint(9, STEPS)},
    ]


@pytest.mark.parametrize(("adapter", "precision"), representatives(product(ADAPTERS, PRECISIONS), *QUICK))
def test_killed_and_resumed_equals_uninterrupted(server, world, uninterrupted, adapter, precision):
    seed = random.SystemRandom().randrange(10**6)
    print("kill seed", seed)
    output = world[0] / f"broken-{adapter}-{precision}"
    config = write_config(world, adapter, precision, output)
    log = output.with_suffix(".txt")
    for kill in random_kills(random.Random(seed)):
        assert server.run(["train", config, "--resume"], log, kill) == KILLED, log.read_text()
        for folder in output.glob("checkpoint-*"):
            assert (folder / "MANIFEST.json").is_file(), "a checkpoint was visible before it was finished"
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted(adapter, precision), output) == []


@pytest.mark.parametrize("n", representatives(range(1, 21, 3), 13))
def test_a_kill_at_any_flush_of_a_save(server, world, uninterrupted, n):
    """Walk through the flushes of the first saves, one kill each."""
    output = world[0] / f"flush-{n}"
    config = write_config(world, "lora", "fp32", output)
    log = output.with_suffix(".txt")
    assert server.run(["train", config], log, {"at": "sync", "n": n}) == KILLED, log.read_text()
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted("lora", "fp32"), output) == []


@pytest.mark.parametrize("n", representatives([1, 6, 11, 16, 21, 40], 11))
def test_a_kill_while_a_thread_finishes_a_checkpoint(server, world, uninterrupted, n):
    """The steps go on meanwhile, so it is left to chance what has been reached; what is visible is whole."""
    output = world[0] / f"beside-{n}"
    config = write_config(world, "lora", "fp32", output)
    log = output.with_suffix(".txt")
    kill = {"at": "sync", "n": n, "beside": True}
    assert server.run(["train", config], log, kill) == KILLED, log.read_text()
    for folder in output.glob("checkpoint-*"):
        assert not verify_checkpoint(folder)
    assert server.run(["train", config, "--resume"], log, {**kill, "n": 10**9}) == 0, log.read_text()
    assert compare_folders(uninterrupted("lora", "fp32"), output) == []


@pytest.fixture(scope="module")
def again(server, world, uninterrupted):
    """The run of "lora", "fp32" once more, data already tokenized, and how many writes the whole command makes."""
    uninterrupted("lora", "fp32")
    output = world[0] / "again"
    log = output.with_suffix(".txt")
    never = {"at": "write", "n": 10**9}
    assert server.run(["train", write_config(world, "lora", "fp32", output)], log, never) == 0, log.read_text()
    return output, int(log.read_text().rpartition("writes:")[2])


PLACES = 8


@pytest.mark.parametrize("place", representatives(range(PLACES), PLACES - 1))
def test_a_kill_anywhere_in_the_command(server, world, uninterrupted, again, place):
    """From the first write of the records, before there is a config, to the last of the publication."""
    output = world[0] / f"place-{place}"
    config = write_config(world, "lora", "fp32", output)
    log = output.with_suffix(".txt")
    _, writes = again
    n = 1 + place * (writes - LOGGED_AFTER_THE_END - 1) // (PLACES - 1)
    print("killed before write", n, "of", writes)
    assert server.run(["train", config], log, {"at": "write", "n": n}) == KILLED, log.read_text()
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted("lora", "fp32"), output) == []


def test_two_fresh_runs_are_identical(uninterrupted, again):
    assert compare_folders(uninterrupted("lora", "fp32"), again[0]) == []


@pytest.mark.slow
def test_two_fresh_runs_in_16_bits_are_identical(server, world, uninterrupted):
    output = world[0] / "again-16"
    config = write_config(world, "dora", "fp16", output)
    log = output.with_suffix(".txt")
    assert server.run(["train", config], log) == 0, log.read_text()
    assert compare_folders(uninterrupted("dora", "fp16"), output) == []


@pytest.mark.parametrize("lost", representatives(["optimizer.safetensors", "state.json"], "optimizer.safetensors"))
def test_twin_a_resume_that_loses_something_is_noticed(server, world, uninterrupted, lost):
    """Put another step's file into a checkpoint (manifest mended, so that it verifies): the end must differ."""
    output = world[0] / f"twin-{lost}"
    config = write_config(world, "lora", "fp32", output)
    log = output.with_suffix(".txt")
    assert server.run(["train", config], log, {"at": "step", "n": 5}) == KILLED, log.read_text()
    older, newer = output / "checkpoint-2", output / "checkpoint-4"
    content = json.loads((newer / "MANIFEST.json").read_text())
    shutil.copy(older / lost, newer / lost)
    content["files"][lost] = {
        "size": (newer / lost).stat().st_size,
        "sha256": durable.sha256_file(newer / lost),
    }
    durable.write_json(newer / "MANIFEST.json", sealed(content))
    assert server.run(["train", config, "--resume"], log) == 0, log.read_text()
    assert compare_folders(uninterrupted("lora", "fp32"), output) != []
