"""The data sets whose texts DeepSpeed-Chat makes have the token ids and labels that its own code gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equality.deepspeed_chat_data import RECORDS
from helpers.tiny_models import tiny_judge
from surefoot.commands.translate import reading_options
from surefoot.config.load import check_config
from surefoot.interop.deepspeed_chat import FOLDERS
from surefoot.interop.registry import translate_command
from surefoot.methods.examples import prepare_examples
from surefoot.methods.sources import settled
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan

RECORDED = json.loads(Path(__file__).with_name("deepspeed_chat.json").read_text(encoding="utf-8"))
MODELS = {"sft": "--model_name_or_path {0}", "reward": "--model_name_or_path {0}", "dpo": "--model_name_or_path {0}",
          "ppo": "--actor_model_name_or_path {0} --critic_model_name_or_path {0}"}  # fmt: skip
PART = {"sft": "1,0,0", "reward": "0,1,0", "dpo": "0,1,0", "ppo": "0,0,1"}
PHASE = {"sft": 1, "reward": 2, "dpo": 2, "ppo": 3}
# Beside one whose texts are made, dialogues keep their text too; alone, they get EOS behind earlier answers.
BESIDE = "Dahoas/synthetic-instruct-gptj-pairwise"


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tiny_judge(tmp_path / "base", pad=True)

    def prepare(step, name, change=lambda compose: compose):
        names = list(dict.fromkeys((name, BESIDE)))
        words = f"{FOLDERS[step]}/main.py {MODELS[step].format(base)} --data_split {PART[step]} --data_path"
        given = dict(translate_command([*words.split(), *names], replace(reading_options(), devices=1)).config)
        train = given["data"]["train"]
        sources = [
            _local(source, own, tmp_path, change)
            for source, own in zip(train if isinstance(train, list) else [train], names, strict=True)
        ]
        config = settled(check_config(given | {"data": given["data"] | {"train": sources, "eval": sources}}))
        tokens = make_plan(config, measure=False).tokenizer
        return prepare_examples(config, tokens, planned_tokenizer(base, tokens)).train

    return prepare


def _local(source, name, folder, change):
    """The source over a file of all records of a data set."""
    path = folder / f"{name.replace('/', '-')}.json"
    path.write_text(json.dumps(RECORDS[name]), encoding="utf-8")
    kept = {key: value for key, value in source.items() if key not in ("share", "split")}
    return kept | {"path": str(path)} | ({"compose": change(source["compose"])} if "compose" in source else {})


def examples(data, step, count):
    """The first records' examples in the form of the recorded ones."""
    if step == "sft":
        rows = [data[place] for place in range(count)]
        return [{"ids": row.ids.tolist(), "learned": row.supervised.tolist()} for row in rows]
    if step == "ppo":
        return [data[place].ids.tolist() for place in range(count)]
    return [[data[2 * place + side].ids.tolist() for side in (0, 1)] for place in range(count)]


def recorded(step, name):
    found = RECORDED[f"step {PHASE[step]}"][name]
    if step != "sft":
        return found
    # Every token has a label there; the first has nothing before it that could predict it.
    assert all(one["labels"] == one["ids"] for one in found)
    return [{"ids": one["ids"], "learned": [place > 0 for place in range(len(one["ids"]))]} for one in found]


@pytest.mark.parametrize(("step", "name"), [(step, name) for step in PHASE for name in RECORDED[f"step {PHASE[step]}"]])
def test_the_ids_are_those_of_its_own_code(prepared, step, name):
    assert examples(prepared(step, name), step, len(RECORDS[name])) == recorded(step, name)


@pytest.mark.parametrize("step", PHASE)
def test_twin_another_text_around_the_columns_gives_other_ids(prepared, step):
    def spaced(compose):
        return {field: f"{text} " for field, text in compose.items()}

    found = examples(prepared(step, BESIDE, spaced), step, len(RECORDS[BESIDE]))
    assert all(one != other for one, other in zip(found, recorded(step, BESIDE), strict=True))
