"""torchtune's recipes: rows, validation, a teacher and what its repository names, beside what its source computes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Phi3Config, Phi3ForCausalLM

from helpers.architectures import LLAMA, build
from helpers.faults import raises_fault
from interop.small_configs import BASES, outcome, text_of
from surefoot.config.methods import AlignmentConfig
from surefoot.data.batching.batch import Example
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.data.batching.order import filled_rows, whole
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.translation import Translation
from surefoot.methods.distill.teacher import teacher_of
from surefoot.methods.losses.distill import DistillSettings, distill_objective
from surefoot.methods.losses.preference import LOSSES, Constants, Pairs
from surefoot.methods.losses.sft import supervised_logits
from surefoot.system.errors import InputError

SAME = 1e-6  # relative, float64 with norms in fp32
TUNE = BASES["tune"][1]


def tune(**more: Any) -> Translation:
    """Translate with groups of settings added to those of the smallest config."""
    given = {name: TUNE[name] | group if isinstance(group, dict) and name in TUNE else group
             for name, group in more.items()}  # fmt: skip
    return translate_file("t.json", text_of("tune", **given), [], Options())


def refused(**more: Any) -> set[str]:
    with pytest.raises(InputError) as caught:
        tune(**more)
    return {fault.what.partition(":")[0] for fault in caught.value.faults}


def packs(lengths: list[int], room: int) -> list[list[int]]:
    """torchtune's PackedDataset (bd2a0fc) without splitting: a pack is closed by the first example without room."""
    found: list[list[int]] = [[]]
    for index, length in enumerate(lengths):
        if sum(lengths[place] for place in found[-1]) + length > room:
            found.append([])
        found[-1].append(index)
    return found


@pytest.mark.parametrize(
    ("kind", "whole", "template"),
    [("alpaca_dataset", None, "torchtune-alpaca-llama3"), ("alpaca_cleaned_dataset", False, "torchtune-alpaca-llama3"),
     ("instruct_dataset", False, "llama3")],
)  # fmt: skip
def test_alpacas_prompt_is_a_turn(kind: str, whole: bool | None, template: str) -> None:
    """Where the prompt carries loss, its header does as well, and nothing differs."""
    given = {"_component_": f"torchtune.datasets.{kind}", "source": "org/d"}
    found = tune(dataset=given if whole is None else given | {"train_on_input": whole})
    assert found.config["data"]["template"] == template
    assert (outcome(found, "dataset._component_") == "changed") == (whole is False)


def test_instruct_datasets_read_two_columns() -> None:
    """A third one named input would be Alpaca's."""
    given = {"_component_": "torchtune.datasets.instruct_dataset", "source": "org/d",
             "column_map": {"input": "instruction", "output": "output"}}  # fmt: skip
    source = tune(dataset=given).config["data"]["train"]
    assert source == {"path": "org/d", "format": "prompt-completion",
                      "columns": {"prompt": "instruction", "completion": "output"}}  # fmt: skip


@pytest.mark.parametrize("record", [{"conversations": []}, {"conversations": [], "system": "Be brief."}])
def test_a_system_text_beside_the_turns_is_told(record: dict[str, Any]) -> None:
    given = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": "d.json",
             "conversation_column": "conversations", "conversation_style": "sharegpt"}  # fmt: skip
    options = Options(first=lambda path: record)
    found = translate_file("t.json", text_of("tune", dataset=given), [], options)
    assert (outcome(found, "dataset.data_files") == "changed") == ("system" in record)


def test_packed_rows_decide_the_batch() -> None:
    found = tune(dataset={"packed": True}, tokenizer={"max_seq_len": 512}, batch_size=2, gradient_accumulation_steps=4)
    assert found.config["batch"] == {"size": 8, "row_tokens": 512}
    lengths = np.random.default_rng(0).integers(40, 300, 2000)
    ours, theirs = len(filled_rows(0, whole(2000), lengths, 512)), len(packs(lengths.tolist(), 512))
    assert ours <= theirs < 1.25 * ours  # the note says that torchtune has more
    assert refused(dataset={"packed": True}) == {"dataset.packed"}


