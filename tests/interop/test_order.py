"""Settings of other tools that take examples in the order of the files, or without their system messages."""

import pytest

from interop.axolotl_configs import CHAT, axolotl, refused
from interop.small_configs import outcome, translated
from interop.test_swift import command as swift
from surefoot.interop.launch import Options
from surefoot.system.errors import InputError


def test_axolotl():
    both = {"curriculum_sampling": True, "sample_packing_sequentially": True, "sample_packing": True}
    found = axolotl(**CHAT, **both, sequence_len=512)
    assert found.config["data"]["order"] == "file"
    assert outcome(found, "curriculum_sampling") == "carried"
    assert outcome(axolotl(**CHAT, curriculum_sampling=True, sample_packing=True), "curriculum_sampling") == "changed"
    alone = axolotl(**CHAT, sample_packing=True, sample_packing_sequentially=True)
    assert (outcome(alone, "sample_packing_sequentially"), alone.config["data"].get("order")) == ("changed", None)
    two = {"datasets": CHAT["datasets"] * 2, "curriculum_sampling": True}
    mixed = axolotl(**two)  # merge_datasets shuffles several
    assert (outcome(mixed, "curriculum_sampling"), mixed.config["data"].get("order")) == ("changed", None)
    assert axolotl(**two, shuffle_merged_datasets=False).config["data"]["order"] == "file"
    assert "order" not in axolotl(**CHAT, shuffle_merged_datasets=False).config["data"]  # each epoch is shuffled


def test_the_others():
    assert translated("factory", disable_shuffling=True).config["data"]["order"] == "file"
    assert translated("trl", train_sampling_strategy="sequential").config["data"]["order"] == "file"
    assert "order" not in translated("trl", train_sampling_strategy="group_by_length").config["data"]
    assert translated("tune", shuffle=False).config["data"]["order"] == "file"
    off = "--train_dataloader_shuffle false"
    assert swift(f"{off} --dataset_shuffle false").config["data"]["order"] == "file"
    with pytest.raises(InputError):
        swift(off)


def test_system_messages_that_axolotl_drops():
    entry = {"path": "d.jsonl", "type": "chat_template", "drop_system_message": True}
    assert axolotl(datasets=[entry]).config["data"]["train"]["drop_system"] is True
    assert "drop_system" not in str(axolotl(datasets=[entry | {"drop_system_message": False}]).config)


def test_system_messages_that_axolotls_alpaca_does_not_read():
    def source(**record: str) -> object:
        options = Options(first=lambda path: {"instruction": "q", "output": "a", **record})
        return translated("axolotl", options, datasets=[{"path": "d.jsonl", "type": "alpaca"}]).config["data"]["train"]

    assert source(system="Be brief.")["drop_system"] is True
    assert "drop_system" not in source()


def test_random_weights():
    assert axolotl(**CHAT, reinit_weights=True).config["model"] == {"path": "m", "weights": "random"}
    assert refused(**CHAT, reinit_weights=True, adapter="lora", lora_r=8, lora_alpha=16) == {"reinit_weights"}
    full = translated("factory", finetuning_type="full", train_from_scratch=True)
    assert full.config["model"]["weights"] == "random"
    with pytest.raises(InputError):
        translated("factory", train_from_scratch=True)  # LoRA
