"""Models and engines that a config names and that are not there: one line with the key, before anything is written."""

import io
import json
from pathlib import Path

import pytest

import surefoot
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.config.schema import RunConfig
from surefoot.runs import requirements as ranks
from surefoot.training.ranks import ALONE


def config_of(folder: Path, **changes) -> dict:
    tiny_llama(folder / "base")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "Say one."}) + "\n")
    return {
        "stage": "ppo",
        "model": str(folder / "base"),
        "data": {"train": str(folder / "prompts.jsonl"), "max_length": 64},
        "ppo": {"max_new_tokens": 4},
        "batch": {"size": 1},
        "precision": "fp32",
        "duration": "1 steps",
        "output": str(folder / "run"),
        **changes,
    }


def trained(config: dict, **more) -> None:
    surefoot.train(config, stream=io.StringIO(), **more)


@pytest.mark.parametrize("key", ["reward", "critic"])
def test_a_folder_that_is_missing_is_named_with_its_key(tmp_path, key):
    config = config_of(tmp_path)
    config["ppo"] |= {"reward": f"{__file__}:nothing", key: str(tmp_path / "bse")}
    with raises_fault("SF-FILE-MISSING", f"ppo.{key}", remedy=[tmp_path / "base"]):
        trained(config)


def test_what_could_be_a_hub_id_is_named_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = config_of(tmp_path, ppo={"max_new_tokens": 4, "reward": "nowhere/reward"})
    with raises_fault("SF-HUB-OFFLINE", "ppo.reward"):
        trained(config)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_an_engine_for_several_processes_is_refused_in_one(tmp_path, engine):
    config = RunConfig.model_validate(config_of(tmp_path, parallel={"engine": engine}))
    with raises_fault("SF-PARALLEL", "parallel.engine"):
        ranks.check_several(config, ALONE)
    ranks.check_several(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"engine": "ddp"})}), ALONE
    )


def test_the_run_says_so_and_writes_nothing(tmp_path):
    config = config_of(tmp_path, parallel={"engine": "fsdp2"})
    with raises_fault("SF-PARALLEL", "parallel.engine"):
        trained(config, reward=lambda prompts, responses: [0.0] * len(responses))
    assert not (tmp_path / "run").exists()
