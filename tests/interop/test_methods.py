"""Reward models, preferences and PPO in the words of LLaMA-Factory and TRL: each value where it belongs, or refused."""

from __future__ import annotations

import json

import pytest

from helpers.faults import refused_settings
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.trl.methods import METHODS, rows_of
from surefoot.interop.trl.rows import OWN_ROWS
from surefoot.system.errors import Fault, InputError

DESCRIBED = {
    "pairs": {"file_name": "dpo.json", "ranking": True, "formatting": "sharegpt",
              "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "alpaca": {"file_name": "a.json", "ranking": True, "columns": {"prompt": "q", "chosen": "c", "rejected": "r"}},
    "judged": {"file_name": "k.json", "formatting": "sharegpt",
               "columns": {"messages": "messages", "kto_tag": "label"}},
    "sft": {"file_name": "s.json"},
}  # fmt: skip


def read(path: str) -> str:
    if path == "data/dataset_info.json":
        return json.dumps(DESCRIBED)
    raise InputError(Fault(path, "cannot be read"))


def factory_text(stage: str, dataset: str = "pairs", **words: object) -> str:
    given = {"model_name_or_path": "m", "stage": stage, "do_train": True, "dataset": dataset, "template": "llama3",
             "output_dir": "o", **words}  # fmt: skip
    return json.dumps(given)


def factory(stage: str, dataset: str = "pairs", **words: object):
    return of_text(factory_text(stage, dataset, **words))


def of_text(text: str):
    return translate_file("run.json", text, [], Options(read=read))


def trl(words: str):
    return translate_command(
        f"trl {words} --model_name_or_path m --dataset_name org/d --output_dir o".split(), Options()
    )


@pytest.mark.parametrize(
    ("stage", "words", "section", "expected"),
    [
        ("rm", {}, "reward", None),
        ("dpo", {}, "alignment", None),  # the defaults are the same
        ("dpo", {"pref_beta": 0.2, "pref_ftx": 0.5, "dpo_label_smoothing": 0.1}, "alignment",
         {"beta": 0.2, "sft": 0.5, "label_smoothing": 0.1}),
        ("dpo", {"pref_loss": "ipo", "ref_model": "r"}, "alignment", {"loss": "ipo", "reference": "r"}),
        ("dpo", {"pref_loss": "hinge"}, "alignment", {"loss": "hinge"}),
        ("dpo", {"pref_loss": "orpo", "pref_beta": 0.3}, "alignment", {"loss": "orpo", "beta": 0.3}),
        ("dpo", {"pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0}, "alignment",
         {"loss": "simpo", "beta": 2.0, "margin": 1.0}),
        ("kto", {"kto_chosen_weight": 1.5, "kto_rejected_weight": 0.5}, "alignment", {"good": 1.5, "bad": 0.5}),
        ("ppo", {"reward_model": "rm"}, "ppo",
         {"reward": "rm", "critic_lr": 5e-5, "rollout_batches": None, "epochs": 4, "max_new_tokens": 1024,
          "temperature": 0.95, "top_p": 0.7, "kl": 0.2, "kl_target": 6.0, "reward_clip": "none", "whiten": True}),
        ("ppo", {"reward_model": "rm", "ppo_buffer_size": 2, "ppo_epochs": 1, "max_new_tokens": 64, "top_k": 0,
                 "reward_model_type": "full", "learning_rate": 1e-5}, "ppo",
         {"reward": "rm", "critic_lr": 1e-5, "rollout_batches": 2, "epochs": 1, "max_new_tokens": 64}),
    ],
)  # fmt: skip
def test_llamafactorys_stages(stage, words, section, expected):
    dataset = {"kto": "judged", "ppo": "sft"}.get(stage, "pairs")
    found = factory(stage, dataset, **words).config
    assert found["stage"] == {"rm": "reward"}.get(stage, stage)
    if expected is None:
        assert section not in found
        return
    for name, value in expected.items():
        wanted = {"none": None}.get(value, value) if isinstance(value, str) else value
        assert (name in found[section]) == (value is not None), name
        assert found[section].get(name) == wanted, name
    if section == "alignment":
        assert found[section] == expected


@pytest.mark.parametrize(
    ("stage", "dataset", "source"),
    [
        ("rm", "pairs", {"path": "data/dpo.json", "format": "preference"}),
        ("dpo", "alpaca", {"path": "data/a.json", "format": "preference",
                           "columns": {"instruction": "q", "chosen": "c", "rejected": "r"}}),
        ("kto", "judged", {"path": "data/k.json", "format": "judged",
                           "columns": {"conversations": "messages", "kto_tag": "label"}}),
    ],
)  # fmt: skip
def test_described_sets_of_pairs_and_judged_answers(stage, dataset, source):
    assert factory(stage, dataset).config["data"]["train"] == source


@pytest.mark.parametrize("verb", ["dpo", "kto", "reward", "orpo", "cpo"])
@pytest.mark.parametrize(("given", "outcome"), [(" --max_length 512", "changed"), ("", "assumed")])
def test_what_trl_does_to_longer_examples_is_said(verb, given, outcome):
    """reward leaves them out; the others keep the start, or the prompt."""
    found = trl(f"{verb}{given}")
    notes = [note for note in found.notes if "data.max_length" in note.keys]
    assert (found.config["data"]["max_length"], [note.outcome for note in notes]) == (512 if given else 1024, [outcome])
    usual = [note.why for note in trl(f"sft{given}").notes if "data.max_length" in note.keys]  # twin: sft is cut alike
    assert [note.why for note in notes] != usual


@pytest.mark.parametrize("verb", ["dpo", "kto", "reward"])
def test_without_a_limit_nothing_is_cut_there_or_here(verb):
    whys = [
        [note.why for note in trl(f"{one} --max_length null").notes if "data.max_length" in note.keys]
        for one in (verb, "sft")
    ]
    assert whys[0] == whys[1] != []


REFUSED = [  # a stage, and words of which the last is refused
    ("dpo", {"pref_loss": "kto_pair"}),
    ("dpo", {"pref_bco_weight": 0.1}),
    ("dpo", {"ref_model": "r", "ref_model_adapters": "a"}),
    ("dpo", {"pref_loss": "ipo", "dpo_label_smoothing": 0.1}),
    ("dpo", {"ld_alpha": 0.5}),
    ("dpo", {"train_on_prompt": True}),
    ("kto", {"pref_ftx": 0.1}),
    ("ppo", {"reward_model": "http://x", "reward_model_type": "api"}),
    ("ppo", {"reward_model": "r", "ppo_score_norm": True}),
    ("ppo", {"reward_model": "r", "ppo_whiten_rewards": True}),
    ("ppo", {"reward_model": "r", "ref_model": "m"}),
]


def test_what_llamafactory_asks_for_in_vain():
    dataset = {"kto": "judged", "ppo": "sft"}
    for stage, words in REFUSED:
        text = factory_text(stage, dataset.get(stage, "pairs"), **words)
        assert refused_settings(lambda text=text: of_text(text), text=text) == [[*words][-1]]
    text = factory_text("ppo", "sft")
    assert refused_settings(lambda: of_text(text), text=text) == ["reward_model"]


@pytest.mark.parametrize(
    ("words", "stage", "section", "expected"),
    [
        ("dpo", "dpo", "alignment", None),
        ("dpo --beta 0.3 --label_smoothing 0.1 --precompute_ref_log_probs", "dpo", "alignment",
         {"beta": 0.3, "reference": "cached"}),
        ("dpo --loss_type sigmoid sft --loss_weights 1.0 0.2", "dpo", "alignment",
         {"loss": "sigmoid", "sft": 0.2}),
        ("dpo --loss_type ipo", "dpo", "alignment", {"loss": "ipo"}),
        ("dpo --loss_type apo_zero --label_smoothing 0.1", "dpo", "alignment", {"loss": "apo_zero"}),
        ("dpo --loss_type robust --label_smoothing 0.1", "dpo", "alignment",
         {"loss": "robust", "label_smoothing": 0.1}),
        ("kto --desirable_weight 2 --undesirable_weight 0.5", "kto", "alignment", {"good": 2, "bad": 0.5}),
        ("reward --center_rewards_coefficient 0.01", "reward", "reward", {"center": 0.01}),
        ("orpo --beta 0.2", "dpo", "alignment", {"loss": "orpo", "beta": 0.2, "sft_prompt": True}),
        ("cpo --loss_type simpo --cpo_alpha 0.5 --simpo_gamma 0.3", "dpo", "alignment",
         {"loss": "simpo", "sft": 0.5, "margin": 0.3}),
        ("cpo", "dpo", "alignment", {"loss": "cpo"}),  # with the cross entropy at 1, as surefoot's by itself
        ("cpo --label_smoothing 0.1 --cpo_alpha 1.5 --beta 0.3", "dpo", "alignment",
         {"loss": "cpo", "beta": 0.3, "label_smoothing": 0.1, "sft": 0.5}),
    ],
)  # fmt: skip
def test_trls_methods(words, stage, section, expected):
    found = trl(words).config
    assert found["stage"] == stage
    assert found.get(section) == expected
    assert found["model"]["dropout"] == 0.0  # disable_dropout is on by default
    assert found["optim"]["lr"] == (1e-4 if stage == "reward" else 1e-6)
    assert "train_on" not in found["data"]
    assert "encoding" not in found["data"]


def test_what_trl_asks_for_in_vain():
    asked = {
        "dpo --loss_type aot": "loss_type",
        "dpo --loss_type sigmoid ipo": "loss_type",
        "dpo --loss_weights 0.5": "loss_weights",
        "dpo --sync_ref_model": "sync_ref_model",
        "dpo --f_divergence_type js_divergence": "f_divergence_type",
        "dpo --packing": "packing",
        "kto --loss_type apo_zero_unpaired": "loss_type",
        "cpo --loss_type hinge": "loss_type",
        "cpo --cpo_alpha 0.5": "cpo_alpha",
        "cpo --loss_type simpo --label_smoothing 0.1": "label_smoothing",
    }
    assert {words: refused_settings(lambda words=words: trl(words)) for words in asked} == {
        words: [name] for words, name in asked.items()
    }
    assert refused_settings(lambda: trl("distillation"), "SF-TRANSLATE-COMMAND") == ["trl"]


# Of TRL 1.16's dataclasses, where they differ from TrainingArguments of transformers 5.
TRL_DEFAULTS = {
    "dpo": {"learning_rate": 1e-6, "disable_dropout": True, "max_length": 1024, "precompute_ref_log_probs": False,
            "loss_type": ["sigmoid"], "loss_weights": None, "ld_alpha": None, "f_divergence_type": "reverse_kl",
            "label_smoothing": 0.0, "beta": 0.1, "use_weighting": False, "sync_ref_model": False, "pad_token": None,
            "f_alpha_divergence_coef": 0.5, "discopop_tau": 0.05, "ref_model_mixup_alpha": 0.6,
            "ref_model_sync_steps": 512, "truncation_mode": "keep_start"},
    "kto": {"learning_rate": 1e-6, "loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0,
            "undesirable_weight": 1.0, "precompute_ref_log_probs": False, "max_length": 1024},
    "reward": {"learning_rate": 1e-4, "center_rewards_coefficient": None, "disable_dropout": True,
               "max_length": 1024, "chat_template_path": None, "eos_token": None, "pad_token": None},
    "orpo": {"learning_rate": 1e-6, "beta": 0.1, "max_length": 1024, "max_completion_length": None},
    "cpo": {"learning_rate": 1e-6, "beta": 0.1, "label_smoothing": 0.0, "loss_type": "sigmoid", "cpo_alpha": 1.0,
            "simpo_gamma": 0.5, "alpha": 0.0},
    "gkd": {"learning_rate": 2e-5, "temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_new_tokens": 128,
            "teacher_model_name_or_path": None, "disable_dropout": True, "seq_kd": False, "max_length": 1024},
    "grpo": {"learning_rate": 1e-6, "disable_dropout": False, "num_generations": 8, "max_completion_length": 512,
             "steps_per_generation": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "beta": 0.0,
             "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "importance_sampling_level": "token",
             "scale_rewards": "group", "loss_type": "dapo", "mask_truncated_completions": False,
             "use_bias_correction_kl": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": True,
             "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
             "vllm_importance_sampling_clip_min": None, "reward_weights": None, "shuffle_dataset": True},
    "rloo": {"learning_rate": 1e-6, "num_generations": 2, "max_completion_length": 512, "beta": 0.05,
             "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "normalize_advantages": False},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_trls(method):
    rows = rows_of(method, OWN_ROWS)
    assert {name: rows[name].default for name in TRL_DEFAULTS[method]} == TRL_DEFAULTS[method]
