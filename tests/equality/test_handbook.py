"""A translated config of alignment-handbook trains on the records, ids and rates of its scripts, built on TRL."""

import json
from pathlib import Path

import pytest
import yaml
from torch import zeros
from torch.optim import SGD
from transformers import AutoTokenizer, get_scheduler

from equality import models
from equality.ours import RATE, run_until_step_1
from helpers.faults import refused_settings
from surefoot.commands.translate import reading_options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import InputError

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES, HELD_OUT, LR, FLOOR = (10, 8), 3, 1e-3, 0.1


def records(number: int, count: int) -> list[dict]:
    """Conversations, with a prompt beside them that a script which selects `messages` never sees."""
    return [
        {
            "prompt": "unread",
            "messages": [
                {"role": "user", "content": f"Say {number}, {one}."},
                {"role": "assistant", "content": "x" * (one + 1)},
            ],
        }
        for one in range(count)
    ]


@pytest.fixture
def config(folder, tmp_path):
    entries = []
    for number, (size, weight) in enumerate(zip(SIZES, (1.0, 0.5), strict=True)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records(number, size)))
        entries.append({"id": str(path), "split": "train", "columns": ["messages"], "weight": weight})
    return {
        "model_name_or_path": str(models.build("qwen2", folder)),
        "chat_template": TEMPLATE,
        "dataset_mixture": {"datasets": entries, "seed": 0, "test_split_size": HELD_OUT},
        "dataset_kwargs": {"add_special_tokens": False},
        "torch_dtype": None,
        "bf16": False,
        "max_seq_length": 128,
        "eval_strategy": "epoch",
        "learning_rate": LR,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": FLOOR},
        "warmup_ratio": 0.25,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "push_to_hub": True,
        "save_steps": 0.5,
        "output_dir": str(tmp_path / "out"),
    }


def learns_all(row: dict) -> bool:
    """A label on the first token, which nothing predicts, does not count."""
    return row["labels"][1:] == row["ids"][1:]


def translated(config):
    return translate_file("sft/config.yaml", yaml.safe_dump(config), [], reading_options())