def test_validation_takes_the_end_of_the_split() -> None:
    words = {"dataset": {"split": "train[:95%]"}, "dataset_val": {"_component_": TUNE["dataset"]["_component_"],
             "split": "train[95%:]"}, "batch_size_val": 2}  # fmt: skip
    found = tune(**words, run_val_every_n_steps=50)
    share = {"of": [95, 5], "in_order": True}
    assert found.config["data"]["train"]["share"] == {**share, "take": 1}
    assert found.config["data"]["eval"]["share"] == {**share, "take": 2}
    assert found.config["eval_every"] == "50 steps"
    assert "eval" not in tune(**words).config["data"]  # without the number nothing is validated
    assert (found.config["data"]["eval"]["split"], "split" in found.config["data"]["train"]) == ("train", False)
    other = {"_component_": "torchtune.datasets.chat_dataset"}
    assert refused(dataset_val=other, run_val_every_n_steps=5) == {"dataset_val._component_"}


def test_the_output_head_is_a_target() -> None:
    lora = {"_component_": "torchtune.models.mistral.lora_mistral_7b", "lora_attn_modules": ["q_proj", "output_proj"]}
    found = tune(model=lora | {"apply_lora_to_output": True, "apply_lora_to_mlp": False}).config["adapter"]["targets"]
    assert found == ["q_proj", "o_proj", "lm_head"]
    assert tune(model=lora).config["adapter"]["targets"] == ["q_proj", "o_proj"]


def test_validation_reads_the_split_that_is_named_and_not_the_hubs_own() -> None:
    kind = TUNE["dataset"]["_component_"]
    given = {"dataset": {"source": "org/d"}, "run_val_every_n_steps": 50}
    for more, split in (({}, "train"), ({"split": "test"}, "test")):
        found = tune(**given, dataset_val={"_component_": kind, "source": "org/d", **more})
        assert found.config["data"]["eval"]["split"] == split
    assert "split" not in tune(dataset={"source": "org/d"}).config["data"]["train"]
    files = {"_component_": kind, "source": "json", "data_files": "v.json"}
    assert "split" not in tune(**given, dataset_val=files).config["data"]["eval"]


@pytest.mark.parametrize("family", ["phi3.lora_phi3_mini", "phi4.lora_phi4_14b"])
def test_where_matrices_are_fused_the_adapter_is_on_the_whole(family: str) -> None:
    lora = {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}
    found = tune(model=lora | {"_component_": f"torchtune.models.{family}"})
    targets = found.config["adapter"]["targets"]
    assert targets == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    with torch.device("meta"):
        modules = {
            name.rpartition(".")[2] for name, _ in Phi3ForCausalLM(Phi3Config(num_hidden_layers=1)).named_modules()
        }
    assert modules.issuperset(targets)
    outcomes = {note.word.partition(":")[0]: note.outcome for note in found.notes}
    assert [outcomes[f"model.{name}"] for name in lora] == ["changed", "changed"]
    other = tune(model=lora | {"_component_": "torchtune.models.llama3.lora_llama3_8b"})  # twin
    assert other.config["adapter"]["targets"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    outcomes = {note.word.partition(":")[0]: note.outcome for note in other.notes}
    assert [outcomes[f"model.{name}"] for name in lora] == ["carried", "carried"]


TEACHER = {
    "teacher_model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "teacher_checkpointer": {"checkpoint_dir": "teacher"},
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
}


def theirs(logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, ratio: float) -> torch.Tensor:
    """torchtune's loss (bd2a0fc): the mean cross entropy, and its ForwardKLLoss without the masked positions."""
    forward = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return (1 - ratio) * F.cross_entropy(logits, targets) + ratio * forward


@pytest.mark.parametrize("ratio", [0.5, 0.25, 1.0])
def test_a_teacher_has_torchtunes_gradient(ratio: float) -> None:
    config = tune(**TEACHER, kd_ratio=ratio).config
    assert (config["stage"], config["distill"]["teacher"]) == ("distill", "teacher")
    torch.manual_seed(0)
    student, teacher = (build(LLAMA, device="cpu", attn_implementation="sdpa").double() for _ in range(2))
    teacher.requires_grad_(False)
    batch = to_batch([Example(np.arange(3, 15), np.arange(12) >= 5, 0)], Layout(0))
    logits, targets = supervised_logits(student, batch)
    theirs(logits, supervised_logits(teacher, batch)[0], targets, ratio).backward()
    wanted = torch.cat([one.grad.flatten() for one in student.parameters() if one.grad is not None])
    student.zero_grad()

    def ours(sft: float) -> torch.Tensor:
        settings = DistillSettings(beta=config["distill"].get("beta", 0.0), temperature=1.0, sft=sft)
        student.zero_grad()
        distill_objective(settings, teacher_of(teacher, 320))(student, batch).loss.backward()
        found = torch.cat([one.grad.flatten() for one in student.parameters() if one.grad is not None])
        return ratio * found / batch.weight

    sft = config["distill"].get("sft", 0.0)
    assert float((ours(sft) - wanted).norm() / wanted.norm()) < SAME
    assert float((ours(sft + 0.5) - wanted).norm() / wanted.norm()) > 1000 * SAME


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"kd_ratio": 0.0}, "kd_ratio"),
        ({"clip_grad_norm": 1.0}, "kd_ratio"),  # a factor of the loss would change what is clipped
        ({"optimizer": {"_component_": "torch.optim.SGD"}}, "kd_ratio"),
        ({"kd_loss": {"_component_": "torchtune.modules.loss.SymmetricKLLoss"}}, "kd_loss._component_"),
        ({"teacher_checkpointer": {"output_dir": "o"}}, "teacher_checkpointer.checkpoint_dir"),
        ({"dataset": {"packed": True}, "tokenizer": {"max_seq_len": 64}}, "dataset.packed"),
    ],
)
def test_teachers_of_another_kind_are_refused(more: dict[str, Any], place: str) -> None:
    assert refused(**(TEACHER | more)) == {place}


