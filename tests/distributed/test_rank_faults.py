"""What goes wrong on one rank and must not pass for a run that went well: through the command line; torchrun is the
real one."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from distributed.runs import (
    ENDLESS,
    FLIPS,
    FULL_DISK,
    LATE,
    LEAVES_FILES,
    LONGEST,
    alive,
    changed,
    rows,
    run_forked,
    start,
    surefoot,
    write_config,
    write_world,
)
from helpers.tiers import representatives
from surefoot.training.checkpoint import list_checkpoints, verify_checkpoint

SOON = 60.0  # seconds within which a broken run has ended
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return write_world(tmp_path_factory.mktemp("faults"))


def two(every: int = 100) -> dict[str, int]:
    return {"nproc": 2, "check_every": every}


def test_a_replica_that_differs_by_a_bit_is_noticed_at_the_next_comparison(world):
    output = world / "flipped"
    more = changed(world / "flips", FLIPS)  # before step 3
    code, said = run_forked(["train", write_config(world, output, parallel=two(4))], world / "flipped.txt", more)
    assert code == 3, said
    assert said.count("error:") == 1, said
    error = next(line for line in said.splitlines() if "error:" in line)
    assert "lora_A" in error
    assert "rank 1 and rank 0" in error
    assert rows(output)[-1]["current_steps"] == 4


def test_twin_a_replica_that_nobody_compares_trains_to_the_end(world):
    output = world / "unseen"
    more = changed(world / "flips", FLIPS)
    code, said = run_forked(["train", write_config(world, output, parallel=two())], world / "unseen.txt", more)
    assert code == 0, said


def temporary(output: Path) -> list[str]:
    return [path.name for path in output.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("victim", representatives([0, 1], 1))
def test_a_full_disk_on_one_rank_leaves_the_older_checkpoint_and_nothing_half_written(world, victim):
    output = world / f"full-{victim}"
    more = changed(world / f"disk-{victim}", **{f"rank_{victim}": FULL_DISK})  # at the second checkpoint
    config = write_config(world, output, parallel=two(), eval_every=None)
    code, said = run_forked(["train", config], world / f"full-{victim}.txt", more)
    assert code == 3, said
    assert said.count("error:") == 1, said
    error = next(line for line in said.splitlines() if "error:" in line)
    assert "checkpoint-4: " in error
    assert error.endswith("[SF-DISK-FULL]")
    assert ("rank 1: " in error) == (victim == 1)
    assert [one.step for one in list_checkpoints(output)] == [2]
    assert verify_checkpoint(output / "checkpoint-2") == []
    assert temporary(output) == []
    code, said = run_forked(["train", config, "--resume"], world / "resumed.txt")
    assert code == 0, said
    assert "resuming from" in said


def test_twin_without_tidying_up_half_a_checkpoint_is_left(world):
    """Of rank 0, which waits for the others' word when it is ended."""
    output = world / "untidy"
    more = changed(world / "untidy-rank", FULL_DISK, LEAVES_FILES)
    config = write_config(world, output, parallel=two(), eval_every=None)
    code, said = run_forked(["train", config], world / "untidy.txt", more)
    assert code == 3, said
    assert temporary(output) != []


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["", "twin: torchrun is not known"])
def test_ranks_that_meet_end_with_torchrun(world, known):
    """Rank 1 never comes, so rank 0 waits for it."""
    output = world / f"orphans-{known}"
    late = world / f"late-{known}"
    more = changed(world / f"meeting-{known}", LATE, of="surefoot.training.session")
    if not known:
        folder = Path(more["PYTHONPATH"].split(":")[0]) / "sitecustomize.py"
        folder.write_text("import os\nos.environ.pop('TORCHELASTIC_RUN_ID', None)\n" + folder.read_text())
    words = surefoot("train", write_config(world, output, **ENDLESS))[1:]
    started = start([*TORCHRUN, *words], output, {**more, "LATE": str(late)})
    until = time.monotonic() + LONGEST
    while not late.exists():
        assert started.process.poll() is None, started.log.read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    ranks = started.ranks()
    started.process.kill()
    gone, _ = psutil.wait_procs(list(ranks.values()), timeout=SOON if known else 5)
    try:
        assert (ranks[1] in gone) == known
    finally:
        for one in alive(list(ranks.values())):
            one.kill()
