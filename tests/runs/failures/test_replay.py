"""What went wrong in a run lies in a folder of its own, and a replay of it finds the same number at the same module."""

import dataclasses
import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaMLP

from helpers.faults import lines_giving, prints_fault, raises_fault
from helpers.tiers import representatives
from helpers.trained_runs import heron_folder, heron_train
from surefoot.commands.main import main
from surefoot.methods import examples
from surefoot.report.flight import recent
from surefoot.runs.failures import recorder as failures_module
from surefoot.runs.failures import replay as replay_module
from surefoot.runs.failures.replay import replay
from surefoot.system.durable import write_json
from surefoot.training import loop as loop_module
from surefoot.training.failure import Largest, read_failure
from surefoot.training.manifest import manifest, sealed

BAD_STEP = 3
DROPOUT = {"kind": "lora", "rank": 4, "dropout": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("replay"))


def train(folder, name, *arguments, **changes):
    ways = {"duration": "6 steps", "checkpoint": {"every": "2 steps"}, "guard": {"max_consecutive": 2}} | changes
    return heron_train(folder, name, *arguments, **ways)


def before_step(monkeypatch, step, act):
    """act(engine) right before that step."""
    real = loop_module.train_step

    def acting(engine, *arguments, **named):
        if named["step"] == step:
            act(engine)
        return real(engine, *arguments, **named)

    monkeypatch.setattr(loop_module, "train_step", acting)


def around_find_origin(monkeypatch, act):
    """act(engine) right before the recorded step is run again."""
    real = replay_module.find_origin

    def acting(engine, *arguments, **named):
        act(engine)
        return real(engine, *arguments, **named)

    monkeypatch.setattr(replay_module, "find_origin", acting)


def spoil_weight(part):
    def act(engine):
        with torch.no_grad():
            next(one for name, one in engine.parameters.items() if part in name)[0, 0] = float("nan")

    return act


def run_again(path, *arguments):
    result = CliRunner().invoke(main, ["replay", str(path), *arguments])
    return result.exit_code, result.output


def found_again(path, *arguments):
    """Exit code, and what a script is told."""
    code, said = run_again(path, *arguments, "--json")
    return code, json.loads(said)


def test_a_weight_that_is_not_finite_is_found_again_bit_for_bit(folder, monkeypatch):
    before_step(monkeypatch, BAD_STEP, spoil_weight("layers.1.mlp.up_proj.lora_B"))
    result = train(folder, "weight", kernels={"adapter": "plain"})
    assert result.exit_code == 5
    kept = folder / "weight" / "failure-3"
    assert f"surefoot replay {kept}" in result.output
    origin = read_failure(kept).failure.finding.origin
    assert origin.module.endswith("layers.1.mlp.up_proj.lora_B.default")
    assert origin.phase == "forward"
    monkeypatch.undo()
    (weight,) = read_failure(kept).failure.bad_weights
    assert weight.startswith("base_model.model.model.layers.1.mlp.up_proj.lora_B")
    code, found = found_again(kept)
    assert (code, found["same"], found["same_bits"]) == (0, True, True), found
    assert weight in run_again(kept)[1]
    code, found = found_again(kept, "--plain")
    assert (code, found["plain"], found["same"]) == (0, True, True), found
    events = (folder / "weight" / "events.jsonl").read_text()
    assert "failure-3" in events
    assert sorted(path.name for path in (folder / "weight").glob("failure-*")) == ["failure-3", "failure-4"]


@pytest.fixture(scope="module", params=representatives(["off", "on"], "off"))
def overflown(request, folder):
    """Step 1 makes the weights so large that step 2 overflows. Its layers are computed once, or twice."""
    name = f"overflown-{request.param}"
    result = train(folder, name, "optim.lr=1e30", gradient_checkpointing=request.param)
    assert result.exit_code == 5, result.output
    return folder / name, result.output


