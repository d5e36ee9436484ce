"""Three programs are called finetune.py, and the file beside the command says which one is meant: each trains the
texts, the labels and the rates that its source computes, which are written out here from its description."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from equality import models
from equality.ours import LOSS, RATE, learnt, run_until_step_1
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.system.errors import InputError

# Their `train`, as far as it says which program it is and what its defaults are.
SIGNATURES = {
    "dora": "base_model='', data_path='', adapter_name='lora', micro_batch_size=4, weight_decay=0.0, cutoff_len=256, "
    "val_set_size=2000, lora_target_modules=None, target_modules=None, train_on_inputs=True",
    "alpaca-lora": "base_model='', data_path='', micro_batch_size=4, cutoff_len=256, val_set_size=2000, "
    "lora_target_modules=['q_proj', 'v_proj'], train_on_inputs=True, prompt_template_name='alpaca'",
    "guide": "base_model='', data_path='', adapter_name='lora', per_device_train_batch_size=4, weight_decay=0.01, "
    "train_on_inputs=False, bf16=False, attn_implementation='eager'",
}
PROGRAM = """\
def train({signature}):
    transformers.TrainingArguments(
        per_device_train_batch_size=micro_batch_size,
        {arguments},
        num_train_epochs=num_epochs,
        save_total_limit=3,
    )
