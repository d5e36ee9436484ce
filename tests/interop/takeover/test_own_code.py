"""A script's own code beside the library's: what trains is compared or refused, what only reports is noted."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from peft import IA3Config, LoraConfig, PromptTuningConfig
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from helpers.faults import refused_settings
from interop.takeover.test_take_over import (  # noqa: F401
    OwnLoss,
    Told,
    base,
    build,
    context,
    handed,
    proven,
    raises_code,
    refused,
    translated,
)
from surefoot.commands.run import prove
from surefoot.interop.launch import Options, read_command
from surefoot.interop.takeover import Session, check_taken, own_losses, translation_of
from surefoot.interop.takeover.in_script import arguments as in_script_arguments
from surefoot.interop.takeover.in_script import handover, own_code
from surefoot.system.errors import InputError, SurefootError


@dataclass
class OwnArguments(TrainingArguments):
    model_max_length: int = 512


def test_arguments_that_a_script_adds_for_itself_are_not_the_trainers(build, tmp_path, monkeypatch):  # noqa: F811
    trainer = build()
    trainer.args.__class__, trainer.args.model_max_length = OwnArguments, 64
    taken, _ = handed(trainer, tmp_path / "taken")
    translated(taken)
    assert "model_max_length" not in taken.record["arguments"]
    monkeypatch.setattr(in_script_arguments, "LIBRARIES", (__name__.partition(".")[0],))  # twin
    twin, _ = handed(trainer, tmp_path / "twin")
    assert refused_settings(lambda: translated(twin)) == ["model_max_length"]


class SameLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **named):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", [SameLoss, OwnLoss])
def test_a_loss_of_the_scripts_own_is_taken_where_it_is_surefoots(build, tmp_path, kind):  # noqa: F811
    taken, over = handed(build(kind), tmp_path / "taken")
    with raises_code("SF-TRANSLATE-SCRIPT"):  # surefoot translate compares nothing
        check_taken(taken, "train.py", ())
    check_taken(taken, "train.py", (), compared=True)
    assert own_losses(taken, ()) == ["compute_loss"]
    assert not own_losses(taken, ["compute_loss"])

    def compared():
        found = translation_of(taken, read_command(["train.py"], Options()), Options())
        prove(taken, found, over.loss_of, own_losses(taken, ()))

    if kind is SameLoss:
        compared()
        return
    with raises_code("SF-TAKE-OVER"):
        compared()


@pytest.mark.usefixtures("context")
def test_a_loss_that_cannot_be_compared_is_not_taken(build, tmp_path, monkeypatch):  # noqa: F811
    taken, over = handed(build(SameLoss), tmp_path / "taken")
    found = translated(taken, "compute_loss")

    def no_memory(config):
        from surefoot.system.errors import Fault

        raise InputError(Fault("memory", "does not fit", "take less", code="SF-MEMORY"))

    monkeypatch.setattr("surefoot.commands.run._first_loss", no_memory)
    prove(taken, found, over.loss_of)
    with raises_code("SF-MEMORY"):
        prove(taken, found, over.loss_of, ["compute_loss"])


class Printed(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **named):
        self.seen.append(state.global_step)
        print(logs, control.should_save)
        return control


class Stored(TrainerCallback):
    def on_save(self, args, state, control, **named):
        named["model"].save_pretrained(args.output_dir)


class Ending(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        raise SystemExit


def test_a_callback_that_only_reports_is_noted(build, tmp_path):  # noqa: F811
    taken, _ = handed(build(callbacks=[Printed(), Stored(), Ending(), Told()]), tmp_path / "taken")
    assert refused(taken) == {"Stored": True, "Ending": True, "Told": True}
    assert [one["name"] for one in taken.record["noted"]] == ["Printed"]


def test_a_callback_whose_source_is_not_there_may_act(build, tmp_path):  # noqa: F811
    made = type("Made", (TrainerCallback,), {"on_log": lambda *_, **__: None})
    made.__module__ = "nowhere"
    taken, _ = handed(build(callbacks=[made()]), tmp_path / "taken")
    assert refused(taken) == {"Made": True}


class Reports(Trainer):
    def log(self, *arguments, **named):
        super().log(*arguments, **named)

    def save_model(self, *arguments, **named):
        super().save_model(*arguments, **named)

    def training_step(self, *arguments, **named):
        return super().training_step(*arguments, **named)


def test_methods_that_do_not_train_are_noted(build, tmp_path, monkeypatch):  # noqa: F811
    taken, _ = handed(build(Reports), tmp_path / "taken")
    assert refused(taken) == {"training_step": True}
    assert {one["name"] for one in taken.record["noted"]} == {"log", "save_model"}
    monkeypatch.setattr(own_code, "_WRITES", ())  # twin
    twin, _ = handed(build(Reports), tmp_path / "twin")
    assert refused(twin) == {"training_step": True, "save_model": True}


class Unlabelled(Dataset):
    def __init__(self, tokenizer):
        self.ids = tokenizer("a heron")["input_ids"]

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return {"input_ids": self.ids, "labels": [-100] * len(self.ids)}


def test_rows_without_a_single_label_are_refused(build, tmp_path):  # noqa: F811
    from transformers import default_data_collator

    trainer = build(data=Unlabelled)
    trainer.data_collator = default_data_collator
    taken, _ = handed(trainer, tmp_path / "taken")
    assert refused(taken) == {"train_dataset": False}


GROUP = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
print(torch.distributed.get_world_size(), file=open("size", "w"))
# Trainer(...).train()
"""


@pytest.mark.parametrize("launcher", [["torchrun", "--nproc_per_node=2"], []])
def test_a_script_of_a_launcher_sees_a_group_of_one(tmp_path, monkeypatch, launcher):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(GROUP)
    command = read_command([*launcher, "train.py"], Options())
    with pytest.raises(SurefootError), Session([sys.executable, "train.py"], command) as session:
        session.taken()
    assert (tmp_path / "size").is_file() == bool(launcher)


@pytest.mark.usefixtures("context")
def test_target_modules_that_the_model_has_not_are_left_out(build, tmp_path, monkeypatch):  # noqa: F811
    """PEFT asks that one of the names be there."""
    names = LoraConfig(r=4, target_modules=["q_proj", "W_pack", "proj"])
    taken, over = handed(build(adapter=names), tmp_path / "taken")
    proven(taken, over)
    assert taken.record["adapted"] == ["q_proj"]
    monkeypatch.setattr(handover, "_adapted", lambda model, targets: targets)  # twin
    twin, over = handed(build(adapter=names), tmp_path / "twin")
    with pytest.raises(SurefootError):
        proven(twin, over)


@pytest.mark.parametrize("kind", [IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[]),
                                  PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)])  # fmt: skip
def test_an_adapter_of_another_kind_is_refused_by_its_name(build, tmp_path, kind):  # noqa: F811
    taken, _ = handed(build(adapter=kind), tmp_path / "taken")
    assert refused(taken) == {"adapter": False}
    assert kind.peft_type.value in taken.record["refused"][0]["what"]
