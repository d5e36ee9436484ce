"""A teacher on a server: the loss and gradient of the same teacher in memory, what is refused, and replay on resume."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.killed import killed
from helpers.served_teacher import serving
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from methods.distill.test_run import config_of, losses, run, world
from methods.distill.test_stored import teach
from methods.losses.test_distill import apart, examples, measured
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.kernels.divergence import Likeliest, Whole
from surefoot.methods.distill import served as served_teacher
from surefoot.methods.distill.served import ServedTeacher
from surefoot.methods.distill.teacher import teacher_of
from surefoot.methods.distill.teacher_record import TeacherRecord
from surefoot.methods.losses.distill import DistillSettings, distill_objective
from surefoot.models.fast.packing import packed_attention
from surefoot.models.served import served_model
from surefoot.runs.teaching import likeliest
from surefoot.system.errors import EnvironmentFault
from surefoot.system.posting import server
from surefoot.training import step as training_step

__all__ = ["world"]
SAME = 2e-6  # relative, of loss and gradient: the server's log-probabilities are in fp32
# The same of reverse KL where the rest is one rare token, here of 1e-5: as 1 less 328 others it is off by a hundredth.
REVERSE = 1e-4
WORDS = 329
STUCK = 60.0  # seconds after which a wait for the other side has failed


def served(world: Path, output: Path, address: str, **distill) -> dict:
    config = config_of(world, output, **distill)
    config["distill"]["teacher"] = address
    return config


def client(address: str, top: int, name: str | None = None) -> ServedTeacher:
    return ServedTeacher(served_model(server(address, "distill.teacher"), name), top, WORDS)


@pytest.fixture(scope="module")
def sharp(world) -> Path:
    """A teacher far from the student: what is compared is then no difference of nearly equal numbers."""
    model = AutoModelForCausalLM.from_pretrained(world / "teacher")
    for one in model.parameters():
        one.data *= 4
    model.save_pretrained(world / "sharp")
    return world / "sharp"


@pytest.fixture(scope="module")
def both(world, sharp):
    """The student and the teacher in memory."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(one).double() for one in (world / "base", sharp))
    return student, teacher.requires_grad_(False)


@pytest.mark.parametrize("beta", representatives([0.0, 0.5, 1.0], 0.0, 1.0))
@pytest.mark.parametrize("packs", representatives([False, True], False))
def test_loss_and_gradient_are_those_of_the_teacher_in_memory(world, sharp, both, beta, packs):
    """Among all tokens (the rest is a single one) and among the likeliest 8 with the rest as one outcome."""
    student, teacher = both
    batch, how = to_batch(examples(), Layout(0, packed=packs)), DistillSettings(beta, 1.0, 0.0)
    local, undo = teacher_of(teacher, WORDS), []
    if packs:
        undo = [packed_attention("sdpa").install(model) for model in both]
    with serving(sharp, tokenizer=world / "base") as (stub, _):
        few = measured(student, distill_objective(how, client(stub.address, 8)), batch)
        most = measured(student, distill_objective(how, client(stub.address, WORDS - 1)), batch)
    whole = measured(student, distill_objective(how, local), batch)
    among = measured(student, distill_objective(how, lambda *rows: likeliest(cast(Whole, local(*rows)), 8, 1.0)), batch)
    for one in undo:
        one()
    assert apart(whole, most) < (REVERSE if beta == 1 else SAME)
    assert apart(among, few) < SAME
    assert few[0] < whole[0]


def test_twin_positions_that_are_off_by_one_are_seen(world, sharp, both):
    """Where few tokens come back, that of the prompt is not among them; where all do, the loss is another."""
    student, teacher = both
    batch, how = to_batch(examples(), Layout(0)), DistillSettings(0.0, 1.0, 0.0)
    whole = measured(student, distill_objective(how, teacher_of(teacher, WORDS)), batch)
    with serving(sharp, tokenizer=world / "base", shift=1) as (stub, _):
        most = measured(student, distill_objective(how, client(stub.address, WORDS - 1)), batch)
        with raises_fault("SF-SERVER", stub.address):
            measured(student, distill_objective(how, client(stub.address, 8)), batch)
    assert apart(whole, most) > 1e-2


