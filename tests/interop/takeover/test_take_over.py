"""A script's training is taken over as the script built it, or what cannot be is named."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from helpers.faults import raises_fault, refused_settings
from helpers.tiny_models import tiny_llama
from surefoot.commands.run import prove
from surefoot.interop.launch import Command, Options, python_words
from surefoot.interop.registry import own_script
from surefoot.interop.takeover.in_script import weights
from surefoot.interop.takeover.in_script.arguments import evaluates
from surefoot.interop.takeover.in_script.handover import HandOver
from surefoot.interop.takeover.in_script.start import TakeOver
from surefoot.interop.takeover.session import Taken
from surefoot.interop.takeover.settings import check_taken, translation_of
from surefoot.system.errors import SurefootError

TEXTS = [f"number {number} is {('even', 'odd')[number % 2]}, said heron {number * 7}." for number in range(12)]
SCRIPT = Command("train.py")


class Texts(Dataset):
    def __init__(self, tokenizer):
        self.rows = [tokenizer(text) for text in TEXTS]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {"input_ids": self.rows[place]["input_ids"], "attention_mask": self.rows[place]["attention_mask"]}


class Packed(Texts):
    def __getitem__(self, place):
        ids = self.rows[place]["input_ids"]
        return {"input_ids": ids, "labels": ids, "position_ids": [*range(4), *range(len(ids) - 4)]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("takeover") / "base")


@pytest.fixture
def build(base, tmp_path):
    """Build a Trainer as a script would."""

    def build(kind=Trainer, *, adapter=None, model=None, data=Texts, mlm=False, arguments=None, **more):
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.pad_token = tokenizer.eos_token
        model = model or AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if mlm:
            tokenizer.mask_token = tokenizer.pad_token
        settings = {"per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, **(arguments or {})}
        return kind(
            model=get_peft_model(model, adapter) if adapter else model,
            args=TrainingArguments(str(tmp_path / "out"), **settings),
            train_dataset=data(tokenizer),
            data_collator=None if data is Packed else DataCollatorForLanguageModeling(tokenizer, mlm=mlm),
            processing_class=tokenizer,
            **more,
        )

    return build


def handed(trainer, folder: Path, processes: int = 1, resume=None) -> tuple[Taken, HandOver]:
    over = HandOver(trainer, folder)
    over.write(resume, processes)
    return Taken(folder, json.loads((folder / "handover.json").read_text())), over


def translated(taken: Taken, *dropped: str):
    check_taken(taken, SCRIPT.program, dropped)
    return translation_of(taken, SCRIPT, Options())


def refused(taken: Taken) -> dict[str, bool]:
    """Name -> whether it can be dropped."""
    return {one["name"]: one["droppable"] for one in taken.record["refused"]}


def proven(taken: Taken, over: HandOver, *dropped: str) -> None:
    prove(taken, translated(taken, *dropped), lambda places: over.loss_of(places, dropped))


@contextmanager
def raises_code(code):
    with pytest.raises(SurefootError) as caught:
        yield
    assert [fault.code for fault in caught.value.faults] == [code]


@pytest.fixture
def context(monkeypatch):
    """Of a command, which later faults are shown in, and whose environment ends with the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import click

    from surefoot.commands.main import main

    with click.Context(main):
        yield


ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_loss_and_gradient_are_the_scripts(build, tmp_path, adapter):
    """The adapter's A is drawn by the script; its gradient norm comes out only if the weights were taken."""
    proven(*handed(build(adapter=adapter), tmp_path / "taken"))


@pytest.mark.usefixtures("context")
def test_twin_a_label_mask_shifted_by_one_is_found(build, tmp_path):
    taken, over = handed(build(), tmp_path / "taken")
    path = tmp_path / "taken/train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["labels"] = [-100, -100, *row["input_ids"][2:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


@pytest.mark.usefixtures("context")
def test_twin_a_prompt_added_twice_is_found(build, tmp_path):
    taken, over = handed(build(), tmp_path / "taken")
    path = tmp_path / "taken/train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    doubled = [{key: values[:4] + values for key, values in row.items()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in doubled))
    record = {**taken.record, "longest": taken.record["longest"] + 4}
    with raises_code("SF-TAKE-OVER"):
        proven(Taken(taken.folder, record), over)


