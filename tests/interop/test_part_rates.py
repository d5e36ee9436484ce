"""`optim.rates` from LoRA+, embedding rates and groups of other tools: each weight has the tool's rate."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.faults import refused_settings
from interop.axolotl_configs import LORA, axolotl, refused
from interop.small_configs import outcome, text_of, translated
from surefoot.config.load import check_config
from surefoot.config.schema import OptimConfig
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.planning.optimizer import rate_of

LR = 2e-4
FACTORS = [
    f"model.layers.0.{place}.lora_{side}.weight" for place in ("self_attn.q_proj", "mlp.up_proj") for side in "AB"
]
FULL = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.layers.2.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"]  # fmt: skip


def rates(config: Any, names: list[str]) -> dict[str, float]:
    optim = OptimConfig(**config["optim"])
    return {name: rate_of(name, optim) for name in names}


def test_loraplus_is_bs_rate() -> None:
    factory = {"finetuning_type": "lora", "learning_rate": LR, "loraplus_lr_ratio": 16.0}
    swift = f"swift sft --model m --dataset d.jsonl --learning_rate {LR} --lorap_lr_ratio 16"
    found = [
        axolotl(**LORA, learning_rate=LR, loraplus_lr_ratio=16),
        translated("factory", **factory),
        translate_command(swift.split(), Options()),
    ]
    for one in found:
        assert rates(one.config, FACTORS) == {name: LR * (16 if "lora_B" in name else 1) for name in FACTORS}
        assert one.config["optim"]["rates"] == [{"of": "lora_B|lora_magnitude", "lr": 3.2e-3}]
    assert outcome(found[0], "loraplus_lr_ratio") == "carried"
    decayed = axolotl(**LORA, learning_rate=LR, loraplus_lr_ratio=16, weight_decay=0.1)
    assert decayed.config["optim"].get("weight_decay", 0.0) == 0.0
    assert outcome(decayed, "weight_decay") == "changed"
    assert refused(loraplus_lr_ratio=16) == {"loraplus_lr_ratio"}
    whole = {"finetuning_type": "full", "learning_rate": LR, "loraplus_lr_ratio": 16.0}
    assert refused_settings(lambda: translated("factory", **whole), text=text_of("factory", **whole)) == [
        "loraplus_lr_ratio"
    ]


# Settings -> the rate of each of FULL, by Axolotl's documentation of embedding_lr, embedding_lr_scale and lr_groups.
_GROUPS = [{"name": "o_proj", "modules": ["self_attn.o_proj.weight"], "lr": 1e-6},
           {"name": "q_proj", "modules": ["model.layers.2.self_attn.q_proj.weight"], "lr": 1e-5}]  # fmt: skip
AXOLOTL = [
    ({"embedding_lr": 1e-5}, [1e-5, 1e-5, LR, LR, LR], "carried"),
    ({"embedding_lr_scale": 0.5}, [LR / 2, LR / 2, LR, LR, LR], "carried"),
    ({"lr_groups": _GROUPS}, [LR, LR, 1e-6, 1e-5, LR], "changed"),
    ({"embedding_lr": 1e-5, "lr_groups": _GROUPS}, [1e-5, 1e-5, 1e-6, 1e-5, LR], "carried"),
    ({"embedding_lr": 1e-5, "weight_decay": 0.1}, [1e-5, 1e-5, LR, LR, LR], "changed"),
]


@pytest.mark.parametrize(("words", "expected", "told"), AXOLOTL)
def test_axolotls_parts(words, expected, told) -> None:
    found = axolotl(learning_rate=LR, **words)
    assert list(rates(found.config, FULL).values()) == expected
    first = outcome(found, next(iter(words)))
    assert first == ("changed" if "lr_groups" in words else told)
    again = check_config({**found.config, "model": "m", "data": {"train": "d.jsonl"}}, files=False)
    assert [part.model_dump() for part in again.optim.rates] == found.config["optim"]["rates"]


def test_beside_lora_embeddings_are_the_modules_that_train_in_full() -> None:
    saved = {**LORA, "learning_rate": LR, "lora_modules_to_save": ["embed_tokens"], "embedding_lr": 1e-5}
    found = rates(axolotl(**saved).config, [*FACTORS, "model.embed_tokens.weight"])
    assert found == {**dict.fromkeys(FACTORS, LR), "model.embed_tokens.weight": 1e-5}
    alone = axolotl(**LORA, learning_rate=LR, embedding_lr=1e-5)
    assert "rates" not in alone.config["optim"]
    assert outcome(alone, "embedding_lr") == "listed"
    assert refused(lr_groups=[{"name": "x", "modules": "q_proj", "lr": 1e-5}]) == {"lr_groups"}
    assert not re.search("embed", "".join(alone.config["optim"]))
