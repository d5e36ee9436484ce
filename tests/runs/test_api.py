"""What a Python caller may hand over as a config, and what is said of anything else."""

import json
from pathlib import Path

import pytest

import surefoot
from helpers.tiny_models import tiny_llama
from surefoot.config.load import check_config
from surefoot.config.schema import RunConfig
from surefoot.system.errors import InputError


@pytest.fixture(scope="module")
def mapping(tmp_path_factory):
    """With paths where a file has texts."""
    folder = tmp_path_factory.mktemp("api")
    rows = folder / "train.json"
    rows.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    data = {"train": [{"path": rows}], "max_length": 64}
    return {"stage": "sft", "model": tiny_llama(folder / "base"), "data": data, "output": folder / "out"}


def test_paths_are_welcome_wherever_a_config_names_one(mapping):
    assert isinstance(mapping["model"], Path)
    found = check_config(mapping)
    assert found.output == str(mapping["output"])
    assert found.data.train[0].path == str(mapping["data"]["train"][0]["path"])


def test_a_path_to_a_file_is_a_config(mapping, tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(mapping, default=str))
    plans = [surefoot.plan(tmp_path / "run.yaml", hardware_name="cpu"), surefoot.plan(mapping, hardware_name="cpu")]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("what", [None, 5, ["run.yaml"]])
@pytest.mark.parametrize("call", [surefoot.train, surefoot.plan])
def test_what_is_no_config_is_one_error(call, what):
    with pytest.raises(InputError) as told:
        call(what)
    assert [fault.where for fault in told.value.faults] == ["config"]


def test_overrides_are_a_list(tmp_path):
    with pytest.raises(InputError) as told:
        surefoot.train(tmp_path / "run.yaml", "optim.lr=1e-4")
    assert [fault.where for fault in told.value.faults] == ["overrides"]


PATTERNS = {  # keys with a regular expression that is none -> where that is told
    "adapter.targets": {"adapter": {"kind": "lora", "targets": ["re:(("]}},
    "model.trained": {"model": {"path": "", "trained": ["(("]}},
    "optim.rates[0].of": {"optim": {"rates": [{"lr": 1e-3, "of": "(("}]}},
    "grpo.rewards[0].pattern": {"stage": "grpo", "grpo": {"rewards": [{"name": "regex", "pattern": "(("}]}},
}


@pytest.mark.parametrize("where", PATTERNS)
def test_a_config_made_in_python_is_checked_as_a_file_is(mapping, where):
    plain = json.loads(json.dumps(mapping, default=str)) | PATTERNS[where]
    if where == "model.trained":
        plain["model"] = PATTERNS[where]["model"] | {"path": str(mapping["model"])}
    for config in (plain, RunConfig.model_validate(plain)):
        with pytest.raises(InputError) as told:
            surefoot.plan(config)
        assert where in [fault.where for fault in told.value.faults]


def test_twin_a_sound_config_made_in_python_gives_the_plan_of_its_mapping(mapping):
    plain = json.loads(json.dumps(mapping, default=str)) | {"optim": {"rates": [{"lr": 1e-3, "of": "norm"}]}}
    assert surefoot.plan(RunConfig.model_validate(plain), hardware_name="cpu") == surefoot.plan(
        plain, hardware_name="cpu"
    )
