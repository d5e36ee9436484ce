"""Whatever a user points at opens as it was trained, or one line says what is missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.adapter_runs import a_plan, a_run
from helpers.faults import raises_fault
from helpers.plans import choice
from helpers.tiny_models import tiny_llama
from surefoot.data.formats import Turn
from surefoot.evaluate.loss import as_evaluated, evaluation_settings
from surefoot.methods import open_model, reference, reward_source
from surefoot.methods.distill import teacher
from surefoot.methods.open_model import OpenModel, conversation_ids, open_for_use, raw_ids, room_for
from surefoot.models.load import load_model
from surefoot.models.save import save_full
from surefoot.planning import environment
from surefoot.system import hardware

CPU = torch.device("cpu")
QUESTION = [Turn("user", "What is a heron?")]
IDS = torch.arange(40).reshape(2, 20) * 7 % 300


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("open") / "base")


@torch.no_grad()
def logits(opened: OpenModel) -> torch.Tensor:
    return opened.model(input_ids=IDS).logits


def test_a_base_model_is_asked_as_training_would_ask_it(base):
    opened = open_for_use(str(base))
    expected = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(opened), expected(input_ids=IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = [{"role": "user", "content": QUESTION[0].content}]
    own = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert conversation_ids(opened, QUESTION) == own
    assert set(opened.template.stop_ids) == {321, tokenizer.convert_tokens_to_ids("<|eot_id|>")}
    assert raw_ids(opened, "Once") == tokenizer("Once")["input_ids"]
    assert raw_ids(opened, "<|begin_of_text|>Once") == raw_ids(opened, "Once")
    assert "template tokenizer" in opened.described


@pytest.fixture
def two_threads(monkeypatch):
    """torch has two threads, and the environment asks for none."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check_one_thread(base):
    open_for_use(str(base))
    assert torch.get_num_threads() == 1


def test_a_narrow_model_opens_with_the_threads_of_training(base, two_threads):
    check_one_thread(base)


def test_twin_a_wide_model_keeps_all_threads(base, two_threads, monkeypatch):
    monkeypatch.setattr(environment, "NARROW", 1)
    with pytest.raises(AssertionError):
        check_one_thread(base)


@pytest.mark.parametrize("asked", [True, False])
def test_threads_that_were_asked_for_or_planned_stay(base, two_threads, monkeypatch, asked):
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    open_for_use(str(base), in_run=not asked)
    assert torch.get_num_threads() == 2


class Opened(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "name", "opens", "in_run"),
    [
        (reference, "open_for_use", lambda config: reference._another("teacher", *[None] * 4), True),
        (teacher, "open_for_use", lambda config: teacher.open_teacher(config, None, None, print), True),
        (reward_source, "open_reward", lambda config: reward_source.Source("reward", None, None, "").open(), True),
        (teacher, "open_for_use", lambda config: teacher.open_alone(config, 1, print), False),  # twin
    ],
)
def test_models_beside_the_policy_leave_the_runs_threads(monkeypatch, module, name, opens, in_run):
    def opened(*arguments, in_run=False, **options):
        raise Opened(in_run)

    monkeypatch.setattr(module, name, opened)
    monkeypatch.setattr(teacher, "frozen_type", lambda plan: "fp32")
    config = SimpleNamespace(distill=SimpleNamespace(teacher="teacher"))
    with pytest.raises(Opened) as found:
        opens(config)
    assert found.value.args == (in_run,)


def test_an_adapter_finds_its_base(base, tmp_path):
    run = a_run(tmp_path / "run", base)
    opened = open_for_use(str(run))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run)
    assert torch.equal(logits(opened), peft(input_ids=IDS).logits)
    assert torch.equal(logits(open_for_use(str(base), str(run))), logits(opened))
    assert not torch.equal(logits(open_for_use(str(base))), logits(opened))


def test_a_missing_base_is_named_with_the_way_out(base, tmp_path):
    run = a_run(tmp_path / "run", base, named=str(tmp_path / "gone"))
    with raises_fault(
        "SF-ADAPTER-FIT", run / "adapter_config.json", tmp_path / "gone", remedy=["BASE", "--adapter", run]
    ):
        open_for_use(str(run))
    open_for_use(str(base), str(run))
    config = run / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with raises_fault("SF-ADAPTER-FIT", config):
        open_for_use(str(run))