def test_a_config_inside_torchtune_is_read_in_its_repository() -> None:
    files = {"recipes/configs/llama3/8B_full.yaml": json.dumps(TUNE | {"fsdp_cpu_offload": True})}
    command = ["tune", "run", "--nproc_per_node", "2", "full_finetune_distributed", "--config", "llama3/8B_full"]
    found = translate_command(command, Options(read=files.__getitem__))
    assert found.config["parallel"] == {"nproc": 2, "engine": "fsdp2", "offload": "all"}
    assert "parallel" not in translate_file("t.json", files.popitem()[1], [], Options()).config


def test_what_is_no_training_has_one_reason() -> None:
    given = {name: TUNE[name] for name in ("model", "tokenizer", "checkpointer")} | {"temperature": 0.6, "top_k": 300}
    with raises_fault("SF-TRANSLATE-COMMAND", "generation.json"):
        translate_file("generation.json", json.dumps(given), [], Options())


PAIRS = {
    "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
    "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05, "label_smoothing": 0.1},
}


def of_pairs(name: str, margin: torch.Tensor, **settings: float) -> torch.Tensor:
    """torchtune's DPOLoss and RSOLoss (bd2a0fc); margin: policy's minus reference's, chosen minus rejected."""
    if name == "RSOLoss":
        return torch.relu(1 - settings["gamma"] * margin)
    beta, smoothing = settings["beta"], settings["label_smoothing"]
    return -F.logsigmoid(beta * margin) * (1 - smoothing) - F.logsigmoid(-beta * margin) * smoothing