@pytest.mark.usefixtures("context")
def test_twin_an_adapter_with_other_weights_is_found(build, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.methods.policy.start_from", lambda model, saved: None)
    with raises_code("SF-TAKE-OVER"):
        proven(*handed(build(adapter=ADAPTER), tmp_path / "taken"))


def replaced_state(build):
    """A trainer whose model.state_dict the script has replaced: in alpaca-lora's PEFT 0.7 finds no adapter."""
    trainer = build(adapter=ADAPTER)
    trainer.model.state_dict = lambda *_, **__: {}
    return trainer


@pytest.mark.usefixtures("context")
def test_the_adapter_is_written_where_the_script_has_replaced_state_dict(build, tmp_path):
    proven(*handed(replaced_state(build), tmp_path / "taken"))


@pytest.mark.usefixtures("context")
def test_twin_the_replaced_state_dict_has_no_adapter(build, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_state", lambda model: model.state_dict())
    with raises_code("SF-CONVERT-LAYOUT"):
        proven(*handed(replaced_state(build), tmp_path / "taken"))


def test_settings_are_taken_by_value(build, base, tmp_path):
    chosen = {"learning_rate": 3e-4, "max_steps": 7, "gradient_accumulation_steps": 3, "weight_decay": 0.1, "seed": 5,
              "lr_scheduler_type": "cosine", "warmup_steps": 2, "bf16": True, "max_grad_norm": 0.5,
              "eval_strategy": "steps"}  # fmt: skip
    more = {"eval_dataset": Texts(AutoTokenizer.from_pretrained(base)), "callbacks": [EarlyStoppingCallback(2, 0.01)]}
    taken, _ = handed(build(adapter=ADAPTER, arguments=chosen, **more), tmp_path / "taken")
    config = translated(taken).config
    assert config["optim"] == {
        **config["optim"], "lr": 3e-4, "weight_decay": 0.1, "schedule": "cosine", "max_grad_norm": 0.5,
    }  # fmt: skip
    assert (config["seed"], config["duration"], config["batch"]) == (5, "7 steps", {"size": 12, "micro": 4})
    assert config["precision"] == {"compute": "bf16", "base": "fp32"}
    shape = {key: config["adapter"][key] for key in ("kind", "rank", "alpha", "dropout", "targets")}
    assert shape == {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.5, "targets": ["q_proj", "v_proj"]}
    assert config["early_stopping"] == {"patience": 2, "min_delta": 0.01}
    assert config["output"] == str(tmp_path / "out/surefoot")


@pytest.mark.parametrize("name", ["eval_strategy", "evaluation_strategy"])  # the second before transformers 4.41
def test_evaluations_are_asked_for_by_either_name(name):
    assert evaluates(SimpleNamespace(**{name: "steps"}))
    assert not evaluates(SimpleNamespace(**{name: "no"}))


def test_twin_the_newer_name_counts_where_both_are():
    """Versions that have both leave the older one empty."""
    assert not evaluates(SimpleNamespace(eval_strategy="no", evaluation_strategy=None))


@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_the_length_is_that_of_the_rows_and_not_a_default_of_trl(build, tmp_path, kind):
    taken, _ = handed(build(), tmp_path / "taken")
    found = translation_of(Taken(taken.folder, {**taken.record, "trainer": kind}), SCRIPT, Options())
    assert found.config["data"]["max_length"] == taken.record["longest"] != 1024


def test_early_stopping_without_evaluation_data_is_refused(build, tmp_path):
    taken, _ = handed(build(callbacks=[EarlyStoppingCallback()]), tmp_path / "taken")
    assert refused_settings(lambda: translated(taken)) == ["early_stopping_patience"]


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 6), (2, 4), (3, 2)])
def test_steps_are_counted_by_the_scripts_version(build, tmp_path, accumulated, steps):
    """Three batches an epoch, two epochs: transformers 5 takes a step for what is left of an epoch."""
    arguments = {"gradient_accumulation_steps": accumulated, "num_train_epochs": 2}
    taken, _ = handed(build(arguments=arguments), tmp_path / "taken")
    assert translated(taken).config["duration"] == f"{steps} steps"


