"""An exception outside of a step, of every stage: an evaluation, the making of batches, what the stage carries on. It
leaves a folder, a replay raises it again, and the run can go on."""

import hashlib
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from helpers.faults import gives
from helpers.rollback_runs import rollback_world, write_config
from helpers.tiers import representatives
from surefoot.commands.main import main
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.methods.ppo.memory import Average
from surefoot.report.death import find_death
from surefoot.report.flight import recent
from surefoot.runs.failures import recorder as recorder_module
from surefoot.runs.failures import replay as replay_module
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training import loop as loop_module
from surefoot.training.failure import Attempt, read_failure

STAGES = ("sft", "pretrain", "reward", "dpo", "kto", "ppo")
STEP = 5  # with which a rollout of stage ppo begins
EVALUATED = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return rollback_world(tmp_path_factory.mktemp("phases"))


class Plant:
    """Raises in the code that it was put into while it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch, self.armed = patch, False

    def into(self, kind: type, method: str, error: Exception) -> None:
        plain = getattr(kind, method)

        def planted(own: Any, *given: Any, **named: Any) -> Any:
            if self.armed:
                raise error
            return plain(own, *given, **named)

        self.patch.setattr(kind, method, planted)

    def during(self, module: Any, function: str, step: int | None = None) -> None:
        """It is armed in this function; step: only where that is among what the function is given."""
        plain = getattr(module, function)

        def arming(*given: Any, **named: Any) -> Any:
            steps = [getattr(one, "step", one) for one in given]
            self.armed = step is None or step in steps
            try:
                return plain(*given, **named)
            finally:
                self.armed = False

        self.patch.setattr(module, function, arming)

    def during_phase(self, phase: str, step: int) -> None:
        """It is armed in this phase of the loop at this step."""
        plain = loop_module._recorded

        @contextmanager
        def arming(job: Any, attempt: Attempt) -> Any:
            self.armed = (attempt.phase, attempt.step) == (phase, step)
            try:
                with plain(job, attempt):
                    yield
            finally:
                self.armed = False

        self.patch.setattr(loop_module, "_recorded", arming)


@pytest.fixture
def plant(monkeypatch):
    return Plant(monkeypatch)


def module_raises(plant: Plant) -> None:
    plant.into(torch.nn.Embedding, "forward", IndexError("a token that no row has, token=hf_abcdefghijklmnop"))


def data_raise(plant: Plant) -> None:
    plant.into(TokenizedDataset, "__getitem__", ValueError("a record that cannot be read"))


def config(world: Path, name: str, stage: str, **changes: Any) -> str:
    """It is evaluated, on what it learns from, after every second step."""
    path = Path(write_config(world, name, stage))
    own = yaml.safe_load(path.read_text())
    data = own["data"] | {"eval": own["data"]["train"], "workers": 0}
    given = {"data": data, "eval_every": "2 steps", "duration": "6 steps", **changes}
    return write_config(world, name, stage, **given)


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(words))
    return result.exit_code, result.output


def checkpoints(run: Path) -> dict[str, str]:
    files = sorted(path for path in run.glob("checkpoint-*/**/*") if path.is_file())
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fails(world: Path, name: str, path: str) -> Path:
    """Its one folder, of a run that ended as one does by an exception in a step."""
    code, said = call("train", path)
    assert code == 1, said
    (kept,) = (world / name).glob("failure-*")
    assert f"surefoot replay {kept}" in said
    assert find_death(world / name) is None
    assert "hf_abcdef" not in (kept / "failure.json").read_text()
    return kept


def again(plant: Plant, plain: Any, kept: Path, *words: str) -> tuple[int, str]:
    """Replayed with the same fault planted. plain: what planted it."""
    with pytest.MonkeyPatch.context() as patch:
        fault = Plant(patch)
        plain(fault)
        fault.during(replay_module, "_rerun")
        return call("replay", str(kept), *words)


def told_of(kept: Path) -> dict[str, Any]:
    """What a script is told of a replay that goes through."""
    code, said = call("replay", str(kept), "--json")
    assert code == 6, said
    told = json.loads(said)
    assert (told["same"], told["error"], told["now"] and told["now"].get("module")) == (False, "", None)
    return told


def reproduced(kept: Path, plant: Plant, plain: Any) -> dict[str, Any]:
    """What a script is told. With its twin: without the fault it goes through."""
    plant.patch.undo()
    told_of(kept)
    code, said = again(plant, plain, kept, "--json")
    assert code == 0, said
    told = json.loads(said)
    assert (told["kind"], told["same"]) == ("crash", True)
    return told


def goes_on(world: Path, name: str, path: str, before: dict[str, str]) -> None:
    assert before
    assert checkpoints(world / name) == before
    code, said = call("train", path, "--resume")
    assert code == 0, said


@pytest.mark.parametrize("stage", representatives(STAGES, "dpo"))
def test_an_evaluation_that_raises_is_kept_and_raised_again(world, plant, stage):
    name = f"{stage}-evaluation"
    path = config(world, name, stage)
    module_raises(plant)
    plant.during(loop_module, "_evaluated", EVALUATED)
    kept = fails(world, name, path)
    assert kept.name == f"failure-{EVALUATED}-evaluation"
    found = read_failure(kept)
    failure = found.failure
    assert (failure.phase, failure.step, failure.needs) == ("evaluation", EVALUATED, "weights")
    assert failure.place.endswith("embed_tokens")
    assert found.weights is not None
    at_a_batch = stage not in ("kto", "ppo")  # the others are at their KL term, or at an answer
    assert [list(one.examples) for one in found.batches] == ([list(failure.examples)] if at_a_batch else [])
    before = checkpoints(world / name)
    told = reproduced(kept, plant, module_raises)
    assert (told["phase"], told["step"], told["error"].partition(":")[0]) == ("evaluation", EVALUATED, "IndexError")
    goes_on(world, name, path, before)


@pytest.mark.parametrize("stage", representatives(STAGES, "sft"))
def test_batches_that_cannot_be_made_are_named_and_made_again(world, plant, stage):
    name = f"{stage}-batches"
    path = config(world, name, stage)
    data_raise(plant)
    plant.during_phase("batches", STEP)
    kept = fails(world, name, path)
    assert kept.name == f"failure-{STEP}-batches"
    found = read_failure(kept)
    failure = found.failure
    rollout = stage == "ppo"
    assert (failure.phase, failure.place, found.batches) == ("batches", "", [])
    assert failure.needs == {"ppo": "run", "kto": "weights"}.get(stage, "data")
    assert (found.weights is None) == (failure.needs != "weights")
    before = checkpoints(world / name)
    told = reproduced(kept, plant, data_raise)
    assert (told["phase"], told["step"], told["error"].partition(":")[0]) == ("batches", STEP, "ValueError")
    assert told["start"] == (3 if rollout else None)
    goes_on(world, name, path, before)
    learned = {line["step"]: set(line["examples"]) for line in recent(world / name)}
    steps = (STEP, STEP + 1) if rollout else (STEP,)  # a rollout is of the prompts of both
    assert set(failure.examples) == set().union(*(learned[step] for step in steps))
    assert set(failure.examples) != learned[STEP - 1]  # twin


@pytest.mark.parametrize("stage", representatives(["kto", "ppo"], "kto"))
def test_a_model_that_raises_before_the_step_is_named(world, plant, stage):
    name = f"{stage}-rollout"
    path = config(world, name, stage, eval_every=None)
    module_raises(plant)
    plant.during_phase("batches", STEP)
    kept = fails(world, name, path)
    assert read_failure(kept).failure.place.endswith("embed_tokens")
    reproduced(kept, plant, module_raises)
    if stage == "ppo":  # the steps that lead to it can fail as well
        module_raises(plant)
        plant.during(replay_module, "_take_steps_to")
        code, said = call("replay", str(kept))
        assert code == 6, said
        (now,) = [line for line in said.splitlines() if "checkpoint-3" in line]
        assert gives(now, "IndexError")


def test_what_a_stage_carries_on_is_taken_again_from_the_checkpoint(world, plant):
    def average_raises(fault: Plant) -> None:
        fault.into(Average, "update", ZeroDivisionError("the average"))

    name = "ppo-memory"
    path = config(world, name, "ppo", eval_every=None)
    average_raises(plant)
    plant.during_phase("memory", EVALUATED)
    kept = fails(world, name, path)
    assert kept.name == f"failure-{EVALUATED}-memory"
    failure = read_failure(kept).failure
    assert (failure.needs, len(failure.examples)) == ("run", 4)
    before = checkpoints(world / name)
    told = reproduced(kept, plant, average_raises)
    assert (told["phase"], told["step"], told["start"]) == ("memory", EVALUATED, 3)
    assert told["error"].startswith("ZeroDivisionError")
    goes_on(world, name, path, before)


def test_an_evaluation_whose_weights_were_too_large_comes_from_the_checkpoint(world, plant):
    name = "large"
    path = config(world, name, "sft", checkpoint={"every": "3 steps"})
    plant.patch.setattr(recorder_module, "LARGEST", 0)
    module_raises(plant)
    plant.during(loop_module, "_evaluated", EVALUATED)
    seen: list[dict[str, torch.Tensor]] = []
    real, evaluated = replay_module._rerun, loop_module._evaluated

    def weights(engine):
        seen.append({key: one.detach().clone() for key, one in engine.parameters.items()})

    def evaluating(job, *given):
        weights(job.engine)
        return evaluated(job, *given)

    def looking(kept, run, loaded, *given):
        weights(loaded.engine)
        return real(kept, run, loaded, *given)

    plant.patch.setattr(loop_module, "_evaluated", evaluating)
    kept = fails(world, name, path)
    assert read_failure(kept).weights is None

    plant.patch.undo()
    plant.patch.setattr(replay_module, "_rerun", looking)
    assert told_of(kept)["start"] == 3
    for checkpoint in (world / name).glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert told_of(kept)["start"] == 0
    earlier, then, *again = seen  # of the evaluations after steps 2 and 4, and of both replays
    assert all(torch.equal(one[key], then[key]) for one in again for key in then)
    assert not all(torch.equal(earlier[key], then[key]) for key in then)  # twin


@pytest.mark.parametrize("phase", representatives(["evaluation", "batches"], "evaluation"))
def test_by_the_plain_path_and_for_a_script(world, plant, phase):
    name = f"plain-{phase}"
    precision = {"precision": "bf16"}
    path = config(world, name, "sft", **precision)
    plain = module_raises if phase == "evaluation" else data_raise
    plain(plant)
    if phase == "evaluation":
        plant.during(loop_module, "_evaluated", EVALUATED)
    else:
        plant.during_phase("batches", EVALUATED)
    kept = fails(world, name, path)
    plant.patch.undo()
    code, said = call("replay", str(kept), "--plain", "--json")
    assert code == 6, said
    assert (json.loads(said)["plain"], json.loads(said)["error"]) == (True, "")
    code, said = again(plant, plain, kept, "--plain", "--json")
    assert code == 0, said
    told = json.loads(said)
    assert (told["phase"], told["kind"], told["same"], told["start"]) == (phase, "crash", True, None)
    assert told["plain"]


def test_answers_that_fail_in_an_evaluation_are_asked_again(world, plant):
    """The loss is done by then: there is no batch, and the whole evaluation is taken again."""
    name = "answers"
    path = config(world, name, "sft", samples={"count": 2, "max_new_tokens": 4})
    module_raises(plant)
    from surefoot.runs import evaluating

    plant.during(evaluating, "answer_examples")
    kept = fails(world, name, path)
    found = read_failure(kept)
    assert (found.failure.phase, found.batches) == ("evaluation", [])
    plant.patch.undo()
    module_raises(plant)
    plant.during(evaluating, "answer_examples")
    assert call("replay", str(kept))[0] == 0
    plant.patch.undo()
    assert call("replay", str(kept))[0] == 6


REFUSED = {
    "a fault in words of its own": EnvironmentFault(Fault("disk", "is full", code="SF-DISK")),
    "a device that fails": torch.AcceleratorError("CUDA error: uncorrectable ECC error"),
}


@pytest.mark.parametrize("name", representatives(REFUSED, "a fault in words of its own"))
def test_twin_what_is_no_crash_leaves_no_folder(world, plant, name):
    path = config(world, name, "sft")
    plant.into(torch.nn.Embedding, "forward", REFUSED[name])
    plant.during(loop_module, "_evaluated", EVALUATED)
    assert call("train", path)[0] == 3
    assert not list((world / name).glob("failure-*"))