@pytest.mark.parametrize(
    "loss", [PAIRS["loss"], {"_component_": "torchtune.rlhf.loss.DPOLoss"},
             {"_component_": "torchtune.rlhf.loss.RSOLoss", "gamma": 0.3}]
)  # fmt: skip
def test_losses_of_pairs_are_torchtunes(loss: dict[str, Any]) -> None:
    config = tune(**(PAIRS | {"loss": loss})).config
    name = loss["_component_"].rpartition(".")[2]
    assert config["stage"] == "dpo"
    assert config["data"]["train"] == {
        "path": "lvwerra/stack-exchange-paired", "subset": "data/rl", "format": "preference",
        "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    }  # fmt: skip
    margin = torch.linspace(-30, 30, 61, dtype=torch.float64)
    wanted = of_pairs(name, margin, **{"beta": 0.1, "label_smoothing": 0.0, "gamma": 0.1} | {
        key: value for key, value in loss.items() if key != "_component_"})  # fmt: skip
    given = AlignmentConfig(**config.get("alignment", {}))
    zero = torch.zeros_like(margin)

    def ours(beta: float) -> torch.Tensor:
        return LOSSES[given.loss].loss(
            Pairs(margin, zero, zero, zero, zero, zero), Constants(beta, given.label_smoothing)
        )

    assert torch.allclose(ours(given.beta), wanted, rtol=SAME)
    assert not torch.allclose(ours(given.beta * 2), wanted, rtol=SAME)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}}, "loss._component_"),
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}}, "loss._component_"),
        ({"dataset": PAIRS["dataset"] | {"train_on_input": True}}, "dataset.train_on_input"),
    ],
)
def test_pairs_of_another_kind_are_refused(more: dict[str, Any], place: str) -> None:
    assert refused(**(PAIRS | more)) == {place}


@pytest.mark.parametrize(("folder", "expected"), [("m/", None), ("other", "other")])
def test_the_reference_is_the_model_itself_or_the_one_that_is_named(folder: str, expected: str | None) -> None:
    config = tune(**PAIRS, ref_checkpointer={"checkpoint_dir": folder}).config
    assert config["alignment"].get("reference") == expected


def test_processes_that_divide_layers_share_a_batch() -> None:
    """`dp_degree` of the recipes: the processes of the mesh without those of tensor_parallel_dim."""
    whole = {"recipes/configs/a.yaml": json.dumps(TUNE | {"batch_size": 3, "tensor_parallel_dim": 2})}
    command = ["tune", "run", "--nproc_per_node", "8", "full_finetune_distributed", "--config", "a"]
    found = translate_command(command, Options(read=whole.__getitem__))
    assert found.config["batch"] == {"size": 12, "micro": 3}
    assert found.config["parallel"] == {"nproc": 4, "engine": "fsdp2"}
    assert tune(tensor_parallel_dim=2).config["batch"]["size"] == 1
    command[3] = "3"
    with pytest.raises(InputError) as caught:
        translate_command(command, Options(read=whole.__getitem__))
    assert caught.value.faults[0].what.startswith("tensor_parallel_dim:")


def test_overrides_exchange_a_component_or_take_a_key_away() -> None:
    """As `_merge_yaml_and_cli_args` of torchtune does."""
    text = json.dumps(TUNE | {"optimizer": TUNE["optimizer"] | {"weight_decay": 0.5}})
    given = ["optimizer=torch.optim.SGD", "~optimizer.weight_decay"]
    found = translate_file("t.json", text, given, Options()).config["optim"]
    assert (found["name"], found.get("weight_decay", 0.0)) == ("sgd", 0.0)
    assert translate_file("t.json", text, given[:1], Options()).config["optim"]["weight_decay"] == 0.5


SEEING = {"model": {"_component_": "torchtune.models.llama4.lora_llama4_scout_17b_16e", "encoder_trainable": "frozen",
                    "fusion_trainable": "lora", "lora_attn_modules": ["q_proj"]}}  # fmt: skip


def test_texts_reach_the_decoder_alone() -> None:
    found = tune(model=SEEING["model"] | {"decoder_trainable": "lora"})
    assert found.config["adapter"]["targets"] == ["q_proj"]
    assert "vision" not in found.config
    for frozen in ("frozen", False):
        assert refused(model=SEEING["model"] | {"decoder_trainable": frozen}) == {"model.decoder_trainable"}


def test_ppo_of_torchtune_has_one_reason() -> None:
    given = {"policy_model": TUNE["model"], "tokenizer": TUNE["tokenizer"], "checkpointer": TUNE["checkpointer"]}
    with raises_fault("SF-TRANSLATE-COMMAND", "ppo.json"):
        translate_file("ppo.json", json.dumps(given | {"optimizer": TUNE["optimizer"]}), [], Options())