def test_a_teacher_that_is_nearly_sure_leaves_a_rest_that_is_a_number(world, both):
    sure = {"40": {"logprob": 1e-7}, "41": {"logprob": -30.0}}
    with serving(world / "teacher") as (stub, teacher):
        teacher.prompt_logprobs = lambda ids, count: (
            [None] + [{**sure, str(one): {"logprob": -40.0}} for one in ids[1:]]
        )
        batch = to_batch(examples(), Layout(0))
        for beta in (0.0, 0.5, 1.0):
            objective = distill_objective(DistillSettings(beta, 1.0, 0.0), client(stub.address, 2))
            assert measured(both[0], objective, batch).isfinite().all()


def test_it_trains_as_the_teacher_in_memory_does(world, tmp_path):
    wanted = run(config_of(world, tmp_path / "live", beta=0.5, sft=0.2))
    with serving(world / "teacher") as (stub, teacher):
        found = run(served(world, tmp_path / "run", stub.address, beta=0.5, sft=0.2, top=WORDS - 1))
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-5)  # four steps of Adam
    assert found[-1]["eval_agreement"] == wanted[-1]["eval_agreement"]
    assert max(count for ids, count in teacher.asked.items() if len(ids) > 2) == 1  # of four epochs; short ones probe
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert (plan["teacher"]["value"], plan["memory"]["beside"]) == (stub.address, 0)


@pytest.mark.parametrize("replays", representatives([True, False], True))
def test_killed_it_computes_with_the_same_answers_again(world, tmp_path, monkeypatch, replays):
    """The server says something else each time that it is asked the same. The twin asks again."""

    def drawing(output, address):
        more = {"checkpoint": {"every": "1 steps", "keep": 9}, "duration": "4 steps"}
        return served(world, output, address, beta=1.0, on_policy=0.5, max_new_tokens=8, top=8) | more

    with serving(world / "teacher", noise=-0.01) as (stub, _):
        wanted = run(drawing(tmp_path / "whole", stub.address))
    with serving(world / "teacher", noise=-0.01) as (stub, _):
        cut = drawing(tmp_path / "cut", stub.address)
        with killed(training_step, "accumulate_gradients", 3):
            run(cut)
        if not replays:
            monkeypatch.setattr(TeacherRecord, "__contains__", lambda *_: False)
        assert (run(cut, resume=True) == wanted) == replays
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "cut")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0]) == replays


def test_half_a_line_and_answers_of_earlier_steps_are_dropped(tmp_path):
    taught = Likeliest(torch.arange(6).reshape(2, 3), torch.randn(2, 3), torch.randn(2))
    record = TeacherRecord(tmp_path, 0, 0, {"model": "large"})
    for number, step in enumerate((None, 1, 2)):
        record.keep(bytes([number] * 16), step, taught)
    path = tmp_path / "teacher-0.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[-90:-30])
    again = TeacherRecord(tmp_path, 0, 2, {"model": "other"})
    assert [bytes([number] * 16) in again for number in range(3)] == [True, False, True]
    assert again.before == {"model": "large"}
    for number in (0, 2):
        found = again.find(bytes([number] * 16))
        assert all(torch.equal(getattr(found, name), getattr(taught, name)) for name in ("logprobs", "rest"))
        assert found.tokens.tolist() == taught.tokens.tolist()
    again.keep(b"9" * 16, 3, taught)
    assert torch.equal(TeacherRecord(tmp_path, 1, 3, {}).find(b"9" * 16).rest, taught.rest)


@pytest.mark.parametrize("what", ["tokenizer", "ids", "length", "top", "name"])
def test_a_server_that_cannot_teach_this_student_is_refused_before_step_1(world, tmp_path, what):
    how, key, code, more = {}, "distill.teacher", "SF-TOKENIZER", {}
    match what:
        case "tokenizer":
            how = {"tokenizer": world / "stranger"}
        case "ids":
            how = {"ids": 300}
        case "length":
            how, code = {"longest": 64}, "SF-DATA-LENGTH"
        case "top":
            more, code = {"top": WORDS}, "SF-CONFIG-VALUE"
        case "name":
            more, code, key = {"teacher_name": "small"}, "SF-USE-FLAG", "distill.teacher_name"
    with serving(world / "teacher", **how) as (stub, _), raises_fault(code, key):
        run(served(world, tmp_path / "run", stub.address, **more))
    assert not list(tmp_path.glob("run/checkpoint-*"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"teacher": "http://127.0.0.1:9", "temperature": 2.0}, "distill.temperature"),
        ({"top": 8}, "distill.top"),
        ({"teacher_name": "large"}, "distill.teacher_name"),
    ],
)
def test_keys_of_a_served_teacher_that_contradict(world, tmp_path, change, key):
    config = config_of(world, tmp_path / "run")
    config["distill"] |= change
    with raises_fault("SF-CONFIG-CONFLICT", key):
        run(config)