def test_records_ids_and_rates(config):
    found = translated(config)
    ours = run_until_step_1(json.loads(json.dumps(found.config)), step=False)
    # get_dataset: int(len * weight) records of each set, of which train_test_split takes HELD_OUT
    count = SIZES[0] + int(SIZES[1] * 0.5) - HELD_OUT
    assert len(ours.examples) == count
    tokenizer = AutoTokenizer.from_pretrained(config["model_name_or_path"])
    possible = [
        tokenizer.apply_chat_template(one["messages"], chat_template=TEMPLATE, return_dict=False)
        for number, size in enumerate(SIZES)
        for one in records(number, size)
    ]
    assert all(row["ids"] in possible and learns_all(row) for row in ours.examples)
    steps = 2 * -(-count // 2)
    optimizer = SGD([zeros(1, requires_grad=True)], lr=LR)
    schedule = get_scheduler("cosine_with_min_lr", optimizer, -(-steps // 4), steps, {"min_lr_rate": FLOOR})
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert ours.learning_rates == pytest.approx(theirs, abs=RATE)
    assert found.arguments == ("--push", "out")
    assert found.config["checkpoint"]["every"] == "1 epoch"


def test_values_of_variables_are_read_where_the_column_is_selected(config):
    config["dataset_mixture"]["datasets"][0]["columns"] = ["messages", "chat_template_kwargs"]
    first, second = translated(config).config["data"]["train"]
    assert first["columns"] == {"chat_template_kwargs": "chat_template_kwargs"}
    assert first["format"] == "messages"
    assert "columns" not in second


def test_twin_with_all_columns_the_prompt_would_count(config):
    for entry in config["dataset_mixture"]["datasets"]:
        del entry["columns"]
    ours = run_until_step_1(json.loads(json.dumps(translated(config).config)), step=False)
    assert not any(learns_all(row) for row in ours.examples)


def mixed(mixer, splits, tables):
    """`mix_datasets` of alignment-handbook before dataset_mixture (19f0345^, src/alignment/data.py), unshuffled."""
    kept, trains, tests = ("messages", "chosen", "rejected", "prompt", "completion", "label"), [], []
    for name in mixer:
        for split in splits:
            rows = [{key: value for key, value in row.items() if key in kept} for row in tables[name][split]]
            (trains if "train" in split else tests).append(rows)
    first = [rows[: int(share * len(rows))] for rows, share in zip(trains, mixer.values(), strict=True)]
    return [row for rows in first for row in rows], [row for rows in tests for row in rows]


def in_folders(config, tmp_path):
    """The config with dataset_mixer, over folders of splits, and their records."""
    shares = (1.0, 0.5)
    tables = {
        str(tmp_path / f"set{number}"): {"train": records(number, size), "test": records(number + 5, 2)}
        for number, size in enumerate(SIZES)
    }
    for path, splits in tables.items():
        Path(path).mkdir()
        for split, rows in splits.items():
            (Path(path) / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del config["dataset_mixture"]
    more = {"dataset_mixer": dict(zip(tables, shares, strict=True)), "dataset_splits": ["train", "test"]}
    return config | more | {"auto_insert_empty_system_msg": False, "preprocessing_num_workers": 2}, tables


def test_the_earlier_mixture(config, tmp_path):
    config, tables = in_folders(config, tmp_path)
    found = translated(config)
    ours = run_until_step_1(json.loads(json.dumps(found.config)), step=False)
    tokenizer = AutoTokenizer.from_pretrained(config["model_name_or_path"])
    train, test = mixed(config["dataset_mixer"], config["dataset_splits"], tables)
    theirs = [
        tokenizer.apply_chat_template(one["messages"], chat_template=TEMPLATE, return_dict=False) for one in train
    ]
    assert sorted(row["ids"] for row in ours.examples) == sorted(theirs)
    assert all(map(learns_all, ours.examples))
    sources = found.config["data"]["eval"]
    assert sum(len(tables[one["path"]][one["split"]]) for one in sources) == len(test)
    assert not any("share" in one for one in sources)
    whole = config | {"dataset_mixer": dict.fromkeys(tables, 1.0)}  # twin
    assert len(run_until_step_1(translated(whole).config, step=False).examples) > len(theirs)
    assert "eval" not in translated(config | {"eval_strategy": "no"}).config["data"]


def test_the_earlier_scripts_take_the_file_without_a_flag(config, tmp_path):
    config, _ = in_folders(config, tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    by_command = translate_command(
        ["python", "scripts/run_sft.py", str(path), f"--learning_rate={LR}"], reading_options()
    )
    assert by_command.config == translated(config).config
    inserted = translated({key: value for key, value in config.items() if not key.startswith("auto_insert")})
    assert [note.word for note in inserted.notes if note.word.startswith("auto_insert")]
    with pytest.raises(InputError):  # twin: the present ones take --config alone
        translate_command(["python", "scripts/sft.py", str(path)], reading_options())


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"dataset_splits": ["train_sft", "train_gen", "test_sft"]}, "dataset_splits"),
        ({"dataset_splits": ["train", "dev", "test"]}, "dataset_splits"),
        ({"dataset_configs": ["one"]}, "dataset_configs"),
        ({"dataset_mixer": {"d": 1.5}, "dataset_configs": None}, "dataset_mixer"),
        ({"truncation_side": "left"}, "truncation_side"),
    ],
)
def test_what_the_earlier_mixture_cannot_be(config, tmp_path, wrong, name):
    text = json.dumps(in_folders(config, tmp_path)[0] | wrong)
    named = refused_settings(lambda: translate_file("sft/config.json", text, [], reading_options()), text=text)
    assert set(named) == {name}


def test_selected_columns_have_a_note(config):
    """Also one that the format does not read."""
    config["dataset_mixture"]["datasets"][0]["columns"] = ["messages", "source"]
    notes = [note for note in translated(config).notes if ".columns:" in note.word]
    assert len(notes) == 2
    assert all(note.why for note in notes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 1.5},
        {"split": "train[5:]"},
        {"id": None},
        {"share": 1},
    ],
)
def test_what_a_mixture_cannot_be(config, wrong):
    config["dataset_mixture"]["datasets"][0] |= wrong
    text = json.dumps(config)
    named = refused_settings(lambda: translate_file("sft/config.json", text, [], reading_options()), text=text)
    assert set(named) == {"dataset_mixture"}


def test_pairs_of_selected_columns_are_conversations(config):
    turns = records(0, 1)[0]["messages"]
    for entry in config["dataset_mixture"]["datasets"]:
        entry["columns"] = ["chosen", "rejected"]
        with open(entry["id"], "w") as file:
            json.dump({"prompt": "unread", "chosen": turns, "rejected": turns}, file)
    more = {"max_prompt_length": 64, "beta": 0.5}
    text = yaml.safe_dump({key: value for key, value in config.items() if key != "dataset_kwargs"} | more)
    found = translate_file("dpo/config.yaml", text, [], reading_options())
    assert found.config["stage"] == "dpo"
    assert {source["format"] for source in found.config["data"]["train"]} == {"preference"}
    assert found.config["data"]["template"] == TEMPLATE


def test_the_earlier_mixture_of_pairs(config, tmp_path):
    """Prompts are in the answers, and DPOConfig's optim was rmsprop."""
    config, tables = in_folders(config, tmp_path)
    for path in tables:
        for split in ("train", "test"):
            turns = records(0, 1)[0]["messages"]
            worse = [turns[0], turns[1] | {"content": "y"}]
            (Path(path) / f"{split}.jsonl").write_text(
                json.dumps({"prompt": "unread", "chosen": turns, "rejected": worse}) + "\n"
            )
    config = {key: value for key, value in config.items() if key != "dataset_kwargs"} | {"beta": 0.5}
    found = translate_file("dpo/config.yaml", yaml.safe_dump(config), [], reading_options()).config
    assert found["optim"]["name"] == "rmsprop"
    assert {one["format"] for one in found["data"]["train"]} == {"preference"}
    given = translate_file("dpo/config.yaml", yaml.safe_dump(config | {"optim": "adamw_torch"}), [], reading_options())
    assert given.config["optim"]["name"] == "adamw"
