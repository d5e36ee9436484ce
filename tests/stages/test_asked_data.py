"""What a command line can name of a run's own data."""

from __future__ import annotations

import json

import pytest

from layouts import run_config
from surefoot.stages.asked_data import DataRequest, config_for, evaluated_pairs


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "my pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    return str(path)


def told(evaluation, **data):
    return evaluated_pairs(run_config(stage="reward", data={"train": "p.jsonl", "eval": evaluation, **data}))


def read_again(data):
    """The sources that the command makes of it."""
    return config_for(DataRequest(data), "org/model", template="auto", stage="reward", train_on="responses").data.train


def test_what_a_reward_model_was_evaluated_on_is_named_as_a_command_reads_it(pairs):
    assert told(pairs) == pairs
    assert told(pairs, format="auto") == pairs
    columns = {"path": pairs, "columns": {"chosen": "better"}, "max_samples": 3}
    for evaluation, more in ((pairs, {"format": "preference"}), (columns, {}), ([pairs, columns], {})):
        config = run_config(stage="reward", data={"train": "p.jsonl", "eval": evaluation, **more})
        again = read_again(told(evaluation, **more))
        assert [(one.path, one.columns, one.max_samples) for one in again] == [
            (one.path, one.columns, one.max_samples) for one in config.data.eval
        ]
        assert {one.format for one in again} == {config.data.format}


def test_what_no_command_names_alike_is_left_to_the_user(pairs, tmp_path):
    assert told("none") is None
    assert told(0.1) is None
    assert told(str(tmp_path)) is None  # its split for evaluation is another
    assert told({"path": pairs, "share": {"of": [1, 1], "take": 1}}) is None
    assert evaluated_pairs(run_config(stage="sft", data={"train": pairs, "eval": pairs})) is None