def test_processes_of_a_launcher_share_the_steps(build, tmp_path):
    """Twelve rows, four a process: two steps an epoch on two processes."""
    taken, _ = handed(build(arguments={"num_train_epochs": 3}), tmp_path / "taken", processes=2)
    assert taken.record["steps"] == 6


def test_what_is_computed_in_16_bits_and_an_absent_limit_are_taken(build, base, tmp_path):
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        taken, _ = handed(build(model=model, arguments={"max_grad_norm": None}), tmp_path / name)
        config = translated(taken).config
        assert config["precision"]["compute"] == name
    assert config["optim"]["max_grad_norm"] is None


def test_a_default_of_another_version_is_taken_by_its_value(build, tmp_path):
    taken, _ = handed(build(), tmp_path / "taken")
    arguments = {**taken.record["arguments"], "weight_decay": 0.25}
    record = {**taken.record, "arguments": arguments, "defaults": {**taken.record["defaults"], "weight_decay": 0.25}}
    assert translated(Taken(taken.folder, record)).config["optim"]["weight_decay"] == 0.25


def test_an_unknown_argument_is_refused_unless_it_has_its_default(build, tmp_path):
    taken, _ = handed(build(), tmp_path / "taken")

    def with_new(value):
        arguments = {**taken.record["arguments"], "new_argument": value}
        defaults = {**taken.record["defaults"], "new_argument": 1}
        return translated(Taken(taken.folder, {**taken.record, "arguments": arguments, "defaults": defaults}))

    with_new(1)
    assert refused_settings(lambda: with_new(2)) == ["new_argument"]


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, *arguments, **named):
        return 2 * super().compute_loss(model, inputs, *arguments, **named)


class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        control.should_training_stop = state.global_step > 3


def test_code_of_the_scripts_own_is_named_and_given_up_only_by_its_name(build, tmp_path):
    taken, _ = handed(build(OwnLoss, callbacks=[Told()]), tmp_path / "taken")
    assert refused(taken) == {"compute_loss": True, "Told": True}
    with raises_fault("SF-TRANSLATE-SCRIPT", "train.py: Told", remedy=["Told"]):
        translated(taken, "compute_loss")
    assert {note.word for note in translated(taken, "compute_loss", "Told").notes} > {"compute_loss", "Told"}


@pytest.mark.usefixtures("context")
def test_a_loss_that_is_given_up_is_compared_with_the_librarys(build, tmp_path, monkeypatch):
    taken, over = handed(build(OwnLoss), tmp_path / "taken")
    proven(taken, over, "compute_loss")
    monkeypatch.setattr(over, "_known", OwnLoss)  # twin: the script's own is called
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over, "compute_loss")


@pytest.mark.usefixtures("context")
def test_several_devices_multiply_the_batch_and_not_the_loss(build, tmp_path):
    """torch's DataParallel, which the Trainer chooses by itself where it sees several GPUs."""
    trainer = build()
    trainer.args._n_gpu = 2
    taken, over = handed(trainer, tmp_path / "taken")
    proven(taken, over)
    assert translated(taken).config["batch"]["size"] == 8
    launched = Command("train.py", facts={"processes": 3}, processes=3)
    assert translation_of(taken, launched, Options()).config["batch"]["size"] == 12
    assert trainer.args.n_gpu == 2


def test_a_collator_that_draws_is_refused_and_cannot_be_given_up(build, tmp_path):
    taken, _ = handed(build(mlm=True), tmp_path / "taken")
    assert refused(taken) == {"DataCollatorForLanguageModeling": False}
    with raises_fault("SF-TRANSLATE-SCRIPT", "train.py: DataCollatorForLanguageModeling"):
        translated(taken, "DataCollatorForLanguageModeling")