def test_what_attention_spoils_is_told_as_its_own_and_with_the_weight_that_is_too_large(overflown):
    """Queries, keys and values are finite; their scores are not."""
    run, said = overflown
    failure = read_failure(run / "failure-2").failure
    origin, attention = failure.finding.origin, "base_model.model.model.layers.0.self_attn"
    assert (origin.module, origin.phase, origin.made_in) == (f"{attention}.o_proj", "input", attention)
    weights = load_file(run / "failure-2" / "weights.safetensors")
    ordered = sorted(weights.items())
    name, largest = max(((key, float(one.abs().max())) for key, one in ordered), key=lambda one: one[1])
    assert (failure.largest.name, failure.largest.magnitude) == (name, largest)
    assert largest > 9e29
    assert lines_giving(said, 2, f"{attention}.o_proj", attention, name, f"{largest:.4g}", run / "failure-2")
    for arguments in ((), ("--plain",)):
        code, said = run_again(run / "failure-2", *arguments)
        assert code == 0, said
        assert len(lines_giving(said, f"{attention}.o_proj", attention)) == 2
        assert said.count("o_proj.") == said.count("o_proj.lora_B") == 1  # the largest weight alone
        assert lines_giving(said, name, f"{largest:.4g}")
    assert found_again(run / "failure-2")[1]["same_bits"]


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_of_equal_weights_the_first_name_is_told(order):
    weights = {"a": torch.tensor([1.0, torch.inf]), "b": torch.tensor([-2.0]), "c": torch.tensor([2.0])}
    asked = {name: weights[name] for name in order}
    assert failures_module.largest_weight(asked) == Largest("b", 2.0)
    asked["c"] = torch.tensor([2.5])  # twin: a larger one comes before a name
    assert failures_module.largest_weight(asked) == Largest("c", 2.5)
    assert failures_module.largest_weight({"a": torch.tensor([torch.nan])}) is None


def rewrite(folder, told):
    """failure.json, and its size and hash in the manifest."""
    write_json(folder / "failure.json", told)
    listed = json.loads((folder / "MANIFEST.json").read_text())
    listed["files"].update(manifest(folder, [folder / "failure.json"], 0, {})["files"])
    write_json(folder / "MANIFEST.json", sealed(listed))


def test_an_older_record_is_read_and_found_again(overflown, tmp_path):
    """It told the output of the module behind, and no weight."""
    copy = tmp_path / "failure-2"
    shutil.copytree(overflown[0] / "failure-2", copy)
    told = json.loads((copy / "failure.json").read_text())
    del told["largest"], told["finding"]["origin"]["made_in"]
    told["finding"]["origin"]["phase"] = "forward"
    rewrite(copy, told)
    assert read_failure(copy).failure.largest is None
    for arguments in ((), ("--plain",)):
        code, said = run_again(copy, *arguments)
        assert code == 0, said
        assert lines_giving(said, "base_model.model.model.layers.0.self_attn.o_proj")
        assert "lora_" not in said  # of no weight
    told["finding"]["origin"]["module"] = "base_model.model.model.layers.0.mlp"  # twin
    rewrite(copy, told)
    assert run_again(copy)[0] == 6


