"""Axolotl's templates and torchtune's instructions beside texts written out by hand, and parts of splits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jinja2 import Environment

from helpers.golden_templates import golden_encoder
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, Turn
from surefoot.data.tokenize.encode import EncodeSettings, encode
from surefoot.interop.axolotl.data import TEMPLATES
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError

DIALOGUE = Conversation((Turn("system", "Be brief."), Turn("user", "Name a bird."), Turn("assistant", "Heron."),
                         Turn("user", "One more."), Turn("assistant", "Crane.")))  # fmt: skip
SINGLE = Conversation((Turn("user", "Name a bird."), Turn("assistant", "Heron.")))


def by_hand(name, conversation):
    """What Axolotl's template of this name writes, with what it learns (a text and the token that ends it) marked."""
    written = "<s>"
    last = len(conversation.turns) - 1
    for place, turn in enumerate(conversation.turns):
        text = turn.content
        if name == "alpaca":
            heading = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}[turn.role]
            end = "</s>" if turn.role == "assistant" else ""
            written += heading + (f"⟦{text}{end}⟧" if end else text) + ("" if place == last else "\n\n")
        elif turn.role == "assistant":
            written += f"⟦{text}<|end|>⟧\n"
        else:
            written += f"<|{turn.role}|>\n{text}<|end|>\n" + ("<|assistant|>\n" if turn.role == "user" else "")
    return written


def by_us(template, conversation, encoder, *, bos=True, train_on="responses", encoding="whole"):
    made = make_template(template, encoder, (encoder.tokenizer.eos_token_id,))
    one = replace(conversation, number=1, line=1)
    bos_id = encoder.bos_id if bos else None
    how = EncodeSettings(encoder=encoder, bos_id=bos_id, max_length=500, train_on=train_on, encoding=encoding)
    (found,) = encode([one], made, how, "d")
    return found.ids.tolist(), found.supervised.tolist()


def marked(ids, mask, encoder):
    text, inside = "", False
    for number, learned in zip(ids, mask, strict=True):
        text += "⟦" if learned and not inside else "⟧" if inside and not learned else ""
        text, inside = text + str(encoder.tokenizer.decode([number])), learned
    return text + ("⟧" if inside else "")


