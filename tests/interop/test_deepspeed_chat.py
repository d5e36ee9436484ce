"""DeepSpeed-Chat's flags: their defaults, one outcome for each, older names, and what cannot be given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from helpers.faults import refused_settings
from surefoot.config.overrides import expand_short_forms
from surefoot.config.problems import shape_problems
from surefoot.interop.deepspeed_chat import FOLDERS
from surefoot.interop.deepspeed_chat.log_lines import log_lines
from surefoot.interop.deepspeed_chat.pipeline import runs_of
from surefoot.interop.deepspeed_chat.rows import STEPS
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.interop.translation import Translation
from surefoot.system.errors import InputError

# Every flag of its three programs with its default: facts of its argument parsers.
FLAGS = json.loads((Path(__file__).parent / "facts" / "deepspeed_chat.json").read_text())
REQUIRED = {
    "sft": "--model_name_or_path org/m",
    "reward": "--model_name_or_path org/m",
    "dpo": "--model_name_or_path org/m",
    "ppo": "--actor_model_name_or_path org/a --critic_model_name_or_path org/c",
}
# Where another value than the default needs others beside it, or must be one of a few.
OTHER = {
    "data_path": "org/d", "data_split": "1,1,1", "lr_scheduler_type": "linear", "dtype": "bf16",
    "deepspeed_config": "x",
    "lora_dim": "4 --only_optimize_lora", "actor_lora_dim": "4 --only_optimize_lora", "max_answer_seq_len": "128",
    "critic_lora_dim": "4 --actor_lora_dim 4 --only_optimize_lora", "lora_module_name": "layers.", "dropout": "0.1",
    "actor_dropout": "0.1", "critic_dropout": "0.1", "zero_stage": "2", "actor_zero_stage": "2",
    "critic_zero_stage": "2",
    "sft_only_data_path": "org/e", "per_device_generation_batch_size": "32", "eot_token": "<e>",
}  # fmt: skip
FILES = {
    "pairs.json": [{"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": " b", "rejected": " c"}],
    "plain.json": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "sft.json": [{"prompt": "a", "response": "b"}],
    "../../data/train.json": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
}


def first(path: str) -> dict | None:
    return FILES[path][0] if path in FILES else None


def told(step: str, words: str = "", processes: str = "") -> Translation:
    folder = f"/chat/training/{FOLDERS[step]}"
    command = f"deepspeed {processes} main.py {REQUIRED[step]} {words}"
    return translate_command(command.split(), Options(first=first, folder=folder))


@pytest.mark.parametrize("step", FLAGS)
def test_every_flag_is_a_row_with_its_default(step):
    rows = STEPS[step]
    different = {"data_output_path", "tensorboard_path"}  # a slash, a number: nothing reads them
    assert set(FLAGS[step]) <= set(rows)
    assert {name: rows[name].default for name in FLAGS[step] if name not in different} == {
        name: default for name, default in FLAGS[step].items() if name not in different
    }


def read_or_refused(step: str, words: str) -> tuple[Translation | None, list[str]]:
    try:
        return told(step, words), []
    except InputError as error:
        return None, [str(fault) for fault in error.faults]


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_has_exactly_one_note_or_a_fault(step):
    def value(name: str) -> str:
        row, default = STEPS[step][name], STEPS[step][name].default
        if name in OTHER:
            return OTHER[name]
        if isinstance(default, bool):
            return ""
        if isinstance(default, int):
            return str(default + 1)
        return f"{default}" if default is not None else "something" if row.type is None or row.is_text else "7"

    required = {word.removeprefix("--") for word in REQUIRED[step].split()}
    for name in STEPS[step].keys() - required:
        found, faults = read_or_refused(step, f"--{name} {value(name)}")
        if found is None:
            assert any(fault.startswith(f"--{name}") for fault in faults), faults
            continue
        notes = [note for note in found.notes if note.where == f"--{name}"]
        assert len(notes) == 1, name
        assert notes[0].keys or notes[0].why, name
        assert shape_problems(expand_short_forms(dict(found.config))) == [], name


@pytest.mark.parametrize(
    ("step", "old", "new"),
    [
        ("ppo", "--per_device_train_batch_size 4 --per_device_mini_train_batch_size 4 --generation_batch_numbers 2",
         "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --generation_batches 2"),
        ("ppo", "--disable_actor_dropout --disable_critic_dropout", "--actor_dropout 0.0 --critic_dropout 0.0"),
        ("reward", "--disable_dropout", "--dropout 0.0"),
    ],
)  # fmt: skip
def test_older_names_mean_the_same(step, old, new):
    assert told(step, old).config == told(step, new).config
    assert told(step, old).config != told(step).config


@pytest.mark.parametrize(("step", "take"), [("sft", 1), ("reward", 2), ("dpo", 2), ("ppo", 3)])
def test_each_step_takes_its_share(step, take):
    assert told(step).config["data"]["train"]["share"] == {"of": [2, 4, 4], "take": take}
    assert told(step).config["seed"] == 1234
    whole = {1: "10,0,0", 2: "0,10,0", 3: "0,0,10"}[take]
    assert "share" not in told(step, f"--data_split {whole}").config["data"]["train"]
    empty = {1: "0,5,5", 2: "5,0,5", 3: "5,5,0"}[take]
    assert refused_settings(lambda: told(step, f"--data_split {empty}")) == ["data_split"]


def test_a_part_of_nothing_moves_the_others():
    assert told("ppo", "--data_split 2,0,8").config["data"]["train"]["share"] == {"of": [2, 8], "take": 2}


@pytest.mark.parametrize(
    ("step", "name", "train", "template"),
    [
        ("sft", "pairs.json", {"format": "prompt-completion", "columns": {"completion": "chosen"}}, "raw"),
        ("sft", "sft.json", {"format": "prompt-completion", "columns": {"completion": "response"}}, "raw"),
        ("reward", "pairs.json", {}, "by-record"),
        ("ppo", "pairs.json", {"format": "prompts"}, "by-record"),
        ("reward", "Dahoas/rm-static", {"format": "preference"}, "by-record"),
    ],
)
def test_data_and_how_their_texts_are_laid_out(step, name, train, template):
    data = told(step, f"--data_path {name}").config["data"]
    source = data["train"] if isinstance(data["train"], dict) else {"path": data["train"]}
    assert {key: value for key, value in source.items() if key not in ("path", "share")} == train
    assert data["template"] == template
    assert source["path"] == name


MADE = "Dahoas/synthetic-instruct-gptj-pairwise"


def test_a_data_set_without_evaluation_split_gives_a_tenth_of_the_steps_share():
    """Each step's share of nine tenths, and the same share of the tenth that no step trains on."""
    of = [18, 2, 36, 4, 36, 4]
    for step, take in (("sft", 1), ("reward", 3), ("dpo", 3), ("ppo", 5)):
        data = told(step, f"--data_path {MADE}").config["data"]
        assert data["train"]["share"] == {"of": of, "take": take}
        assert data.get("eval", {}).get("share") == (None if step == "ppo" else {"of": of, "take": take + 1})
    data = told("sft", f"--data_path {MADE} --sft_only_data_path wangrui6/Zhihu-KOL --data_split 1,1,0").config["data"]
    assert [one["share"] for one in data["train"]] == [{"of": [9, 1, 9, 1], "take": 1}, {"of": [9, 1], "take": 1}]


