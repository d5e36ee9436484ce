"""What a null means to the tool that reads it, and which modules of a translated run drop out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from helpers.faults import gives
from helpers.tiny_models import tiny_llama
from interop.small_configs import BASES, text_of, translated
from surefoot.config.contradictions import contradictions
from surefoot.config.schema import RunConfig
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.methods.policy import load_policy
from surefoot.runs.make_plan import make_plan
from surefoot.system.errors import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("models") / "base", pad=True)


def with_null(tool, name):
    *groups, last = name.split(".")
    inner = {last: None}
    for group in groups:
        inner = {group: BASES[tool][1][group] | inner}
    return translated(tool, **inner).config


NULLS = [  # what the tools' own code makes of None: cuts nothing, clips nothing, or is false
    ("trl", "max_length", ("data", "max_length"), "model"),
    ("trl", "max_grad_norm", ("optim", "max_grad_norm"), None),
    ("trl", "gradient_checkpointing", ("gradient_checkpointing",), "off"),
    ("tune", "tokenizer.max_seq_len", ("data", "max_length"), "model"),
    ("tune", "dtype", ("precision", "compute"), "fp32"),
    ("axolotl", "bf16", ("precision", "compute"), "fp32"),
    ("axolotl", "tf32", ("precision", "tf32"), "off"),
]


@pytest.mark.parametrize(("tool", "name", "key", "value"), NULLS, ids=[name for _, name, _, _ in NULLS])
def test_null_means_what_the_tool_makes_of_it(tool, name, key, value):
    found = with_null(tool, name)
    for step in key:
        found = found[step]
    assert found == value


@pytest.mark.parametrize(("tool", "name"), [("axolotl", "learning_rate")])
def test_a_null_that_cannot_be_given_is_refused(tool, name):
    with pytest.raises(InputError) as caught:
        with_null(tool, name)
    assert any(name in str(fault) for fault in caught.value.faults)


def test_without_a_limit_all_positions_of_the_model_count(base):
    positions = json.loads((base / "config.json").read_text())["max_position_embeddings"]
    data = {"train": [{"path": "d.jsonl"}], "max_length": "model"}
    config = RunConfig.model_validate({"stage": "sft", "model": {"path": str(base)}, "data": data,
                           "output": "o"})  # fmt: skip
    assert make_plan(config, measure=False).tokenizer.max_length.value == positions


def test_all_positions_hold_any_answer():
    """What is compared with a number of tokens is a number."""
    ppo = {"stage": "ppo", "model": {"path": "m"}, "data": {"train": [{"path": "d.jsonl"}], "max_length": "model"},
           "ppo": {"reward": "r"}, "output": "o"}  # fmt: skip
    assert not [problem for problem in contradictions(RunConfig.model_validate(ppo)) if "max_length" in problem.key]


def test_settings_or_names_say_which_training_a_file_of_trls_is_for():
    def possible(path, **more):
        try:
            return translate_file(path, text_of("trl", **more), [], Options()).config["stage"]
        except InputError as error:
            return next(fault.fix for fault in error.faults if fault.where == path)

    assert possible("sft.json") == possible("run.json", completion_only_loss=True) == "sft"

    def named(path, **more):
        return [stage for stage in ("sft", "dpo", "kto", "reward") if gives(possible(path, **more), stage)]

    assert named("run.json", beta=0.2, sync_ref_model=False) == ["dpo", "kto"]
    assert possible("run.json", f_divergence_type="reverse_kl") == possible("dpo/run.json") == "dpo"
    assert possible("reward_config.json") == "reward"
    assert named("run.json") == ["sft", "dpo", "kto", "reward"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": []}, "sft"),
        ({"chosen": "a", "rejected": "b"}, "dpo or reward"),
        ({"prompt": "", "label": True}, "kto"),
    ],
)
def test_so_does_the_first_record_of_the_data(record, said):
    try:
        found = translate_file("run.json", text_of("trl"), [], Options(first=lambda path: record)).config["stage"]
    except InputError as error:
        found = error.faults[0].fix
    assert said in found


SHARE = 0.25
LORA = f"--use_peft --lora_dropout {SHARE} --lora_target_modules q_proj v_proj"
FLAGS = "--model_name_or_path m --dataset_name org/d --output_dir o --bf16 false --max_length 64"


def axolotl(**more):
    words = {"sequence_len": 64, "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": SHARE}
    return translated("axolotl", lora_target_modules=["q_proj"], bf16=False, **words, **more)


def factory(stage):
    described = json.dumps({"a": {"file_name": "d.json", "ranking": True}})
    words = {"finetuning_type": "lora", "lora_dropout": SHARE, "lora_target": "q_proj", "cutoff_len": 64}
    return translated("factory", Options(read=lambda path: described), stage=stage, **words)


CASES = [
    *((f"trl {verb}", True) for verb in ("dpo", "kto", "reward", "orpo.py")),
    ("trl dpo --disable_dropout false", False),
    ("trl sft", False),
    ("axolotl dpo", True),
    ("axolotl orpo", True),
    ("axolotl sft", False),
    ("factory dpo", True),
    ("factory sft", False),
]


def of_case(case):
    tool, word, *more = case.split()
    if tool == "axolotl":
        pairs = [{"path": "d.jsonl", "type": "chat_template.argilla" if word == "orpo" else "chatml.intel"}]
        return axolotl() if word == "sft" else axolotl(rl=word, datasets=pairs)
    if tool == "factory":
        return factory(word)
    start = [word] if word.endswith(".py") else ["trl", word]
    return translate_command([*start, *more, *FLAGS.split(), *LORA.split()], Options())


@pytest.mark.parametrize(("case", "zeroed"), CASES, ids=[case for case, _ in CASES])
def test_the_modules_drop_out_as_the_tools_do(case, zeroed, base):
    """The reference: PEFT's adapter, and then every nn.Dropout set to 0 where the trainer does so."""
    reference = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(lora_dropout=SHARE, target_modules=["q_proj"])
    )
    for module in reference.modules():
        if isinstance(module, torch.nn.Dropout) and zeroed:
            module.p = 0.0
    given = json.loads(json.dumps(of_case(case).config)) | {"model": {"path": str(base)}}
    given["data"] = {"train": [{"path": "d.jsonl"}], "max_length": 64, "template": "plain"}
    config = RunConfig.model_validate(given)
    ours = load_policy(config, make_plan(config, measure=False), Path(base), None, torch.device("cpu"))
    assert shares(ours) == shares(reference)


def shares(model):
    return {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} - {0.0}