def test_rows_of_several_texts_and_frozen_weights_are_refused(build, base, tmp_path):
    packed, _ = handed(build(data=Packed), tmp_path / "packed")
    assert refused(packed) == {"train_dataset": False}
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.embed_tokens.requires_grad_(False)
    frozen, _ = handed(build(model=model), tmp_path / "frozen")
    assert refused(frozen) == {"requires_grad": False}


def test_weights_are_linked_where_they_are_those_of_the_file_and_saved_where_not(build, base, tmp_path):
    handed(build(), tmp_path / "linked")
    weights = tmp_path / "linked/model/model.safetensors"
    assert weights.resolve() == (base / "model.safetensors").resolve()
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    saved, _ = handed(build(model=model), tmp_path / "saved")
    assert not (saved.folder / "model/model.safetensors").is_symlink()
    again = AutoModelForCausalLM.from_pretrained(saved.folder / "model")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_the_scripts_draws_and_weights_are_as_before(build, tmp_path):
    trainer = build(adapter=ADAPTER)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    _, over = handed(trainer, tmp_path / "taken")
    over.loss_of([0, 1])
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(one.grad is None for one in trainer.model.parameters())


class Answering:
    """surefoot's side: it trains at once, and saves the base again."""

    def __init__(self, base):
        self.base, self.sent = base, []

    def send(self, message):
        self.sent.append(message["kind"])

    def receive(self):
        return {"kind": "trained", "run": str(self.base), "steps": 3, "loss": 0.5}


def test_after_the_training_the_reference_is_on_the_device_as_well(build, base, monkeypatch):
    """ "meta" stands for the device; a quantized model is never moved."""
    trainer = build()
    trainer.ref_model = AutoModelForCausalLM.from_pretrained(base)
    monkeypatch.setattr(TrainingArguments, "device", torch.device("meta"))
    found = TakeOver(Answering(base), 1).train(trainer)
    assert (found.global_step, found.training_loss) == (3, 0.5)
    assert [one.device.type for one in (trainer.model, trainer.ref_model)] == ["meta", "meta"]


def test_twin_a_quantized_reference_stays_where_it_is(build, base, monkeypatch):
    trainer = build()
    trainer.ref_model = AutoModelForCausalLM.from_pretrained(base)
    trainer.ref_model.config.quantization_config = {}
    monkeypatch.setattr(TrainingArguments, "device", torch.device("meta"))
    TakeOver(Answering(base), 1).train(trainer)
    assert [one.device.type for one in (trainer.model, trainer.ref_model)] == ["meta", "cpu"]


