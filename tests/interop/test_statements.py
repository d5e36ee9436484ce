"""What a script says outside the calls that make its objects becomes a word, a note or a fault."""

from __future__ import annotations

import pytest

from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.system.errors import InputError

SCRIPT = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("m")
{lora}
args = TrainingArguments(output_dir="out", learning_rate=5e-5)
{before}
data = load_dataset("json", data_files="d.json", split="train")
trainer = Trainer(model=model, args=args, train_dataset=data{trainer})
{after}
"""


def translated(before="", after="trainer.train()", trainer="", lora=""):
    text = SCRIPT.format(before=before, after=after, trainer=trainer, lora=lora)
    return translate_file("train.py", text, [], Options())


PLAIN = dict(translated().config)


def outcomes(found):
    return {note.word: note.outcome for note in found.notes}


def test_attributes_of_the_arguments_are_words():
    found = translated("args.num_train_epochs = 5\nargs.learning_rate = 1e-5")
    assert found.config["duration"] == "5 epochs"
    assert found.config["optim"]["lr"] == 1e-5
    assert outcomes(found)["learning_rate=5e-05"] == "listed"


def test_twin_an_attribute_of_another_object_is_none():
    assert dict(translated("other = make()\nother.number = 5").config) == PLAIN


@pytest.mark.parametrize(
    ("call", "key", "expected"),
    [
        ("model.gradient_checkpointing_enable()", "gradient_checkpointing", "on"),
        ("model = torch.compile(model)", "compile", "default"),
        ("model = torch.compile(model, mode='max-autotune')", "compile", "max-autotune"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "precision", {"compute": "fp32", "tf32": "on"}),
        ("tokenizer.add_special_tokens({'pad_token': '[PAD]'})", "tokenizer", {"pad": "add"}),
    ],
)
def test_calls_are_words(call, key, expected):
    assert translated(call).config[key] == expected
    assert PLAIN.get(key) != expected


def test_the_trainer_resumes_only_where_it_is_asked_to():
    found = translated(after="trainer.train(resume_from_checkpoint=True)")
    assert (found.arguments, found.resumes) == (("--resume",), "out")
    assert translated().arguments == ()


@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        ("set_seed(1234)", "changed"),
        ("tokenizer.pad_token = tokenizer.eos_token", "listed"),
        ("model.config.use_cache = False", "listed"),
        ("model.push_to_hub('me/model')", "listed"),
    ],
)
def test_what_has_no_counterpart_is_noted(statement, outcome):
    assert outcomes(translated(statement))[statement] == outcome


LOST = [
    "if big: args.num_train_epochs = 5",
    "args.num_train_epochs += 1",
    "args.learning_rate = pick()",
    "args.set_training(learning_rate=1e-3)",
    "setattr(args, 'seed', 3)",
    "for p in model.parameters(): p.requires_grad = False",
    "model.lm_head.requires_grad_(False)",
    "model.config.rope_theta = 1e6",
    "tokenizer.add_tokens(own_tokens())",
    "tokenizer.chat_template = TEMPLATE",
    "model = PeftModel.from_pretrained(model, 'a')",
    "unknown.learning_rate = 3",
]


def fault(*before, **places):
    with pytest.raises(InputError) as caught:
        translated(*before, **places)
    (found,) = caught.value.faults
    return found


def test_what_would_be_lost_is_a_fault_with_its_place():
    found = {statement: fault(statement) for statement in LOST}
    assert {one.code for one in found.values()} == {"SF-TRANSLATE-SCRIPT"}
    assert [statement for statement, one in found.items() if not one.where.startswith("train.py:6")] == []


def test_a_setting_after_the_trainer_is_made_is_a_fault():
    assert fault(after="args.seed = 3\ntrainer.train()").where == "train.py:9:1"


def test_beside_an_adapter_freezing_changes_nothing():
    lora = "model = get_peft_model(model, LoraConfig(r=4))"
    found = translated("for p in model.parameters(): p.requires_grad = False", lora=lora)
    assert found.config["adapter"]["rank"] == 4
    assert outcomes(found)["p.requires_grad = False"] == "listed"


@pytest.mark.parametrize(
    ("collator", "learned"),
    [
        ("DataCollatorForCompletionOnlyLM('### Answer:', tokenizer=t)", "last"),
        ("DataCollatorForCompletionOnlyLM(instruction_template='Q', response_template='A')", "responses"),
        ("DataCollatorForLanguageModeling(t, mlm=False)", "everything"),
    ],
)
def test_what_a_collator_learns(collator, learned):
    found = translated(f"c = {collator}", trainer=", data_collator=c")
    assert found.config["data"]["train_on"] == learned


def test_of_trl_a_collator_decides_what_is_learned():
    text = SCRIPT.replace("Trainer(", "SFTTrainer(").format(
        before="c = DataCollatorForCompletionOnlyLM(instruction_template='Q', response_template='A')",
        after="trainer.train()", trainer=", data_collator=c", lora="",
    )  # fmt: skip
    found = translate_file("train.py", text, [], Options())
    assert found.config["data"]["train_on"] == "responses"
    without = translate_file("train.py", text.replace(", data_collator=c", ""), [], Options())
    assert without.config["data"]["train_on"] == "by-record"


def test_a_collator_that_masks_is_a_fault_and_one_of_code_is_told():
    assert fault(trainer=", data_collator=DataCollatorForLanguageModeling(t)").where.startswith("train.py:8:")
    assert outcomes(translated(trainer=", data_collator=mine"))["data_collator=…"] == "changed"


def test_early_stopping_is_a_setting_and_another_callback_is_code():
    held = ", eval_dataset=load_dataset('json', data_files='e.json', split='train')"
    found = translated(trainer=f"{held}, callbacks=[EarlyStoppingCallback(3, 0.01), Mine()]")
    assert found.config["early_stopping"] == {"patience": 3, "min_delta": 0.01}
    assert outcomes(found)["callbacks=Mine()"] == "changed"
    assert fault(trainer=", callbacks=[EarlyStoppingCallback(3)]").code == "SF-TRANSLATE-SETTING"


def test_evaluation_data_keep_the_split_that_is_named():
    held = ", eval_dataset=load_dataset('org/x', split='train[:100]')"
    found = translated(trainer=held)
    assert found.config["data"]["eval"] == {"path": "org/x", "split": "train", "max_samples": 100}
