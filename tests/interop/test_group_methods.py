"""GRPO and RLOO in the words of TRL and Axolotl: each value where it belongs, or refused; the rewards they name."""

from __future__ import annotations

import json

import pytest

from helpers.faults import refused_settings
from interop.small_configs import outcome, text_of
from interop.small_configs import translated as small
from surefoot.config.schema import RunConfig
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import Fault, InputError

REWARDS = """
def short(completions, **fields):
    return [0.0 for one in completions]
def named(prompts, completions, log_extra=None, **fields):
    return [0.0 for one in completions]
async def slow(completions, **fields):
    return [0.0 for one in completions]
def of_the_trainer(completions, trainer_state, **fields):
    return [0.0 for one in completions]
def in_secret(completions, **fields):
    return [fields["trainer_state"].global_step for one in completions]
def by_place(completions, /, **fields):
    return [0.0 for one in completions]
def other(texts):
    return [0.0 for one in texts]
made = short
"""
OWN = {"name": "rewards/mine.py:short", "convention": "trl"}


def read(path: str) -> str:
    if path == "rewards/mine.py":
        return REWARDS
    raise InputError(Fault(path, "cannot be read"))


def first(path: str):
    return {"texts.jsonl": {"prompt": "Why?"}, "turns.jsonl": {"prompt": [{"role": "user", "content": "Why?"}]}}[path]


OPTIONS = Options(read=read, first=first)


def trl(words: str, reward: str = "rewards.mine.short"):
    command = f"trl {words} --model_name_or_path m --dataset_name texts.jsonl --output_dir o --reward_funcs {reward}"
    return translate_command(command.split(), OPTIONS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("grpo", {"max_new_tokens": 512, "clip_high": 0.2}),
        ("grpo --loss_type grpo --beta 0.04", {"loss": "grpo", "kl": 0.04, "kl_by_ratio": True, "max_new_tokens": 512}),
        ("grpo --loss_type grpo --beta 0.04 --use_bias_correction_kl false --max_completion_length 9",
         {"loss": "grpo", "kl": 0.04, "kl_by_ratio": False, "max_new_tokens": 9}),
        ("grpo --loss_type dr_grpo --scale_rewards false --max_completion_length 9 --num_generations 4",
         {"loss": "dr_grpo", "scale": "auto", "max_new_tokens": 9, "group": 4}),
        ("grpo --loss_type dr_grpo --max_completion_length 9",
         {"loss": "dr_grpo", "scale": "group", "max_new_tokens": 9}),
        ("grpo --scale_rewards batch --epsilon_high 0.28 --max_completion_length 9",
         {"scale": "step", "clip_high": "auto", "max_new_tokens": 9}),
        ("grpo --loss_type cispo --epsilon_high 5 --max_completion_length 9",
         {"loss": "cispo", "clip_high": "auto", "max_new_tokens": 9}),
        ("grpo --loss_type grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 "
         "--max_completion_length 9",
         {"loss": "gspo", "clip_low": "auto", "clip_high": "auto", "max_new_tokens": 9}),
        ("grpo --steps_per_generation 4 --gradient_accumulation_steps 2 --num_iterations 3 --temperature 0.7 "
         "--max_completion_length 9",
         {"rollout_batches": 2, "epochs": 3, "temperature": 0.7, "max_new_tokens": 9, "clip_high": 0.2}),
        ("grpo --generation_batch_size 16 --mask_truncated_completions --max_completion_length 9",
         {"rollout_batches": 2, "overlong": "mask", "max_new_tokens": 9, "clip_high": 0.2}),
        ("grpo --top_p 0.9 --top_k 20 --max_completion_length 9",
         {"top_p": 0.9, "top_k": 20, "max_new_tokens": 9, "clip_high": 0.2}),
        ("grpo --use_vllm --vllm_mode server --max_completion_length 9",
         {"engine": "vllm", "vllm_url": "http://127.0.0.1:8000", "correction": "sequence_mask", "max_new_tokens": 9,
          "clip_high": 0.2}),
        ("grpo --use_vllm --max_completion_length 9", {"max_new_tokens": 9, "clip_high": 0.2}),
        ("rloo --max_completion_length 9", {"loss": "rloo", "kl": 0.05, "group": 2, "max_new_tokens": 9}),
        ("rloo --beta 0 --max_completion_length 9", {"loss": "rloo", "kl": 0, "group": 2, "max_new_tokens": 9}),
    ],
)  # fmt: skip
def test_trls_settings(words, expected):
    found = trl(words).config
    grpo = found["grpo"]
    assert found["stage"] == "grpo"
    assert grpo.pop("rewards") == [OWN]
    wanted = RunConfig.model_validate({**found, "grpo": expected}).grpo
    assert RunConfig.model_validate({**found, "grpo": grpo}).grpo == wanted
    assert (found["data"]["max_length"], found["model"]["dropout"]) == ("model", "own")