def test_beside_texts_that_are_made_dialogues_keep_theirs():
    data = told("reward", f"--data_path Dahoas/rm-static {MADE}").config["data"]
    assert data["template"] == "raw"
    assert data["train"][0] == {
        "path": "Dahoas/rm-static",
        "format": "preference",
        "share": {"of": [2, 4, 4], "take": 2},
    }
    assert [one.get("split") for one in data["eval"]] == ["test", None]


def test_the_apps_own_file_is_found_from_the_folder_of_a_step():
    data = told("reward", "--data_path local/jsonfile --data_split 1,1,1").config["data"]
    assert (data["train"]["path"], data["eval"]["path"]) == ("../../data/train.json", "../../data/eval.json")


@pytest.mark.parametrize(
    ("words", "size", "micro", "rollouts"),
    [
        ("", 16, 16, 1),
        ("--per_device_generation_batch_size 8 --per_device_training_batch_size 4", 4, 4, 2),
        ("--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --generation_batches 3", 4, 4, 3),
        ("--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --gradient_accumulation_steps 2",
         8, 4, 1),
    ],
)  # fmt: skip
def test_rollouts_and_steps(words, size, micro, rollouts):
    found = told("ppo", words).config
    assert found.get("batch", {}).get("size", 16) == size
    assert found["batch"]["micro"] == micro
    assert found["ppo"].get("rollout_batches", 1) == rollouts