CHATML = "<|im_start|>system\n{}<|im_end|>\n" + "".join(
    f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n⟦{said}<|im_end|>⟧\n"
    for asked, said in (("Name a bird.", "Heron."), ("One more.", "Crane."))
)
# What Axolotl's Jinja files (067b021) write of DIALOGUE, and the end of an answer that eot_tokens teaches.
WRITTEN = {
    "falcon_h1": "<s>" + CHATML.format("Be brief."),
    "qwen_25": CHATML.format("Be brief."),
    "gemma3": "<s><start_of_turn>user\nBe brief.\n\nName a bird.<end_of_turn>\n<start_of_turn>model\n"
    "⟦Heron.<end_of_turn>⟧\n<start_of_turn>user\nOne more.<end_of_turn>\n<start_of_turn>model\n⟦Crane.<end_of_turn>⟧\n",
    "phi_35": "<|system|>\nBe brief.<|end|>\n<|user|>\nName a bird.<|end|>\n<|assistant|>\n⟦Heron.<|end|>⟧\n"
    "<|user|>\nOne more.<|end|>\n<|assistant|>\n⟦Crane.<|end|>⟧\n",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_axolotls_templates_of_families(name):
    encoder = golden_encoder()
    template, bos = TEMPLATES[name]
    assert marked(*by_us(template, DIALOGUE, encoder, bos=bos == "on"), encoder) == WRITTEN[name]
    other = next(one for one in WRITTEN if one != name)
    assert marked(*by_us(template, DIALOGUE, encoder, bos=bos == "on"), encoder) != WRITTEN[other]  # the twin


# Axolotl's styles of AlpacaPrompter (067b021): around the task, without an input, with one.
STYLES = {
    "alpaca": (
        "{}\n\n",
        "### Instruction:\n{}\n\n### Response:\n",
        "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n",
    ),
    "alpaca:chat": ("SYSTEM: {}\n", "USER: {}\nASSISTANT:", "USER: {}\n{}\nASSISTANT:"),
    "alpaca:chatml": (
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{}\n{}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "alpaca:phi": (
        "<|system|>\n{}<|end|>\n",
        "<|user|>\n{}<|end|>\n<|assistant|>\n",
        "<|user|>\n{}<|end|>{}<|assistant|>",
    ),
}  # fmt: skip
STYLES["jeopardy"] = STYLES["alpaca"]
TASK = "Below is an instruction that describes a task{} Write a response that appropriately completes the request."
PAIRED = TASK.format(", paired with an input that provides further context.")


def prompted(kind, tokenizer, asked, context, answer):
    """`InstructionPromptTokenizingStrategy`: prompt and answer are tokenized alone, and EOS ends the answer."""
    around, without, both = STYLES[kind]
    if context:
        prompt = around.format(PAIRED) + both.format(asked, context)
    else:
        prompt = around.format(TASK.format(".")) + without.format(asked)
    before = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    said = ("what is " if kind == "jeopardy" else "") + answer
    learned = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [*before, *learned], [False] * len(before) + [True] * len(learned)


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("context", ["", "Grey ones."])
def test_alpacas_are_axolotls_prompter(kind, context):
    data, encoder = axolotl({"type": kind})["data"], golden_encoder()
    named = {"instruction": "question", "input": "category", "output": "answer"} if kind == "jeopardy" else None
    assert data["train"].get("columns") == named  # of JeopardyPromptTokenizingStrategy
    asked = ("Name a bird.", context)
    record = Conversation((Turn("user", *asked), Turn("assistant", "Heron.")))
    found = by_us(data["template"], record, encoder, encoding="parts")
    assert found == prompted(kind, encoder.tokenizer, *asked, "Heron.")
    turns = [{"role": "user", "content": asked[0], "input": context}, {"role": "assistant", "content": "Heron."}]
    source = make_template(data["template"], encoder, (encoder.tokenizer.eos_token_id,)).jinja("<s>")
    assert Environment().from_string(source).render(messages=turns) == encoder.tokenizer.decode(found[0])
    for twin in STYLES.keys() - {kind}:
        assert found != prompted(twin, encoder.tokenizer, *asked, "Heron.")


def test_qwen_25_has_a_system_text_of_its_own():
    ids, mask = by_us(TEMPLATES["qwen_25"][0], SINGLE, encoder := golden_encoder(), bos=False)
    own = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert marked(ids, mask, encoder) == CHATML.format(own).partition("<|im_start|>user\nOne")[0]


@pytest.mark.parametrize("name", ["alpaca", "phi_3"])
@pytest.mark.parametrize("conversation", [SINGLE, DIALOGUE])
def test_axolotls_own_templates(name, conversation):
    encoder = golden_encoder()
    template, bos = TEMPLATES[name]
    ids, mask = by_us(template, conversation, encoder, bos=bos == "on")
    assert marked(ids, mask, encoder) == by_hand(name, conversation)
    plain = by_hand(name, conversation).replace("⟦", "").replace("⟧", "")
    assert ids == encoder.tokenizer(plain, add_special_tokens=False)["input_ids"]


def test_twin_the_rows_of_the_same_name_write_something_else():
    encoder = golden_encoder()
    for ours, theirs in (("alpaca", "alpaca"), ("phi3", "phi_3")):
        ids, mask = by_us(ours, SINGLE, encoder)
        assert marked(ids, mask, encoder) != by_hand(theirs, SINGLE)


AXOLOTL = {"base_model": "m", "learning_rate": 1e-5, "sequence_len": 64, "output_dir": "o"}


def axolotl(entry, **more):
    given = {**AXOLOTL, "datasets": [{"path": "d.jsonl", **entry}], **more}
    return translate_file("run.json", json.dumps(given), [], Options()).config


@pytest.mark.parametrize(
    ("asked", "template", "bos"),
    [
        ("chatml", "chatml", "off"),
        ("llama3", "llama3", "on"),
        ("phi_3", "axolotl-phi_3", "on"),
        ("tokenizer_default", "tokenizer", "tokenizer"),
        ("tokenizer_default_fallback_chatml", "tokenizer-or-chatml", "tokenizer"),
    ],
)
def test_axolotls_names_of_templates(asked, template, bos):
    found = axolotl({"type": "chat_template"}, chat_template=asked)
    assert (found["data"]["template"], found["bos"]["prepend"]) == (template, bos)
    assert found["data"]["encoding"] == "whole"  # it encodes what it has rendered


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        ({"type": "chat_template"}, {"chat_template": "qwen3"}),
        ({"type": "chat_template"}, {"processor_type": "AutoProcessor"}),
        ({"type": "alpaca", "split": "train[10:]"}, {}),
    ],
)
def test_what_axolotl_does_otherwise_is_refused(entry, more):
    with pytest.raises(InputError) as caught:
        axolotl(entry, **more)
    named = {*more, *entry} - {"type"}
    assert any(name in str(fault) for fault in caught.value.faults for name in named)


