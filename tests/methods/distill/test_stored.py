"""A teacher's stored distributions: what `surefoot teach` writes, and runs that read it in the teacher's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.faults import raises_fault
from helpers.tiny_models import llama3_tokenizer, tiny_llama
from methods.distill.test_run import config_of, losses, run, world
from surefoot.commands.main import main
from surefoot.methods.distill import stored
from surefoot.runs import teaching
from surefoot.system.durable import sha256_file

__all__ = ["world"]
SAME = 1e-5  # relative: fp32 sums of 320 terms in another order


def teach(config: dict, out: Path, *more: str) -> str:
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    found = CliRunner().invoke(main, ["teach", str(path), "--out", str(out), *more], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def taught(world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    words = json.loads((world / "base" / "config.json").read_text())["vocab_size"]
    for name, top in (("8", 8), ("most", words - 1)):
        teach(config_of(world, folder / "unused"), folder / name, "--top", str(top))
    return folder


def test_it_holds_the_teachers_likeliest_tokens_and_the_rest(world, taught):
    facts = json.loads((taught / "8" / "teacher.json").read_text())
    tensors = load_file(taught / "8" / "distributions-00001.safetensors")
    assert (facts["examples"], facts["tokens"]) == (18, len(tensors["rest"]))
    assert facts["tokens"] == int(tensors["ends"][-1])
    total = tensors["logprobs"].double().exp().sum(1) + tensors["rest"].double().exp()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-5, atol=0)
    assert (tensors["logprobs"].diff(dim=1) <= 0).all()
    model = AutoModelForCausalLM.from_pretrained(world / "teacher").eval()
    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    (first, *_) = map(json.loads, (world / "asked.jsonl").read_text().splitlines())
    turns = [{"role": "user", "content": first["instruction"]}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        log_q = model(torch.tensor([prompt])).logits[0, -1].log_softmax(0).topk(8)
    # The first position of one of the examples is that of the first record, whichever was written first.
    begins = [0, *tensors["ends"][:-1].tolist()]
    assert any(tensors["logprobs"][begin].allclose(log_q.values, rtol=1e-5, atol=1e-5) for begin in begins)
    assert any(tensors["tokens"][begin].equal(log_q.indices.int()) for begin in begins)


def test_with_nearly_all_tokens_it_teaches_what_the_model_teaches(world, taught, tmp_path):
    for number, beta in enumerate((0.0, 0.5, 1.0)):
        live, kept = (config_of(world, tmp_path / f"{name}{number}", beta=beta, sft=0.1) for name in ("live", "kept"))
        kept["distill"]["teacher"] = str(taught / "most")
        assert losses(run(kept)) == pytest.approx(losses(run(live)), rel=SAME)


def test_few_tokens_give_a_lower_bound_and_teach_all_the_same(world, taught, tmp_path):
    live, kept = (config_of(world, tmp_path / name) for name in ("live", "kept"))
    kept["distill"]["teacher"] = str(taught / "8")
    for config in (live, kept):
        config |= {"duration": "12 steps"}
    full, few = run(live), run(kept)
    assert 0 < losses(few)[0] < losses(full)[0]
    assert few[-1]["eval_loss"] < losses(few)[0]
    plan = json.loads((tmp_path / "kept" / "plan.json").read_text())["plan"]
    assert plan["memory"]["beside"] == 0


def test_what_the_student_itself_said_is_no_news(world, tmp_path):
    teach(config_of(world, tmp_path / "unused", teacher="base"), tmp_path / "own", "--top", "5")
    for beta in (0.0, 0.5):
        config = config_of(world, tmp_path / f"run{beta}", beta=beta)
        config["distill"]["teacher"] = str(tmp_path / "own")
        # Batches of other sizes, other last bits of hidden states; of a gradient that is rounding Adam makes a step.
        assert abs(losses(run(config))[0]) < 1e-9


def test_a_killed_run_goes_on_and_one_with_another_folder_does_not(world, taught, tmp_path):
    config = config_of(world, tmp_path / "run")
    config["distill"]["teacher"] = str(taught / "8")
    run(config)
    config |= {"duration": "6 steps"}
    moved = {**config, "distill": {"teacher": str(taught / "most")}}
    with raises_fault("SF-RESUME-CHANGED", tmp_path / "run" / "checkpoint-4"):
        run(moved, resume=True)
    assert len(losses(run(config, resume=True))) == 6


def damaged(folder: Path, taught: Path) -> Path:
    folder.mkdir()
    for file in (taught / "8").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("what", ["temperature", "data", "length", "template", "tokenizer", "draws", "bytes", "meta"])
def test_a_folder_that_does_not_fit_is_refused_before_step_1(world, taught, tmp_path, what):
    folder = damaged(tmp_path / "taught", taught)
    config = config_of(world, tmp_path / "run")
    config["distill"]["teacher"] = str(folder)
    code = "SF-TEACHER"
    match what:
        case "temperature":
            config["distill"]["temperature"] = 2.0
        case "data":
            (tmp_path / "other.jsonl").write_text(json.dumps({"instruction": "A", "input": "", "output": "B"}) + "\n")
            config["data"] |= {"train": str(tmp_path / "other.jsonl"), "eval": "none"}
        case "length":
            config["data"]["max_length"] = 24
        case "template":
            config["data"] |= {"template": "alpaca", "max_length": 256}
        case "tokenizer":
            llama3_tokenizer(tiny_llama(tmp_path / "base"), vocab_size=300)
            config["model"], code = str(tmp_path / "base"), "SF-TOKENIZER"
        case "draws":
            config["distill"]["on_policy"], code = 0.5, "SF-CONFIG-CONFLICT"
            config["distill"]["max_new_tokens"] = 8
        case "bytes":
            file = folder / "distributions-00001.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "meta":
            (folder / "teacher.json").write_text('{"teacher": "x"}')
    with raises_fault(code, "distill.teacher"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_twin_a_token_stored_at_another_place_changes_the_loss(world, taught, tmp_path):
    folder = damaged(tmp_path / "taught", taught)
    file = folder / "distributions-00001.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "tokens": tensors["tokens"].roll(1, 0)}, file)
    facts = json.loads((folder / "teacher.json").read_text())
    facts["files"] = {file.name: sha256_file(file)}
    (folder / "teacher.json").write_text(json.dumps(facts))
    found = []
    for name, path in (("whole", taught / "8"), ("other", folder)):
        config = config_of(world, tmp_path / name)
        config["distill"]["teacher"] = str(path)
        found.append(losses(run(config))[0])
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_large_data_is_written_in_several_files(world, taught, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "_SHARD", 1)
    teach(config_of(world, tmp_path / "unused"), tmp_path / "8", "--top", "8")
    names = {file.name for file in (tmp_path / "8").glob("*.safetensors")}
    assert len(names) > 1
    one, several = (config_of(world, tmp_path / name) for name in ("one", "several"))
    one["distill"]["teacher"], several["distill"]["teacher"] = str(taught / "8"), str(tmp_path / "8")
    assert losses(run(one)) == losses(run(several))


def test_batches_leave_no_lines_behind(world, tmp_path, monkeypatch):
    said = []
    for name, tokens in (("few", 4096), ("many", 64)):
        monkeypatch.setattr(teaching, "_TOKENS", tokens)
        said.append(teach(config_of(world, tmp_path / "unused"), tmp_path / name, "--top", "8").splitlines())
    assert len(said[0]) == len(said[1])


@pytest.mark.parametrize(
    ("change", "more", "code"),
    [
        ({"stage": "sft"}, [], "SF-CONFIG-CONFLICT"),
        ({}, ["--top", "400"], "SF-USE-FLAG"),
        ({}, ["--out-exists"], "SF-USE-OUTPUT"),
        ({"teacher": "8"}, [], "SF-CONFIG-CONFLICT"),
    ],
)
def test_what_cannot_be_stored(world, taught, tmp_path, change, more, code):
    config = config_of(world, tmp_path / "unused") | {name: value for name, value in change.items() if name == "stage"}
    if "stage" in change:
        del config["distill"]
    if "teacher" in change:
        config["distill"]["teacher"] = str(taught / "8")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    out = tmp_path / "out"
    if "--out-exists" in more:
        out.mkdir()
        more = []
    found = CliRunner().invoke(main, ["teach", str(path), "--out", str(out), *more])
    assert found.exit_code == 2
    assert f"[{code}]" in found.output