def test_files_of_others_are_not_replaced(build, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        handed(build(), tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]


@pytest.fixture
def again(build, tmp_path):
    """A run with what was handed over first, and what the script hands over now."""
    first, _ = handed(build(), tmp_path / "out/taken-over.partial")
    first.settled(None)
    (tmp_path / "out/surefoot").mkdir()
    (tmp_path / "out/surefoot/config.yaml").touch()
    return handed(build(arguments={"learning_rate": 1.0}), tmp_path / "out/taken-over.partial")[0]


def test_a_run_that_continues_keeps_what_it_began_with(again, tmp_path):
    kept, changed = again.settled("resume")
    assert kept.stored
    assert changed == ["learning_rate"]
    assert kept.record["arguments"]["learning_rate"] != 1.0
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["surefoot", "taken-over"]


def test_a_run_is_replaced_only_if_that_is_asked_for(again, tmp_path):
    with raises_fault("SF-USE-OUTPUT", tmp_path / "out/surefoot", remedy=["--overwrite"]):
        again.settled(None)
    assert not again.settled("overwrite")[0].stored
    record = json.loads((tmp_path / "out/taken-over/handover.json").read_text())
    assert record["arguments"]["learning_rate"] == 1.0


def test_the_scripts_own_way_with_a_run_that_is_there_counts(build, tmp_path):
    """train(resume_from_checkpoint=True), and transformers 4's overwrite_output_dir; an argument alone does nothing."""
    resumed, _ = handed(build(), tmp_path / "resumed", resume=True)
    assert (resumed.mode, translated(resumed).arguments) == ("resume", ("--resume",))
    plain, _ = handed(build(arguments={"resume_from_checkpoint": "True"}), tmp_path / "plain")
    assert (plain.mode, translated(plain).arguments) == (None, ())
    arguments = {**plain.record["arguments"], "overwrite_output_dir": True}
    replaced = Taken(plain.folder, {**plain.record, "arguments": arguments})
    assert (replaced.mode, translated(replaced).arguments) == ("overwrite", ("--overwrite",))


def test_another_checkpoint_than_surefoots_is_refused(build, tmp_path):
    taken, _ = handed(build(), tmp_path / "taken", resume=f"{tmp_path}/elsewhere/checkpoint-5")
    assert refused_settings(lambda: translated(taken)) == ["resume_from_checkpoint"]


def test_a_folder_of_that_name_that_is_not_surefoots_is_kept(build, tmp_path):
    (tmp_path / "out/taken-over").mkdir(parents=True)
    (tmp_path / "out/taken-over/notes.txt").write_text("mine")
    taken, _ = handed(build(), tmp_path / "out/taken-over.partial")
    with raises_fault("SF-USE-OUTPUT", tmp_path / "out/taken-over"):
        taken.settled("overwrite")


def test_an_interrupted_hand_over_is_written_anew(build, tmp_path):
    folder = tmp_path / "out/taken-over.partial"
    taken, _ = handed(build(), folder)
    (folder / "handover.json").unlink()
    assert handed(build(), folder)[0].record == taken.record


@pytest.mark.parametrize(
    ("words", "python"),
    [
        ("python train.py", ["python"]),
        ("A=1 env B=2 python3.11 -X utf8 -u train.py python", ["python3.11", "-X", "utf8", "-u"]),
        ("uv run python train.py", ["uv", "run", "python"]),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", ["python"]),
    ],
)
def test_the_python_is_the_one_that_the_command_names(words, python):
    assert python_words(words.split()) == python


@pytest.mark.parametrize(
    ("name", "text", "own"),
    [
        ("train_mine.py", "Trainer().train()", True),
        ("dpo.py", "DPOTrainer().train()", True),
        ("dpo.py", "TrlParser()\nDPOTrainer().train()", False),  # TRL's own, which is translated
        ("dpo.py", "print()", False),
    ],
)
def test_a_script_of_ones_own_is_run_under_the_name_of_a_tools_as_well(tmp_path, monkeypatch, name, text, own):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    options = Options(read=lambda path: Path(path).read_text())
    assert (own_script(["python", name, "--beta", "0.1"], options) is not None) is own


def test_a_launcher_runs_the_python_beside_it_and_no_other(tmp_path, monkeypatch):
    launcher = tmp_path / "accelerate"
    launcher.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["accelerate", "launch", "train.py"]
    with raises_fault("SF-TRANSLATE-COMMAND", "accelerate"):
        python_words(words)
    (tmp_path / "python").touch(0o755)
    assert python_words(words) == [str(tmp_path / "python")]


def test_a_tokenizer_that_the_collator_alone_has_is_taken(build, tmp_path):
    trainer = build()
    trainer.processing_class = None
    taken, _ = handed(trainer, tmp_path / "taken")
    assert refused(taken) == {}
    assert AutoTokenizer.from_pretrained(taken.folder / "model").eos_token == trainer.data_collator.tokenizer.eos_token
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: collator(rows)
    trainer.model.config._name_or_path = ""  # twin: nor are there the files of the model
    without, _ = handed(trainer, tmp_path / "without")
    assert refused(without) == {"processing_class": False}


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("first", ["olora", "pissa", "orthogonal", False])
def test_first_values_are_taken_however_they_were_found(build, tmp_path, first):
    """OLoRA and PiSSA change the base as well, which is then stored."""
    shape = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=first)
    taken, over = handed(build(adapter=shape), tmp_path / "taken")
    assert taken.record["saved"] is (first in ("olora", "pissa"))
    proven(taken, over)