@pytest.mark.parametrize("own", [True, False])
def test_a_fallback_is_taken_where_the_tokenizer_has_no_template(own, tmp_path):
    base = tiny_llama(tmp_path / "base", pad=True, chat_template=own)
    asked = run_config(model={"path": str(base)}, data={"train": "d.jsonl", "template": "tokenizer-or-vicuna"})
    assert make_plan(asked, measure=False).tokenizer.template.value == ("tokenizer" if own else "vicuna")


def test_the_first_so_many_records_of_a_split():
    assert axolotl({"type": "alpaca", "split": "train[:7]"})["data"]["train"] == {
        "path": "d.jsonl", "format": "alpaca", "max_samples": 7,
    }  # fmt: skip
    hub = axolotl({"path": "org/d", "type": "alpaca", "split": "val[:7]"})["data"]["train"]
    assert (hub["split"], hub["max_samples"]) == ("val", 7)


def tune(model, **more):
    given = {
        "output_dir": "o", "checkpointer": {"checkpoint_dir": "m"}, "seed": 1,
        "model": {"_component_": f"torchtune.models.{model}.a_model"},
        "tokenizer": {"_component_": f"torchtune.models.{model}.a_tokenizer", "path": "t", **more.pop("tokenizer", {})},
        "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "d.json",
                    **more},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
    }  # fmt: skip
    return translate_file("tune.json", json.dumps(given), [], Options())


@pytest.mark.parametrize(
    ("model", "tokenizer", "template"),
    [
        ("gemma", {}, "raw"),
        ("llama2", {"prompt_template": None}, "raw"),
        ("llama2", {}, "llama2"),
        ("llama3_1", {}, "llama3"),
        ("qwen2_5", {}, "torchtune-chatml"),
    ],
)
def test_torchtunes_instructions_are_laid_out_as_its_tokenizers_do(model, tokenizer, template):
    found = tune(model, tokenizer=tokenizer)
    assert found.config["data"]["template"] == template
    changed = any("data.template" in note.keys and note.outcome == "changed" for note in found.notes)
    assert changed == (template != "raw")


def test_torchtunes_bare_instructions_are_the_texts_between_bos_and_eos():
    encoder = golden_encoder()
    ids, mask = by_us(tune("gemma").config["data"]["template"], SINGLE, encoder, encoding="parts")
    prompt, answer = (encoder.tokenizer(text, add_special_tokens=False)["input_ids"] for text in
                      ("Name a bird.", "Heron."))  # fmt: skip
    end = encoder.tokenizer.eos_token_id
    assert ids == [encoder.bos_id, *prompt, *answer, end]
    assert mask == [False] * (1 + len(prompt)) + [True] * (len(answer) + 1)


def test_torchtunes_part_of_a_file_is_not_lost():
    assert tune("gemma", split="train[:9]").config["data"]["train"]["max_samples"] == 9
    assert tune("gemma", split="train[95%:]").config["data"]["train"]["share"]["take"] == 2
    with pytest.raises(InputError) as caught:
        tune("gemma", split="train[9:]")
    assert any("dataset.split" in str(fault) for fault in caught.value.faults)