@pytest.fixture(scope="module")
def whole(folder):
    """What a run left whose weight was spoilt, and whose layers run as one kernel each."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, BAD_STEP, spoil_weight("layers.1.mlp.up_proj.lora_B"))
        train(folder, "whole")
    return folder / "whole" / "failure-3"


def test_a_part_of_a_module_that_a_kernel_runs_whole_is_told_under_the_name_of_the_module(whole, monkeypatch):
    module = read_failure(whole).failure.finding.origin.module
    code, said = run_again(whole, "--plain")
    assert code == 0, said
    assert lines_giving(said, module, inside := "lora_B.default")
    found = found_again(whole, "--plain")[1]
    assert (found["same"], found["now"]["module"]) == (True, f"{module}.{inside}")  # in full
    # twin: elsewhere it has its own name
    real = replay_module.read_failure

    def elsewhere(path):
        kept = real(path)
        origin = dataclasses.replace(kept.failure.finding.origin, module="other", made_in="other")
        finding = dataclasses.replace(kept.failure.finding, origin=origin)
        return dataclasses.replace(kept, failure=dataclasses.replace(kept.failure, finding=finding))

    monkeypatch.setattr(replay_module, "read_failure", elsewhere)
    code, said = run_again(whole, "--plain")
    assert code == 6
    assert lines_giving(said, f"{module}.{inside}")
    assert not lines_giving(said, inside)


def test_packed_rows_are_run_again_packed_and_by_the_plain_path_padded(folder, monkeypatch):
    before_step(monkeypatch, BAD_STEP, spoil_weight("layers.1.mlp.up_proj.lora_B"))
    data = {"train": str(folder / "train.json"), "max_length": 128, "packing": "on"}
    result = train(folder, "packed", data=data, batch={"size": 4, "micro": 4})
    assert result.exit_code == 5, result.output
    kept = folder / "packed" / "failure-3"
    assert read_failure(kept).batches[0].documents
    monkeypatch.undo()
    code, found = found_again(kept)
    assert (code, found["same_bits"]) == (0, True), found
    assert found_again(kept, "--plain")[1]["now"] is not None


def test_base_and_data_that_have_been_moved_are_named_and_held_against_the_run(tmp_path, monkeypatch):
    heron_folder(tmp_path)
    before_step(monkeypatch, BAD_STEP, spoil_weight("layers.1.mlp.up_proj.lora_B"))
    train(tmp_path, "run")
    monkeypatch.undo()
    kept = tmp_path / "run" / "failure-3"
    base, data = tmp_path / "elsewhere", tmp_path / "other.json"
    (tmp_path / "base").rename(base)
    (tmp_path / "train.json").rename(data)
    code, said = run_again(kept)
    assert code == 2
    for key, path in (("model.path", tmp_path / "base"), ("data.train.path", tmp_path / "train.json")):
        (fault,) = lines_giving(said, f"{key}:", path, "[SF-FILE-MISSING]")
        assert f"surefoot replay {kept} model.path=…" in fault
    there = [f"model.path={base}", f"data.train={data}"]
    code, found = found_again(kept, *there)
    assert (code, found["same_bits"]) == (0, True), found
    code, said = run_again(kept, *there, "optim.lr=1")
    assert code == 2
    assert "override optim.lr=1" in said
    data.write_text(data.read_text().replace("heron heron", "trout heron"))
    assert run_again(kept, *there)[0] == 4  # twin: not what the run learned from


def test_twin_a_run_without_a_fault_keeps_nothing(folder):
    assert train(folder, "sound").exit_code == 0
    assert not list((folder / "sound").glob("failure-*"))
    assert [line["step"] for line in recent(folder / "sound")] == [1, 2, 3, 4, 5, 6]


def test_twin_a_replay_with_the_weight_repaired_is_not_the_same(whole, monkeypatch):
    monkeypatch.setattr("surefoot.runs.failures.replay._load", lambda *arguments: None)
    code, said = run_again(whole)
    assert code == 6, said


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_gradient_spoilt_in_one_module_is_found_there_again(folder, monkeypatch):
    """The forward pass of every module is finite; what one MLP passes back is not, from one step on."""
    plain = LlamaMLP.forward
    active = {"on": False}

    def spoilt(self, x):
        bad = active["on"] and self is active.get("module")
        return plain(self, Spoilt.apply(x) if bad else x)

    def act(engine):
        active["on"] = True
        active["module"] = next(one for name, one in engine.model.named_modules() if name.endswith("layers.1.mlp"))

    monkeypatch.setattr(LlamaMLP, "forward", spoilt)
    before_step(monkeypatch, BAD_STEP, act)
    result = train(folder, "backward")
    assert result.exit_code == 5, result.output
    failure = read_failure(folder / "backward" / "failure-3").failure
    origin = failure.finding.origin
    assert origin.module.endswith("layers.1.mlp")
    assert origin.phase == "backward"
    assert failure.bad_weights == ()
    assert all(abs(loss) < float("inf") for loss in failure.finding.losses)
    around_find_origin(monkeypatch, act)
    code, found = found_again(folder / "backward" / "failure-3")
    assert (code, found["same_bits"]) == (0, True), found
    monkeypatch.setattr(LlamaMLP, "forward", plain)  # twin: with a sound kernel the step is finite
    code, found = found_again(folder / "backward" / "failure-3")
    assert (code, found["same"], found["now"], found["error"]) == (6, False, None, "")


def test_an_overflow_of_fp16_is_not_there_in_fp32(folder, monkeypatch):
    def act(engine):
        with torch.no_grad():
            for name, one in engine.parameters.items():
                if "layers.1.mlp.down_proj.lora" in name:
                    one.fill_(300.0)  # a sum over 4 of products of 300 x 300 is beyond 65,504

    before_step(monkeypatch, BAD_STEP, act)
    result = train(folder, "half", precision={"compute": "fp16"})
    assert result.exit_code == 5, result.output
    kept = folder / "half" / "failure-3"
    origin = read_failure(kept).failure.finding.origin
    assert origin.tensor.dtype == "float16"
    assert ".layers.1.mlp.down_proj" in origin.module
    code, found = found_again(kept)
    assert (code, found["same_bits"]) == (0, True), found
    code, found = found_again(kept, "--plain")
    assert (code, found["same"], found["now"], found["error"]) == (6, False, None, "")


def test_an_exception_in_a_module_is_kept_and_raised_again(folder, monkeypatch):
    plain = LlamaMLP.forward

    def refusing(self, x):
        if refusing.on:
            raise RuntimeError("no such kernel, token=hf_abcdefghijklmnop")
        return plain(self, x)

    refusing.on = False
    before_step(monkeypatch, BAD_STEP, lambda engine: setattr(refusing, "on", True))
    monkeypatch.setattr(LlamaMLP, "forward", refusing)
    result = train(folder, "crash")
    assert result.exit_code == 1
    kept = folder / "crash" / "failure-3"
    failure = read_failure(kept).failure
    assert failure.kind == "crash"
    assert failure.place.endswith("layers.0.mlp")
    assert "hf_abc" not in (kept / "failure.json").read_text()
    refusing.on = False
    assert run_again(kept)[0] == 6
    around_find_origin(monkeypatch, lambda engine: setattr(refusing, "on", True))
    code, found = found_again(kept)
    assert (code, found["kind"], found["same"]) == (0, "crash", True), found
    assert found["error"].startswith("RuntimeError")


def raising(error):
    def act(engine):
        raise error

    return act


def test_nothing_of_a_device_that_failed_is_kept(folder, monkeypatch):
    before_step(monkeypatch, BAD_STEP, raising(torch.AcceleratorError("ECC")))
    result = train(folder, "device")
    assert result.exit_code == 3
    assert prints_fault(result.stderr, "SF-DEVICE", "training", "cpu", "ECC")
    assert not list((folder / "device").glob("failure-*"))


def test_what_cannot_be_kept_never_hides_the_error_of_the_run(folder, monkeypatch):
    def broken(*given, **named):
        raise KeyError("hidden")

    before_step(monkeypatch, BAD_STEP, raising(ZeroDivisionError("own")))
    monkeypatch.setattr(failures_module, "place_of_error", broken)
    result = train(folder, "hidden")
    assert lines_giving(result.output, "ZeroDivisionError", "own")
    assert lines_giving(result.output, BAD_STEP, "'hidden'")


def spoiled_loss(monkeypatch) -> list[int]:
    """Let the loss be NaN while the returned list has an item."""
    plain, on = examples.token_loss, []

    def made(*given):
        objective = plain(*given)

        def loss(model, batch):
            found = objective(model, batch)
            return dataclasses.replace(found, loss=found.loss * float("nan")) if on else found

        return loss

    monkeypatch.setattr(examples, "token_loss", made)
    return on


@pytest.mark.parametrize("adapter", representatives([DROPOUT, None], DROPOUT))
def test_weights_that_were_too_large_to_keep_come_from_the_last_checkpoint(folder, monkeypatch, adapter):
    """A loss that is NaN at step 6 alone: step 5 and, from the base model, the steps 1 to 5 are taken again."""
    name = f"large-{adapter is None}"
    on = spoiled_loss(monkeypatch)
    monkeypatch.setattr(failures_module, "LARGEST", 0)
    before_step(monkeypatch, 6, lambda engine: on.append(1))
    result = train(folder, name, adapter=adapter)
    assert result.exit_code == 0, result.output  # one step of six
    kept = folder / name / "failure-6"
    assert read_failure(kept).weights is None
    seen = []

    def begin(engine):
        seen.append({key: one.detach().clone() for key, one in engine.parameters.items()})
        on.append(1)

    around_find_origin(monkeypatch, begin)
    on.clear()
    assert replay(kept).same_bits
    for checkpoint in (folder / name).glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    on.clear()
    assert replay(kept).same_bits
    assert all(torch.equal(seen[0][key], seen[1][key]) for key in seen[0])


@pytest.fixture(scope="module")
def kept(folder):
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, BAD_STEP, spoil_weight("lora_B"))
        train(folder, "kept")
    return folder / "kept" / "failure-3"


def test_a_folder_that_is_none_is_one_line(folder, kept, tmp_path):
    for path in (tmp_path, tmp_path / "nothing", folder / "kept"):
        code, said = run_again(path)
        assert code == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["failure.json", "batch.safetensors", "weights.safetensors", "config.yaml"])
def test_a_damaged_folder_is_one_line(kept, tmp_path, name):
    copy = tmp_path / "failure-3"
    shutil.copytree(kept, copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    code, said = run_again(copy)
    assert code == 4
    assert name in said
    assert said.count("\n") == 1
    (copy / name).unlink()
    assert run_again(copy)[0] == 4


def test_other_data_are_refused_and_a_moved_folder_is_not(folder, kept, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(kept, moved)
    assert run_again(moved)[0] == 0
    was = (folder / "train.json").read_text()
    (folder / "train.json").write_text(was.replace("heron", "trout"))
    code, said = run_again(moved)
    (folder / "train.json").write_text(was)
    assert code == 4
    assert prints_fault(said, "SF-RESUME-CHANGED", moved)


def test_a_run_keeps_few_folders_the_first_and_the_newest(folder, monkeypatch):
    bad = spoiled_loss(monkeypatch)
    monkeypatch.setattr(failures_module, "MOST", 2)
    real = loop_module.train_step

    def every_other(engine, *arguments, **named):
        bad[:] = [1] * (named["step"] % 2)
        return real(engine, *arguments, **named)

    monkeypatch.setattr(loop_module, "train_step", every_other)
    assert train(folder, "few").exit_code == 0
    assert sorted(path.name for path in (folder / "few").glob("failure-*")) == ["failure-1", "failure-5"]


def test_a_folder_holds_no_code(kept):
    assert sorted(path.name for path in kept.iterdir()) == [
        "MANIFEST.json",
        "batch.safetensors",
        "config.yaml",
        "environment.json",
        "failure.json",
        "flight.jsonl",
        "plan.json",
        "weights.safetensors",
    ]


def test_a_disk_that_refuses_changes_nothing_of_the_run(folder, monkeypatch):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    before_step(monkeypatch, BAD_STEP, spoil_weight("lora_B"))
    monkeypatch.setattr(failures_module, "write_failure", full)
    result = train(folder, "full")
    assert result.exit_code == 5
    assert lines_giving(result.output, BAD_STEP, 28)  # ENOSPC


def test_a_loss_of_a_python_caller_is_asked_for(kept, tmp_path):
    copy = tmp_path / "failure-3"
    shutil.copytree(kept, copy)
    told = json.loads((copy / "MANIFEST.json").read_text())
    told["identity"]["objective"] = "mine.loss"
    write_json(copy / "MANIFEST.json", sealed(told))
    with raises_fault("SF-OWN-FUNCTION", copy):
        replay(copy)