def test_what_trl_asks_for_in_vain():
    asked = {
        "grpo --loss_type sapo": "loss_type",
        "grpo --loss_type dapo --importance_sampling_level sequence": "importance_sampling_level",
        "grpo --loss_type cispo": "epsilon",  # 0.2, of the ratio itself
        "grpo --steps_per_generation 1 --gradient_accumulation_steps 2": "steps_per_generation",
        "grpo --generation_batch_size 12": "generation_batch_size",
        "grpo --delta 2": "delta",
        "grpo --min_p 0.1": "min_p",
        "grpo --entropy_coef 0.1": "entropy_coef",
        "grpo --multi_objective_aggregation normalize_then_sum": "multi_objective_aggregation",
        "grpo --reward_weights 1 2": "reward_weights",
        "rloo --normalize_advantages": "normalize_advantages",
        "rloo --reward_clip_range -1 1": "reward_clip_range",
        "rloo --sync_ref_model": "sync_ref_model",
    }
    assert {words: refused_settings(lambda words=words: trl(words)) for words in asked} == {
        words: [name] for words, name in asked.items()
    }


@pytest.mark.parametrize(
    ("named", "rewards"),
    [
        ("rewards.mine.short", [OWN]),
        ("rewards.mine.made", [{**OWN, "name": "rewards/mine.py:made"}]),  # seen when the run begins
        ("package.of.another", [{**OWN, "name": "package.of:another"}]),
        ("rewards.mine.named think_format_reward --reward_weights 1 0.5",
         [{**OWN, "name": "rewards/mine.py:named"},
          {"name": "regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>", "weight": 0.5}]),
        ("accuracy_reward --reward_model_name_or_path judge",
         [{"name": "./judge"}, {"name": "math", "field": "solution"}]),
    ],
)  # fmt: skip
def test_rewards(named, rewards):
    assert trl("grpo", named).config["grpo"]["rewards"] == rewards


def test_trls_penalty_of_long_answers_is_daposs_own():
    found = trl("grpo --max_completion_length 1280", "rewards.mine.short get_soft_overlong_punishment").config["grpo"]
    assert (found["overlong"], found["overlong_buffer"], found["rewards"]) == ("penalise", 256, [OWN])
    assert refused_settings(lambda: trl("grpo", "get_soft_overlong_punishment")) == ["reward_funcs"]


@pytest.mark.parametrize("name", ["slow", "of_the_trainer", "in_secret", "by_place", "other"])
def test_a_function_that_cannot_be_called_so_is_refused(name):
    assert refused_settings(lambda: trl("grpo", f"rewards.mine.{name}")) == ["reward_funcs"]


@pytest.mark.parametrize("named", ["unknown_reward", ""])
def test_what_names_no_reward_is_refused(named):
    words = {"model_name_or_path": "m", "dataset_name": "texts.jsonl", "output_dir": "o", "num_generations": 4}
    text = json.dumps(words | ({"reward_funcs": [named]} if named else {}) | {"loss_type": "dapo"})
    assert refused_settings(lambda: translate_file("r.json", text, [], OPTIONS), text=text) == ["reward_funcs"]


