"""A tool's saved adapter that training goes on with: its own adapter_config.json decides, as PEFT reads it."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig, TaskType

from helpers.faults import refused_settings
from interop.small_configs import outcome, text_of, translated
from surefoot.config.schema import RunConfig
from surefoot.interop.launch import Options

NAMES = {"factory": "adapter_name_or_path", "axolotl": "lora_model_dir"}
SHAPES = {
    "factory": {"lora_rank": 64, "lora_alpha": 1, "lora_target": "all", "use_dora": True},
    "axolotl": {"adapter": "lora", "lora_r": 64, "lora_alpha": 1, "lora_target_linear": True, "lora_dropout": 0.5},
}
TOOLS = pytest.mark.parametrize("tool", NAMES)


def saved(**settings) -> Options:
    """PEFT's own file."""
    usual = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.25, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, **(usual | settings)).to_dict()
    text = json.dumps({key: sorted(value) if isinstance(value, set) else value for key, value in config.items()})
    pairs = json.dumps({"a": {"file_name": "a.json", "ranking": True}})
    files = {"saves/one/adapter_config.json": text, "data/dataset_info.json": pairs}
    return Options(read=files.__getitem__)


def words_of(tool, **words):
    return {NAMES[tool]: "saves/one/", **SHAPES[tool], **words}


def going_on(tool, options=None, **words):
    return translated(tool, options or saved(), **words_of(tool, **words))


def refused(tool, options=None, **words):
    text = text_of(tool, **words_of(tool, **words))
    return refused_settings(lambda: going_on(tool, options, **words), text=text)


@TOOLS
def test_the_saved_adapter_decides(tool):
    found = going_on(tool)
    adapter = RunConfig.model_validate(found.config).adapter
    assert adapter is not None
    assert (adapter.initial, adapter.kind, adapter.rank, adapter.alpha) == ("saves/one", "lora", 4, 6.0)
    assert (adapter.dropout, adapter.rslora, adapter.targets) == (0.25, True, ["q_proj", "v_proj"])
    assert outcome(found, NAMES[tool]) == "carried"
    assert {outcome(found, name) for name in SHAPES[tool] if name != "adapter"} == {"listed"}


@TOOLS
def test_twin_the_settings_of_a_new_adapter_are_others(tool):
    name = NAMES[tool]
    found = translated(tool, saved(), **SHAPES[tool])
    assert (found.config["adapter"]["rank"], "initial" in found.config["adapter"]) == (64, False)
    assert name not in [note.word for note in found.notes]


@TOOLS
def test_all_that_a_saved_adapter_may_be(tool):
    found = going_on(tool, saved(use_dora=True, target_modules="all-linear", modules_to_save=["lm_head"]))
    adapter = RunConfig.model_validate(found.config).adapter
    assert adapter is not None
    assert (adapter.kind, adapter.targets, adapter.modules_to_save) == ("dora", "all-linear", ["lm_head"])


def test_a_stage_without_dropout_has_none():
    assert "dropout" not in going_on("factory", stage="dpo").config["adapter"]
    data = [{"path": "d.jsonl", "type": "chatml.intel"}]
    assert "dropout" not in going_on("axolotl", rl="dpo", datasets=data).config["adapter"]


@TOOLS
@pytest.mark.parametrize("settings", [{"target_modules": r".*_proj"}, {"target_modules": None}], ids=str)
def test_modules_that_are_no_names_are_refused(tool, settings):
    assert refused(tool, saved(**settings)) == [NAMES[tool]]


@TOOLS
def test_a_folder_that_cannot_be_read_is_refused(tool):
    assert refused(tool, Options()) == [NAMES[tool]]


@TOOLS
@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": null, "lora_alpha": 1, "target_modules": ["q_proj"]}'])
def test_a_file_that_is_none_is_refused(tool, text):
    assert refused(tool, Options(read=lambda path: text)) == [NAMES[tool]]


def test_without_an_adapter_it_has_no_effect():
    assert refused("axolotl", adapter=None) == [NAMES["axolotl"]]


def test_a_merged_or_chained_adapter_is_refused():
    for words in ({"create_new_adapter": True}, {NAMES["factory"]: "saves/one,saves/two"}):
        assert refused("factory", **words) == [*words]