def test_another_model_behind_the_same_name_is_not_gone_on_with(world, tmp_path):
    tiny_llama(tmp_path / "other", seed=5, layers=3)
    with serving(world / "teacher") as (stub, _):
        config = served(world, tmp_path / "run", stub.address)
        run(config)
    with serving(tmp_path / "other") as (stub, _):
        moved = served(world, tmp_path / "run", stub.address)
        moved["duration"] = "6 steps"
        with raises_fault("SF-RESUME-CHANGED", stub.address):
            run(moved, resume=True)
    with serving(world / "teacher", version="0.33.0") as (stub, _):  # the twin: a newer version of the server
        moved["distill"]["teacher"] = stub.address
        assert len(losses(run(moved, resume=True))) == 6
    events = [json.loads(one) for one in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("0.32.0" in one["text"] for one in events if one["kind"] == "caution")


@pytest.mark.parametrize("looks", representatives([True, False], True))
def test_it_is_recognized_by_what_the_last_step_has_asked(world, tmp_path, monkeypatch, looks):
    """Among many examples the data's first have not been asked about. The twin does not find any."""
    rows = (world / "asked.jsonl").read_text().splitlines()
    many = [json.loads(one) | {"output": f"answer {number}"} for number, one in enumerate(rows * 100)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(one) + "\n" for one in many))
    tiny_llama(tmp_path / "other", seed=5, layers=3)

    def few_steps(address: str, steps: int) -> dict:
        config = served(world, tmp_path / "run", address) | {"duration": f"{steps} steps"}
        return config | {"data": {"train": str(tmp_path / "many.jsonl"), "eval": "none", "max_length": 64}}

    with serving(world / "teacher") as (stub, _):
        run(few_steps(stub.address, 1))
    if not looks:
        real = ServedTeacher.check_same
        monkeypatch.setattr(ServedTeacher, "check_same", lambda own, examples: real(own, {}))
    with serving(tmp_path / "other") as (other, _):
        moved = few_steps(other.address, 2)
        with raises_fault("SF-RESUME-CHANGED", other.address) if looks else nullcontext():
            run(moved, resume=True)


EACH = [(2, None), (1, None), (1, "mine")]


@pytest.mark.parametrize(("at_once", "adapter"), representatives(EACH, (2, None), (1, "mine")))
def test_examples_of_a_step_are_asked_about_at_once_whatever_their_batches(world, monkeypatch, at_once, adapter):
    """Requests of two micro-batches with one example each wait for each other. The twin makes one after the other; so
    does every run where the server has an adapter, also if that is not the teacher (vLLM would end)."""
    if adapter is None:
        monkeypatch.setattr(served_teacher, "_AT_ONCE", at_once)
    meeting = threading.Barrier(2)

    def meets(ids: list[int], count: int) -> list:
        meeting.wait(STUCK if at_once == 2 else 0.1)
        return answer(ids, count)

    with serving(world / "teacher", adapter=adapter) as (stub, teacher):
        answer, teacher.prompt_logprobs = teacher.prompt_logprobs, meets
        rows = [to_batch([one], Layout(0)) for one in examples()[:2]]
        with nullcontext() if at_once == 2 else pytest.raises(EnvironmentFault):
            client(stub.address, 8, "large").prepare(1, rows)
    assert len(teacher.asked) == (2 if at_once == 2 else 0)


def test_a_server_is_stored_as_a_model_is(world, tmp_path):
    teach(config_of(world, tmp_path / "unused"), tmp_path / "local", "--top", "8")
    with serving(world / "teacher") as (stub, _):
        teach(served(world, tmp_path / "unused", stub.address), tmp_path / "served", "--top", "8")
    local, there = (load_file(tmp_path / name / "distributions-00001.safetensors") for name in ("local", "served"))
    assert all(local[name].equal(there[name]) for name in ("digests", "ends", "tokens"))
    torch.testing.assert_close(local["logprobs"], there["logprobs"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(local["rest"], there["rest"], rtol=1e-5, atol=1e-6)
    kept = config_of(world, tmp_path / "run")
    kept["distill"]["teacher"] = str(tmp_path / "served")
    assert losses(run(kept))[0] > 0