def test_a_file_alone_is_grpos_where_its_settings_say_so():
    words = {"model_name_or_path": "m", "dataset_name": "texts.jsonl", "output_dir": "o"}
    own = words | {"reward_funcs": ["rewards.mine.short"], "scale_rewards": "group"}
    assert translate_file("run.json", json.dumps(own), [], OPTIONS).config["stage"] == "grpo"
    both = json.dumps(words | {"reward_funcs": ["rewards.mine.short"]})
    with pytest.raises(InputError) as caught:
        translate_file("run.json", both, [], OPTIONS)
    assert [fault.code for fault in caught.value.faults] == ["SF-TRANSLATE-COMMAND"]
    named = translate_file("rloo.json", both, [], OPTIONS).config["grpo"]
    assert named["loss"] == "rloo"


AXOLOTL = {"base_model": "m", "rl": "grpo", "learning_rate": 1e-6, "micro_batch_size": 4, "output_dir": "o"}


def axolotl_text(path: str = "turns.jsonl", trl=None, **words) -> str:
    block = {"reward_funcs": ["rewards.mine.short"], "max_completion_length": 512, **(trl or {})}
    return json.dumps(AXOLOTL | {"datasets": [{"path": path}], "trl": block} | words)


def axolotl(path: str = "turns.jsonl", **words):
    return translate_file("a.json", axolotl_text(path, **words), [], OPTIONS).config


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_generations": 4, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3, "temperature": 0.7},
        {"loss_type": "dr_grpo", "scale_rewards": False, "beta": 0.04, "use_bias_correction_kl": False},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "mask_truncated_completions": True},
        {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_cap": 2.0},
        {"reward_weights": [0.5], "generation_batch_size": 8, "top_p": 0.9, "top_k": 20},
    ],
)
def test_axolotls_block_is_what_trl_makes_of_it(more):
    flags = [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in more.items()
    ]
    theirs = trl(f"grpo --per_device_train_batch_size 4 {' '.join(flags)}").config
    assert axolotl(trl=more)["grpo"] == theirs["grpo"]
    assert axolotl(trl=more)["data"]["max_length"] == theirs["data"]["max_length"]


def test_axolotls_penalty_and_template():
    assert axolotl(rl_beta=0.1)["grpo"]["kl"] == 0.1
    assert axolotl(rl_beta=0.1, trl={"beta": 0.2})["grpo"]["kl"] == 0.2
    assert axolotl(chat_template="chatml")["data"]["template"] == "chatml"
    assert axolotl("texts.jsonl", chat_template="chatml")["data"]["template"] == "by-record"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"datasets": [{"path": "turns.jsonl", "type": "own.transform"}]}, "datasets"),
        ({"trl": {"max_completion_length": None}}, "trl.max_completion_length"),
        ({"trl": {"rollout_func": "a.b"}}, "trl.rollout_func"),
        ({"trl": {"async_prefetch": True}}, "trl.async_prefetch"),
        ({"trl": {"replay_buffer_size": 4}}, "trl.replay_buffer_size"),
        ({"trl": {"loss_type": "sapo"}}, "trl.loss_type"),
        ({"chat_template": "qwen3"}, "chat_template"),
    ],
)
def test_what_axolotl_asks_for_in_vain(words, name):
    with pytest.raises(InputError) as caught:
        axolotl(**words)
    (fault,) = caught.value.faults
    assert fault.code == "SF-TRANSLATE-SETTING"
    assert name in str(fault)


def test_variables_of_a_chat_template() -> None:
    words = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = {"datasets": [{"path": "d.jsonl", "type": "chat_template"}], "chat_template": "tokenizer_default"}
    found = small("axolotl", **chat, **words)
    assert found.config["data"]["template_arguments"] == {"enable_thinking": False}
    assert outcome(found, "chat_template_kwargs") == "carried"
    command = "trl grpo --model_name_or_path m --dataset_name a/b --reward_funcs think_format_reward"
    grpo = translate_command([*command.split(), "--chat_template_kwargs", '{"reasoning_effort": "low"}'], Options())
    assert grpo.config["data"]["template_arguments"] == {"reasoning_effort": "low"}
    nested = {"chat_template_kwargs": {"documents": [1]}}
    text = text_of("axolotl", **chat, **nested)
    assert refused_settings(lambda: small("axolotl", **chat, **nested), text=text) == ["chat_template_kwargs"]