WRONG = [  # the last flag is refused
    ("sft", "--deepspeed_config ds.json"),
    ("sft", "--add_eot_token"),
    ("sft", "--lr_scheduler_type reduce_lr_on_plateau"),
    ("sft", "--max_grad_norm 1.0"),
    ("sft", "--data_path stanfordnlp/SHP"),
    ("sft", "--data_path Dahoas/rm-static mkqa-Chinese"),
    ("reward", "--data_path wangrui6/Zhihu-KOL"),
    ("sft", "--sft_only_data_path openai/webgpt_comparisons"),
    ("sft", "--data_split 1,2"),
    ("sft", "--dtype fp8"),
    ("sft", "--dropout 1.5"),
    ("sft", "--zero_stage 4"),
    ("ppo", "--per_device_training_batch_size 4 --per_device_generation_batch_size 6"),
    ("ppo", "--critic_lora_dim 4"),
    ("ppo", "--actor_lora_dim 4 --critic_lora_dim 4"),
    ("ppo", "--critic_lora_dim -1"),
    ("ppo", "--actor_dropout 0.1 --critic_dropout 0.2"),
    ("ppo", "--enable_test_mode"),
    ("ppo", "--enable_mixed_precision_lora"),
]


def test_what_cannot_be_given_is_refused_at_its_flag():
    for step, words in WRONG:
        assert refused_settings(lambda: told(step, words)) == [words.rpartition("--")[2].split()[0]], words  # noqa: B023


def test_lora_is_scaled_by_its_rank_alone_and_merged():
    found = told(
        "sft", "--lora_dim 128 --lora_module_name layers. --only_optimize_lora --lora_learning_rate 1e-3"
    ).config
    adapter = {"kind": "lora", "rank": 128, "alpha": 1.0, "targets": ["layers."], "publish": "merged"}
    assert found["adapter"] == adapter
    assert found["optim"]["lr"] == 1e-3


@pytest.mark.parametrize(("step", "prefix"), [("sft", ""), ("dpo", ""), ("reward", ""), ("ppo", "actor_")])
def test_what_has_no_lora_trains_at_its_own_rate(step, prefix):
    words = f"--{prefix}lora_dim 8 --{prefix}learning_rate 1e-5 --{prefix}lora_learning_rate 1e-3"
    beside, alone = told(step, words), told(step, f"{words} --only_optimize_lora")
    assert beside.config["adapter"]["modules_to_save"] == "rest"
    assert "modules_to_save" not in alone.config["adapter"]
    two = (1e-5, [{"of": "lora_", "lr": 1e-3}])
    assert (beside.config["optim"]["lr"], beside.config["optim"]["rates"]) == two
    found = (alone.config["optim"]["lr"], alone.config["optim"].get("rates"))
    assert found == (two if step == "reward" else (1e-3, None))  # the value head of a reward model trains in any case
    outcomes = {note.word.partition(" ")[0]: note.outcome for note in beside.notes}
    assert outcomes[f"--{prefix}lora_dim"] == "changed"
    assert outcomes[f"--{prefix}lora_learning_rate"] == "carried"


