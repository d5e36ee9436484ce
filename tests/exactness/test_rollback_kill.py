"""Kill -9 before, within and after a rollback, run the same command again, and the end is that of the run that went
back undisturbed: weights, moments, state, logged losses, the record and its event.

Every stage; a second kill falls anywhere in the resumed run. The seed is drawn anew and printed.
"""

import json
import random

import pytest

from faults.trials import fresh_seed
from helpers.fork_server import ForkServer
from helpers.rollback_runs import examples_by_step, one_of_each, rollback_world, write_config
from helpers.tiers import representatives
from surefoot.report.verification import compare_folders
from surefoot.runs.rollback import RECORD

KILLED = -9
CASES = [("sft", "lora"), ("kto", "dora"), ("ppo", "lora"), ("sft", "full"), ("reward", "dora"), ("dpo", "lora")]
CASES += [("ppo", "full")]
BAD = (4, 5)  # steps whose data are bad, in a row
NEVER = 10**9


class World:
    """Per stage and adapter the run that went back undisturbed, its bad records and its number of writes."""

    def __init__(self, folder, server):
        self.folder, self.server = rollback_world(folder), server
        self._bad, self._straight = {}, {}

    def run(self, name, stage, adapter, kill=None, *arguments, bad=()):
        log = self.folder / f"{name}.txt"
        config = write_config(self.folder, name, stage, adapter)
        return self.server.run(["train", config, *arguments], log, kill, bad=bad), log

    def bad(self, stage):
        if stage not in self._bad:
            name = f"clean-{stage}"
            code, log = self.run(name, stage, "lora")
            assert code == 0, log.read_text()[-3000:]
            self._bad[stage] = one_of_each(examples_by_step(self.folder / name), BAD)
        return self._bad[stage]

    def straight(self, stage, adapter):
        """Its folder, and how many writes the command makes."""
        if (stage, adapter) not in self._straight:
            name = f"straight-{stage}-{adapter}"
            code, log = self.run(name, stage, adapter, {"at": "write", "n": NEVER}, bad=self.bad(stage))
            assert code == 0, log.read_text()[-3000:]
            assert (self.folder / name / RECORD).is_file()
            self._straight[stage, adapter] = self.folder / name, int(log.read_text().rpartition("writes:")[2])
        return self._straight[stage, adapter]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ForkServer() as server:
        yield World(tmp_path_factory.mktemp("world"), server)


def story(run):
    """The record, and the texts of the rollbacks among the events."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    record = json.loads((run / RECORD).read_text())
    for one in record["rollbacks"]:
        one["why"] = one["why"].partition(" examples ")[0]
    return record["rollbacks"], [event["step"] for event in events if event["kind"] == "rollback"]


def killed_and_resumed(world, name, stage, adapter, kills):
    bad, straight = world.bad(stage), world.straight(stage, adapter)[0]
    for number, kill in enumerate(kills):
        code, log = world.run(name, stage, adapter, kill, *(["--resume"] if number else []), bad=bad)
        assert code in (KILLED, 0), log.read_text()[-3000:]
    code, log = world.run(name, stage, adapter, None, "--resume", bad=bad)
    assert code == 0, log.read_text()[-3000:]
    run = world.folder / name
    assert story(run) == story(straight)
    assert compare_folders(straight, run) == []


@pytest.mark.parametrize(("stage", "adapter"), representatives(CASES, ("sft", "lora")))
def test_killed_anywhere_around_a_rollback_it_ends_as_undisturbed(world, stage, adapter):
    seed = fresh_seed()
    print("kill seed", seed)
    draw = random.Random(seed)
    writes = world.straight(stage, adapter)[1]
    around = {"at": "write", "n": draw.randint(writes // 3, 2 * writes // 3)}
    kills = [around, {"at": "write", "n": draw.randint(1, 60)}]
    killed_and_resumed(world, f"killed-{stage}-{adapter}", stage, adapter, kills)


PLACES = 4


@pytest.mark.parametrize("place", representatives(range(PLACES)))
def test_a_kill_within_the_rollback(world, place):
    """Spread over the writes from the bad steps on to the first save after them: failure folders, the record, the
    resumed session's records, events and logs."""
    writes = world.straight("sft", "lora")[1]
    n = int(writes * (0.35 + 0.3 * place / (PLACES - 1)))
    print("killed before write", n, "of", writes)
    killed_and_resumed(world, f"within-{place}", "sft", "lora", [{"at": "write", "n": n}])


@pytest.mark.soak("each write of a run that goes back")
def test_a_kill_before_each_write_of_a_run_that_goes_back(world):
    writes = world.straight("sft", "lora")[1]
    for n in range(1, writes):
        killed_and_resumed(world, f"each-{n}", "sft", "lora", [{"at": "write", "n": n}])


def test_twin_a_resume_that_forgets_the_rollback_is_noticed(world):
    """The record is lost before a checkpoint knows of it, and the run learns from the data that it was to pass over."""
    straight, bad = world.straight("sft", "lora")[0], world.bad("sft")
    code, log = world.run("forgotten", "sft", "lora", {"at": "again", "n": 2}, bad=bad)
    assert code == KILLED, log.read_text()[-3000:]
    run = world.folder / "forgotten"
    (run / RECORD).unlink()
    code, log = world.run("forgotten", "sft", "lora", None, "--resume")  # nothing is bad any more
    assert code == 0, log.read_text()[-3000:]
    assert compare_folders(straight, run) != []
