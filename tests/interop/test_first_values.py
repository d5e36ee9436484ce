"""What an adapter starts from, in every tool's word for it."""

import shlex

import pytest

from helpers.faults import refused_settings
from interop.axolotl_configs import CHAT, axolotl
from interop.small_configs import outcome, text_of, translated
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import InputError

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
SCRIPT = """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
shape = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights={})
SFTTrainer("m", args=SFTConfig(output_dir="o"), train_dataset=load_dataset("org/d", split="train"),
           peft_config=shape).train()
""".replace("\nshape", "\nfrom datasets import load_dataset\nshape")


def of_swift(word):
    return translate_command(
        shlex.split(f"swift sft --model m --dataset d --output_dir o --init_weights {word}"), Options()
    )


def of_script(word):
    return translate_file("train.py", SCRIPT.format(repr(word)), [], Options())


WAYS = {
    "swift": of_swift,
    "axolotl": lambda word: axolotl(**CHAT, **LORA, peft_init_lora_weights=word),
    "script": of_script,
}


@pytest.mark.parametrize("way", WAYS)
def test_pefts_words(way):
    read = WAYS[way]
    starts = {
        word: {key: value for key, value in read(word).config["adapter"].items() if key.startswith("start")}
        for word in ("pissa", "pissa_niter_4", "olora", "true" if way == "swift" else True)
    }
    assert list(starts.values()) == [
        {"start": "pissa"},
        {"start": "pissa", "start_iterations": 4},
        {"start": "olora"},
        {},
    ]
    with pytest.raises(InputError) as caught:
        read("eva")
    assert {fault.code for fault in caught.value.faults} == {"SF-TRANSLATE-SETTING"}


def test_llama_factory():
    found = translated("factory", pissa_init=True, pissa_convert=True)
    adapter = found.config["adapter"]
    assert (adapter["start"], adapter["start_iterations"]) == ("pissa", 16)
    assert (outcome(found, "pissa_init"), outcome(found, "pissa_convert")) == ("changed", "carried")
    assert "start_iterations" not in translated("factory", pissa_init=True, pissa_iter=-1).config["adapter"]
    plain = translated("factory", pissa_iter=4)
    assert ("start" in plain.config["adapter"], outcome(plain, "pissa_iter")) == (False, "listed")
    full = text_of("factory", finetuning_type="full", pissa_init=True)
    assert refused_settings(lambda: translate_file("l.json", full, [], Options()), text=full) == ["pissa_init"]