CRITIC_LORA = {  # flags -> ppo.critic_adapter, and the critic's rate
    "": (None, None),
    "--actor_lora_dim 8 --only_optimize_lora": ("none", None),
    "--actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora": (None, 5e-4),
    "--actor_lora_dim 8 --critic_lora_dim 4 --only_optimize_lora --critic_lora_learning_rate 1e-3": (
        {"kind": "lora", "rank": 4, "alpha": 1.0, "targets": ["decoder.layers."]}, 1e-3,
    ),
    "--actor_lora_dim 4 --critic_lora_dim 4 --critic_lora_module_name model.layers. --only_optimize_lora": (
        {"kind": "lora", "rank": 4, "alpha": 1.0, "targets": ["model.layers."]}, 5e-4,
    ),
    "--critic_lora_dim 4 --only_optimize_lora": (
        {"kind": "lora", "rank": 4, "alpha": 1.0, "targets": ["decoder.layers."]}, 5e-4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", CRITIC_LORA)
def test_the_critic_has_the_adapter_that_its_flags_ask_for(words):
    """None: surefoot's default, which is as the actor's."""
    found = told("ppo", words)
    adapter, rate = CRITIC_LORA[words]
    assert (found.config["ppo"].get("critic_adapter"), found.config["ppo"].get("critic_lr")) == (adapter, rate)
    assert shape_problems(expand_short_forms(dict(found.config))) == []
    outcomes = [note.outcome for note in found.notes if note.where == "--critic_lora_dim"]
    assert outcomes == (["carried"] if "critic_lora_dim" in words else [])


def test_several_processes_share_out_what_zero_says():
    found = told("sft", "--zero_stage 3 --offload", "--num_gpus 2").config
    assert found["parallel"] == {"engine": "deepspeed", "nproc": 2, "zero_stage": 3, "offload": "all"}
    assert found["batch"]["size"] == 32
    assert "parallel" not in told("sft", "--zero_stage 3").config


@pytest.mark.parametrize(
    ("step", "words", "outcome"),
    [
        ("sft", "--zero_stage 2 --offload", "carried"),
        ("sft", "--zero_stage 3 --offload", "changed"),  # of the weights too, there
        ("sft", "--offload", "listed"),
        ("reward", "--zero_stage 1 --offload", "carried"),
        ("ppo", "--actor_zero_stage 2 --offload", "carried"),
        ("ppo", "--actor_zero_stage 2 --offload --enable_ema", "listed"),
    ],
)
def test_one_process_offloads_its_optimizer(step, words, outcome):
    found = told(step, words)
    expected = None if outcome == "listed" else {"offload": "optimizer"}
    assert found.config.get("parallel") == expected
    assert [note.outcome for note in found.notes if note.where == "--offload"] == [outcome]
    assert shape_problems(expand_short_forms(dict(found.config))) == []


def test_a_step_is_known_by_its_folder_or_by_a_flag_of_its_own():
    known = translate_command(["main.py", "--actor_model_name_or_path", "a/b", "--critic_model_name_or_path", "c/d"],
                              Options())  # fmt: skip
    assert known.config["stage"] == "ppo"
    path = f"training/{FOLDERS['reward']}/main.py"
    assert translate_command([path, "--model_name_or_path", "a/b"], Options()).config["stage"] == "reward"
    either = ["main.py", "--model_name_or_path", "a/b", "--zero_stage", "2"]
    assert refused_settings(lambda: translate_command(either, Options()), "SF-TRANSLATE-COMMAND") == ["main.py"]


def test_unsupervised_texts_and_the_average():
    found = told("ppo", "--enable_ema --unsupervised_dataset_name org/w --unsupervised_dataset_config_name s").config
    assert found["ppo"]["ema"] == 0.992
    assert found["ppo"]["unsup_coef"] == 27.8
    assert found["ppo"]["unsup_data"] == {"path": "org/w", "format": "text", "subset": "s"}
    assert "unsup_coef" not in told("ppo", "--unsup_coef 3").config["ppo"]


def test_its_lines():
    said = log_lines("sft", told("sft"))
    assert said.row({"eval_loss": math.log(2.0)}) == ["ppl: 2, loss: 0.6931471806"]
    assert said.row({"loss": 1.0}) == ()
    (line,) = log_lines("reward", told("reward")).row(
        {"eval_reward_chosen": 0.5, "eval_reward_rejected": 0.25, "eval_reward_accuracy": 0.75}
    )
    assert line == (
        "chosen_last_scores (higher is better) : 0.5, rejected_last_scores (lower is better) : 0.25, "
        "acc (higher is better) : 0.75"
    )
    rows = log_lines("ppo", told("ppo"))
    row = {"current_steps": 1, "epoch": 0.5, "policy_loss": 0.1, "value_loss": 0.2, "reward": 1.0}
    assert rows.row(row)[1] == "Average reward score: 1.0 | EMA reward score: 1.0"
    first, second = rows.row(row | {"current_steps": 2, "reward": 2.0})
    assert first.startswith("Epoch: 0 | Step: 2 | PPO Epoch: 1 | Actor Loss: 0.1 | Critic Loss: 0.2")
    assert second == "Average reward score: 2.0 | EMA reward score: 1.1"
    assert rows.row({"eval_loss": 1.0}) == ()


@pytest.mark.parametrize(("done", "epoch"), [(0.333333, 0), (1.0, 0), (1.000001, 1), (1.333333, 1), (2.0, 1)])
def test_the_last_step_of_an_epoch_belongs_to_it(done, epoch):
    """Twins are the first steps of the next one."""
    row = {"current_steps": 3, "epoch": done, "policy_loss": 0.1, "value_loss": 0.2, "reward": 1.0}
    assert log_lines("ppo", told("ppo")).row(row)[0].startswith(f"Epoch: {epoch} | ")


def test_the_pipeline_names_its_scripts():
    runs = runs_of(["--actor-model", "facebook/opt-1.3b", "--num-gpus", "1", "--output-dir", "out", "--step", "1", "3"])
    assert [run.step for run in runs] == [1, 3]
    assert runs[0].script == f"training/{FOLDERS['sft']}/training_scripts/single_node/run_1.3b.sh"
    assert runs[0].arguments == ("out/actor-models/1.3b", "")
    assert runs[1].arguments[:2] == ("out/actor-models/1.3b", "out/reward-models/350m")
    assert runs[0].environment == {"NUM_GPUS": "1"}
    assert refused_settings(lambda: runs_of(["--actor-model", "66b"])) == ["actor_model"]
    with pytest.raises(InputError) as caught:
        translate_command(["python", "e2e_rlhf.py"], Options())
    assert all(run.script in caught.value.faults[0].fix for run in runs_of([]))