"""
ARGUMENTS = "warmup_steps=100, logging_steps=10, fp16=True"
WARMUP = 100
RECORDS = [
    {"instruction": "Name a colour.", "input": "", "output": "Green, as grass is."},
    {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"},
    {"instruction": "Say something long.", "input": "", "output": "one two three four five six seven " * 40},
]
CUTOFF = 400
FLAGS = ["--data_path", "data.json", "--output_dir", "out", "--batch_size", "2", "--micro_batch_size", "1"]
FLAGS += ["--val_set_size", "0", "--cutoff_len", str(CUTOFF), "--num_epochs", "80", "--learning_rate", "1e-4"]
TASK = "Below is an instruction that describes a task{} Write a response that appropriately completes the request."
PAIRED = ", paired with an input that provides further context."


def alpaca(record):
    middle = f"\n\n### Input:\n{record['input']}" if record["input"] else ""
    head = TASK.format(PAIRED if record["input"] else ".")
    return f"{head}\n\n### Instruction:\n{record['instruction']}{middle}\n\n### Response:\n"


def commonsense(record):
    margin = " " * 16
    middle = f"\n{margin}### Input:\n{margin}{record['input']}\n{margin}" if record["input"] else ""
    head = f"{TASK.format(PAIRED)} " if record["input"] else f"{TASK.format('.')}  "
    asked = f"\n\n{margin}### Instruction:\n{margin}{record['instruction']}\n{margin}"
    return f"{head}{asked}{middle}\n{margin}### Response:\n{margin}"


PROMPTS = {"dora": commonsense, "alpaca-lora": alpaca}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models.build("llama2", tmp_path)
    (tmp_path / "data.json").write_text(json.dumps(RECORDS))
    return tmp_path


def translated(folder, name, *flags, arguments=ARGUMENTS):
    """What the command of these flags becomes beside the program."""
    (folder / "finetune.py").write_text(PROGRAM.format(signature=SIGNATURES[name], arguments=arguments))
    options = Options(read=lambda path: Path(path).read_text(encoding="utf-8"))
    words = ["python", "finetune.py", "--base_model", str(folder / "llama2"), *FLAGS, *flags]
    found = translate_command(words, options)
    return found, json.loads(json.dumps(found.config))


def theirs(folder, prompt, masked):
    """Prompt and answer as one text, cut at its end, EOS where there is room; a prompt is masked by its own length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama2")
    rows = []
    for record in RECORDS:
        ids = tokenizer(prompt(record) + record["output"], truncation=True, max_length=CUTOFF)["input_ids"]
        if len(ids) < CUTOFF:
            ids = [*ids, tokenizer.eos_token_id]
        hidden = len(tokenizer(prompt(record))["input_ids"]) if masked else 0
        rows.append({"ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return rows


def rates(total):
    """transformers' linear schedule with warm-up."""
    return [1e-4 * (step / WARMUP if step < WARMUP else (total - step) / (total - WARMUP)) for step in range(total)]


def straddling(ours, right):
    """How many answers' first tokens hold blanks of the prompt, so that its length masks them there. All else must be
    equal."""
    assert [ids for ids, _ in ours] == [ids for ids, _ in right]
    count = 0
    for (_, labels), (_, masked) in zip(ours, right, strict=True):
        different = [place for place, pair in enumerate(zip(labels, masked, strict=True)) if pair[0] != pair[1]]
        first = next(place for place, label in enumerate(labels) if label != -100)
        assert different in ([], [first])
        count += len(different)
    return count


@pytest.mark.parametrize("flags", [(), ("--train_on_inputs=False",)])
@pytest.mark.parametrize("name", PROMPTS)
def test_each_program_trains_its_own_texts_labels_and_rates(folder, name, flags):
    found, config = translated(folder, name, *flags)
    ours = run_until_step_1(config, step=False)
    right = learnt(theirs(folder, PROMPTS[name], bool(flags)))
    assert straddling(sorted(learnt(ours.examples)), sorted(right)) == (1 if flags and name == "dora" else 0)
    assert max(len(ids) for ids, _ in right) == CUTOFF  # one is cut
    assert ours.learning_rates == pytest.approx(rates(160), abs=RATE)
    assert config.get("optim", {}).get("weight_decay", 0.0) == 0.0
    assert config["precision"] == {"compute": "fp16", "base": "fp16"}
    told = {note.word: note.outcome for note in found.notes}
    assert told.get("load_in_8bit=True") == ("changed" if name == "alpaca-lora" else None)

    other = next(prompt for prompt in PROMPTS.values() if prompt is not PROMPTS[name])
    for twin in (theirs(folder, other, bool(flags)), theirs(folder, PROMPTS[name], not flags)):
        with pytest.raises(AssertionError):
            straddling(sorted(learnt(ours.examples)), sorted(learnt(twin)))


def test_a_base_in_8_bits_is_the_one_that_transformers_loads(folder):
    """Of the first step, whose adapter is still zero, beside `load_in_8bit=True` in training mode."""
    assert translated(folder, "guide", "--load_8bit")[1]["precision"]["base"] == "int8"
    _, config = translated(folder, "dora", "--load_8bit")
    assert config["precision"] == {"compute": "fp16", "base": "int8"}
    config["precision"]["compute"], config["batch"] = "fp32", {"size": 3, "micro": 1}
    ours = run_until_step_1(config, step=True)
    in_8_bits = transformers.BitsAndBytesConfig(load_in_8bit=True)
    assert abs(ours.first_loss - loss_of(folder, ours.examples, quantization_config=in_8_bits)) < LOSS
    assert abs(ours.first_loss - loss_of(folder, ours.examples)) > LOSS  # twin: the base as it is


def loss_of(folder, examples, **given):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama2", dtype=torch.float32, **given).train()
    total, count = 0.0, 0
    for row in examples:
        labels = torch.tensor(row["labels"][1:])
        logits = model(input_ids=torch.tensor([row["ids"]])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


def test_the_file_and_not_the_flags_says_which_program_it_is(folder):
    words = ("--lora_target_modules", "[k_proj,o_proj]")
    of_alpaca_lora = translated(folder, "alpaca-lora", *words)[1]
    of_dora = translated(folder, "dora", *words)[1]
    of_the_guide = translated(folder, "guide", *words)[1]
    assert of_alpaca_lora["adapter"]["targets"] == ["k_proj", "o_proj"]
    assert of_dora["adapter"]["targets"] == of_the_guide["adapter"]["targets"] == ["q_proj", "v_proj"]
    assert of_the_guide["optim"]["weight_decay"] == 0.01
    assert "train_on" not in of_the_guide["data"]
    assert "schedule" not in of_the_guide["optim"] or of_the_guide["optim"]["schedule"] == "linear"


def test_numbers_that_a_copy_of_the_program_changed_are_its_own(folder):
    found, config = translated(folder, "dora", arguments="warmup_steps=7, lr_scheduler_type='cosine', bf16=True")
    assert config["optim"].get("schedule", "cosine") == "cosine"
    assert (config["optim"]["warmup"], config["log_every"]) == ("7 steps", 500)  # transformers logs every 500
    assert config["precision"]["compute"] == "bf16"
    assert not [note for note in found.notes if note.outcome == "changed"]
    found, _ = translated(folder, "dora", arguments="warmup_ratio=0.1, adam_beta2=0.95")
    unread = [note for note in found.notes if note.outcome == "changed"]
    assert {note.where.partition(":")[0] for note in unread} == {"finetune.py"}
    assert {note.word.partition("=")[0] for note in unread} == {"warmup_ratio", "adam_beta2"}


def test_another_script_of_the_name_is_read_as_a_script(folder):
    (folder / "finetune.py").write_text("import argparse\n")
    options = Options(read=lambda path: Path(path).read_text(encoding="utf-8"))
    with pytest.raises(InputError) as caught:
        translate_command(["python", "finetune.py", "--base_model", "m"], options)
    assert caught.value.faults[0].where == "--base_model m"