def test_a_model_is_no_adapter(base):
    with raises_fault("SF-USE-FOLDER", base):
        open_for_use(str(base), str(base))


@pytest.mark.parametrize("template", ["tokenizer", "llama3", "alpaca", "plain"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_run_is_asked_by_the_template_that_trained_it(base, tmp_path, template, bos):
    run = a_run(tmp_path / "run", base, a_plan(template, bos=bos))
    checkpoint = a_run(run / "checkpoint-3", base)
    copied = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    opened = open_for_use(str(run))
    ids = conversation_ids(opened, QUESTION)
    assert opened.template.name == template
    assert (ids[0] == 320) == bos
    text = opened.tokenizer.decode(ids)
    assert ("### Instruction:" in text) == (template == "alpaca")
    assert ("<|start_header_id|>" in text) == (template in ("tokenizer", "llama3"))
    assert conversation_ids(open_for_use(str(checkpoint)), QUESTION) == ids
    twin = conversation_ids(open_for_use(str(copied)), QUESTION)  # without a plan: the tokenizer's template and BOS
    assert (twin == ids) == (template in ("tokenizer", "llama3") and bos)


def test_added_rows_open_with_their_adapter(base, tmp_path):
    run = a_run(tmp_path / "run", base, rows=331)
    assert logits(open_for_use(str(run))).shape[-1] == 331
    weights = load_file(run / "adapter_model.safetensors")
    opened = open_for_use(str(run)).model.get_base_model()
    assert torch.equal(opened.lm_head.weight, weights["base_model.model.lm_head.weight"])


def test_a_trained_full_model_opens_by_its_own_folder(base, tmp_path):
    model = load_model(base, dtype=torch.float32, attention_implementation="sdpa", device=CPU)
    model.lm_head.weight.data += 0.1
    save_full(model, tmp_path)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    assert torch.equal(logits(open_for_use(str(tmp_path))), model(input_ids=IDS).logits)


@pytest.mark.parametrize("fast", [True, False])
def test_weights_keep_their_dtype_where_the_machine_computes_in_it(tmp_path, monkeypatch, fast):
    folder = tiny_llama(tmp_path / "bf16", dtype=torch.bfloat16)
    machine = replace(hardware.detect(), bf16=fast)
    monkeypatch.setattr(open_model.hardware, "detect", lambda: machine)
    opened = open_for_use(str(folder))
    assert {p.dtype for p in opened.model.parameters()} == {torch.bfloat16 if fast else torch.float32}
    with opened.context():
        assert opened.model(input_ids=IDS).logits.dtype == (torch.bfloat16 if fast else torch.float32)


def test_what_the_template_cannot_hold_is_one_line(base, tmp_path):
    opened = open_for_use(str(a_run(tmp_path / "run", base, a_plan("alpaca"))))
    with raises_fault("SF-DATA-TEMPLATE", "prompt"):
        conversation_ids(opened, [*QUESTION, Turn("assistant", "A bird."), *QUESTION])


def test_room_for_the_answer(base):
    opened = open_for_use(str(base))  # 512 positions
    assert room_for(opened, [[1] * 10, [1] * 500], None) == 12
    assert room_for(opened, [[1] * 10], None) == 256
    assert room_for(opened, [[1] * 500], 12) == 12
    for prompt, wanted in ((500, 13), (512, None)):
        with raises_fault("SF-DATA-LENGTH", "prompt"):
            room_for(opened, [[1] * prompt], wanted)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_an_evaluation_says_in_what_it_computes(base, tmp_path, compute):
    """As the run did, whose weights are in fp32; answers are computed in these."""
    plan = a_plan()
    precision = replace(plan.precision, compute=choice(compute))
    run = a_run(tmp_path / "run", base, replace(plan, precision=precision, device=choice("cpu")))
    opened = open_for_use(str(run), scored=True)
    evaluated = as_evaluated(opened)
    with evaluated.context():
        assert torch.is_autocast_enabled("cpu") == (compute == "bf16")
    assert ("bf16" in evaluated.described) == (compute == "bf16")
    with evaluation_settings(opened).forward():  # what `evaluate loss` and `evaluate reward` enter
        assert torch.is_autocast_enabled("cpu") == (compute == "bf16")
    with opened.context():
        assert not torch.is_autocast_enabled("cpu")
    assert "bf16" not in opened.described
