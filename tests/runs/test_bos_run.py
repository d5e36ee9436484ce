"""Runs with a scaled BOS from beginning to end: what is written, how it opens, what is refused, resume to the bit.
Training and the saved template agree on BOS, whatever the family, the template and `bos.prepend` say."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from helpers import zoo, zoo_templates
from helpers.faults import gives, lines_giving, raises_fault
from helpers.model_layouts import run_config
from surefoot.commands.push import pushed_files
from surefoot.config.load import load_config
from surefoot.data.batching.loader import Layout, all_example_batches
from surefoot.data.chat import jinja_template as chat_template
from surefoot.data.chat.render import messages
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.model_facts import read_model_facts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.methods.examples import prepare_examples
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.open_model import conversation_ids, open_for_use
from surefoot.models import bos
from surefoot.models.bos import install_bos_scaling, installed_scaling
from surefoot.planning.notes import Notes
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.planning.tokenizer import plan_tokenizer
from surefoot.report.verification import compare_folders, verify_folder
from surefoot.runs.export.parts import find_export_parts
from surefoot.training.evaluation import evaluate_loss
from surefoot.training.step import StepSettings

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 9)]
LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}
# Loss per token at the end of training and after reopening: the same fp32 arithmetic in batches of another size.
FP32_LOSS = 5e-6
# What the factor is worth in the same figure, at the least: one token of some thirty, in models that hardly know it.
TELLING = 1e-4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bos")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    for name in ("phi3", "qwen2", "gpt2"):
        zoo.ZOO[name](folder / name)
    return folder


def asked(place, name, base="phi3", **changes):
    return {
        "stage": "sft",
        "model": str(place / base),
        "adapter": LORA,
        "data": {"train": str(place / "rows.json"), "eval": str(place / "rows.json")},
        "bos": {"scale": 0.1},
        "precision": "fp32",
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2},
        "duration": "4 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(place / name),
    } | changes


def train(config, **flags):
    """The run folder and what was said."""
    said = io.StringIO()
    result = surefoot.train(config, stream=said, **flags)
    assert result.finished, said.getvalue()
    return Path(config["output"]), said.getvalue()


@pytest.fixture(scope="module")
def lora(place):
    return train(asked(place, "lora"))


@pytest.fixture(scope="module")
def full(place):
    return train(asked(place, "full", "qwen2", adapter=None, bos={"scale": 0.0}))


def read(path):
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize(("run", "scale"), [("lora", 0.1), ("full", 0.0)])
def test_what_is_written(run, scale, request):
    folder, said = request.getfixturevalue(run)
    assert read(folder / BOS_FILE) == bos_file(scale)
    assert read(folder / "checkpoint-2" / BOS_FILE) == bos_file(scale, 2)
    assert not any(check.faults for check in verify_folder(folder))
    for part in (folder, folder / "checkpoint-4"):
        assert BOS_FILE in read(part / "MANIFEST.json")["files"]
    seen = read(folder / "plan.json")["verified"]["bos_scale"]
    assert seen["factor"] == pytest.approx([scale, scale], abs=1e-5)
    assert seen["sequences"] == 2
    assert "bos.scale" in said
    assert lines_giving((folder / "README.md").read_text(), f"{scale:g}", f"`{BOS_FILE}`")


def test_a_base_whose_bos_row_is_zero_trains(place):
    """As an export with a factor of 0 has it."""
    base = shutil.copytree(place / "phi3", place / "silent")
    model = AutoModelForCausalLM.from_pretrained(base)
    bos_id = AutoTokenizer.from_pretrained(base).bos_token_id
    model.get_input_embeddings().weight.data[bos_id] = 0
    model.save_pretrained(base)
    folder, _ = train(asked(place, "on-silent", "silent", duration="1 step"))
    seen = read(folder / "plan.json")["verified"]["bos_scale"]
    assert (seen["factor"], seen["left_out_as_zero"]) == (None, 2)


def test_without_a_factor_nothing_is_written(place):
    folder, said = train(asked(place, "plain", bos={"scale": 1.0}, duration="1 step"))
    assert not list(folder.rglob(BOS_FILE))
    assert "bos_scale" not in read(folder / "plan.json")["verified"]
    assert "bos.scale" not in said
    assert open_for_use(str(folder)).bos_scale == 1.0


def loss_of(opened, config):
    """Evaluation loss by way of the command that opens the folder."""
    data = prepare_examples(config, opened.tokens, opened.tokenizer)
    settings = StepSettings(seed=0, max_grad_norm=None, forward=opened.context, kernels=opened.context)
    batches = all_example_batches(data.eval, Layout(opened.pad_id, most=3))
    report = evaluate_loss(opened.model, sft_loss, batches, step=0, settings=settings, device=torch.device("cpu"))
    return report.loss


@pytest.mark.parametrize(("run", "base", "scale"), [("lora", "phi3", 0.1), ("full", "qwen2", 0.0)])
def test_the_opened_folder_has_the_loss_of_the_run(run, base, scale, request, place):
    folder, _ = request.getfixturevalue(run)
    config = load_config(folder / "config.yaml").config
    logged = read(folder / "eval_results.json")["eval_loss"]
    for path in (folder, folder / "checkpoint-4"):
        opened = open_for_use(str(path))
        assert opened.bos_scale == installed_scaling(opened.model).scale == scale
        assert gives(opened.described, f"{scale:g}")
        assert loss_of(opened, config) == pytest.approx(logged, abs=FP32_LOSS)
    if run == "lora":
        by_name = open_for_use(str(place / base), str(folder))
        assert by_name.bos_scale == scale
    install_bos_scaling(opened.model, 1.0)  # twin: as PEFT or transformers alone would open it
    assert abs(loss_of(opened, config) - logged) > TELLING


def test_resume_to_the_bit(place, lora):
    folder, _ = lora
    killed = place / "killed"
    shutil.copytree(folder, killed)
    shutil.rmtree(killed / "checkpoint-4")
    (killed / "MANIFEST.json").unlink()
    again, said = train(asked(place, "killed"), resume=True)
    assert str(killed / "checkpoint-2") in said
    assert compare_folders(folder, again) == []
    assert read(again / BOS_FILE) == bos_file(0.1)
    with raises_fault("SF-RESUME-CHANGED", "bos.scale"):
        train(asked(place, "killed", bos={"scale": 0.2}), resume=True)


def test_a_scaling_that_does_not_act_ends_before_step_1(place, monkeypatch):
    monkeypatch.setattr(bos, "_scaled", lambda embedded, starts, scale: embedded)
    with raises_fault("SF-PLAN-BROKEN", "plan: bos.scale"):
        train(asked(place, "broken"))
    assert not (place / "broken").exists()


def test_eos_begins_every_example_where_there_is_no_bos(place, full):
    folder, said = full
    assert any("BOS" in line and "<|im_end|>" in line for line in said.splitlines())
    opened = open_for_use(str(folder))
    assert conversation_ids(opened, [Turn("user", "Where?")])[0] == opened.tokenizer.eos_token_id


def test_a_lost_file_and_an_original_are_refused(place, lora, tmp_path):
    folder, _ = lora
    copy = shutil.copytree(folder, tmp_path / "run")
    (copy / BOS_FILE).unlink()
    with raises_fault("SF-BOS", f"{copy}/bos_zero_config.json"):
        open_for_use(str(copy))
    content = bos_file(0.1)
    del content["scaling_factor"]
    (copy / BOS_FILE).write_text(json.dumps(content))
    with raises_fault("SF-BOS", f"{copy}/bos_zero_config.json"):
        open_for_use(str(copy))


def test_a_factor_that_was_changed_is_refused(lora, tmp_path):
    copy = shutil.copytree(lora[0], tmp_path / "run")
    for part in (copy, copy / "checkpoint-2"):
        opened = open_for_use(str(part))  # twin
        assert opened.bos_scale == 0.1
        assert gives(opened.described, 0.1)
        (part / BOS_FILE).write_text(json.dumps(bos_file(0.5)))
        with raises_fault("SF-BOS", f"{part}/bos_zero_config.json: scaling_factor", remedy=[0.1]):
            open_for_use(str(part))
        with raises_fault("SF-BOS", f"{part}/bos_zero_config.json: scaling_factor", remedy=[0.1]):
            find_export_parts(str(part), ())


def test_an_adapter_of_another_tool_goes_by_its_file(place, lora, tmp_path):
    """Such as one that was pushed: without a plan."""
    folder, _ = lora
    names = {upload.name for upload in pushed_files(folder, "owner/base")}
    assert BOS_FILE in names
    copy = tmp_path / "adapter"
    copy.mkdir()
    for name in names:
        shutil.copy(folder / name, copy / name)
    opened = open_for_use(str(place / "phi3"), str(copy))
    assert opened.plan is None
    assert opened.bos_scale == 0.1
    assert opened.bos_id is not None  # the factor needs it, whatever the template says
    (copy / BOS_FILE).unlink()
    assert open_for_use(str(place / "phi3"), str(copy)).bos_scale == 1.0  # twin


def test_a_run_over_a_scaled_base_says_so(place, full):
    with raises_fault("SF-CONFIG-CONFLICT", "bos.scale"):
        train(asked(place, "over", "full", bos={"scale": 1.0}))
    again, _ = train(asked(place, "over", "full", bos={"scale": 0.0}, duration="1 step"))
    assert open_for_use(str(again)).bos_scale == 0.0


def test_plans_saved_before_there_was_a_factor_load(lora):
    folder, _ = lora
    saved = read(folder / "plan.json")["plan"]
    assert plan_from_json(saved).tokenizer.bos_scale.value == 0.1
    assert plan_to_json(plan_from_json(saved)) == saved
    del saved["tokenizer"]["bos_scale"]
    assert plan_from_json(saved).tokenizer.bos_scale.value == 1.0


def test_a_factor_and_no_bos_contradict(place):
    with raises_fault("SF-CONFIG-CONFLICT", "bos.scale"):
        train(asked(place, "never", bos={"scale": 0.1, "prepend": "off"}))
    with raises_fault("SF-CONFIG-VALUE", "bos.scale"):
        train(asked(place, "never", bos={"scale": -1}))


@torch.no_grad()
def test_what_others_load_is_not_scaled(place, full):
    """Nothing of it is in the weights: the card has to say so."""
    folder, _ = full
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    opened = open_for_use(str(folder))
    assert not torch.equal(plain(ids).logits, opened.model(ids).logits)
    surefoot.install_bos_scaling(plain, 0.0)  # the line of the card
    assert torch.equal(plain(ids).logits, opened.model(ids).logits)


ASKED = Conversation((Turn("user", "Where?"),))
MORE = Conversation((*ASKED.turns, Turn("assistant", "Here."), Turn("user", "And then?")))
WITH_SYSTEM = Conversation((Turn("system", "Be brief."), *ASKED.turns))
PHI3_WITH_BOS = "{{ bos_token }}" + zoo_templates.PHI3.lstrip("\n")
LEADING_BLANKS = "   {% for m in messages %}{{ '[' + m.role + '] ' + m.content + eos_token }}\n{% endfor %}" + (
    "{{ '[assistant] ' if add_generation_prompt }}\n"
)
ONLY_WITHOUT_SYSTEM = "{{ bos_token if messages[0].role != 'system' }}" + LEADING_BLANKS.strip()
TEMPLATES = {
    "own": None,
    "phi3 with BOS": PHI3_WITH_BOS,
    "plain words": LEADING_BLANKS,
    "BOS at times": ONLY_WITHOUT_SYSTEM,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("zoo")
    return {name: make(place / name) for name, make in zoo.ZOO.items()}


def planned(folder, prepend, source, *, known=True):
    """TokenizerPlan and encoder, with this chat template in place of the model's."""
    facts = read_tokenizer_facts(folder)
    model = read_model_facts(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if source is not None:
        facts = dataclasses.replace(facts, chat_template=source)
        tokenizer.chat_template = source
    model = model if known else dataclasses.replace(model, family=None)
    plan = plan_tokenizer(run_config(bos={"prepend": prepend}), model, facts, Notes())
    return plan, TextEncoder(tokenizer)


def both(plan, encoder):
    """Conversation, ids of training, ids of transformers with the saved template, where the template takes it."""
    template = make_template(plan.template.value, encoder, plan.stop.value)
    bos_id = plan.bos_id if plan.bos.value else None
    saved = template.jinja(encoder.tokenizer.convert_ids_to_tokens(bos_id) if bos_id is not None else "")
    for conversation in (ASKED, MORE, WITH_SYSTEM):
        try:
            mine = prompt_ids(conversation, template, encoder, bos_id)
            how = {"chat_template": saved, "add_generation_prompt": True, "return_dict": False}
            theirs = encoder.tokenizer.apply_chat_template(messages(conversation.turns), **how)
        except (RowFault, TemplateError):  # Gemma 2 takes no system text
            continue
        yield conversation, mine, theirs


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prepend", ["auto", "off", "on"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_and_the_saved_template_give_the_same_ids(folders, name, prepend, source):
    if prepend == "on" and name.startswith("qwen"):
        pytest.skip("its tokenizer has no BOS, so this is refused")
    plan, encoder = planned(folders[name], prepend, TEMPLATES[source])
    pairs = list(both(plan, encoder))
    assert pairs
    for conversation, mine, theirs in pairs:
        if conversation is MORE:  # a question behind an answer is encoded by itself, and Qwen3 rewrites the answer
            assert mine.count(plan.bos_id) == theirs.count(plan.bos_id)
        else:
            assert mine == theirs
        if plan.bos_id is not None and encoder.bos_id != encoder.tokenizer.eos_token_id:
            assert (mine[0] == plan.bos_id) is plan.bos.value
            assert mine[:2] != [plan.bos_id] * 2


@pytest.mark.parametrize(("source", "expected"), [(PHI3_WITH_BOS, True), (zoo_templates.PHI3, False)])
@pytest.mark.parametrize("known", [True, False])
def test_where_the_family_says_nothing_the_template_decides(folders, source, expected, known):
    """Phi-3's tokenizer begins no text with BOS, but some of its templates do."""
    plan, _ = planned(folders["phi3"], "auto", source, known=known)
    assert plan.bos.value is expected
    plan, _ = planned(folders["phi3"], "auto", "{# no bos_token here #}" + zoo_templates.PHI3, known=known)
    assert plan.bos.value is False


def test_a_template_that_agrees_is_kept_as_it_is(folders):
    plan, encoder = planned(folders["phi3"], "auto", PHI3_WITH_BOS)
    template = make_template(plan.template.value, encoder, plan.stop.value)
    assert template.jinja("<s>") == PHI3_WITH_BOS
    assert template.jinja("") != PHI3_WITH_BOS


def test_twin_the_source_as_it_is_would_print_what_training_left_out(folders, monkeypatch):
    monkeypatch.setattr(chat_template._Chat, "with_bos", lambda self, bos: self.source)
    plan, encoder = planned(folders["phi3"], "off", PHI3_WITH_BOS)
    assert any(mine != theirs for _, mine, theirs in both(plan, encoder))
