"""Which weights Axolotl's configs train: targets of an adapter, unfrozen parts, tower and projector."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from interop.axolotl_configs import CHAT, LORA, axolotl, refused
from interop.small_configs import outcome
from surefoot.interop.axolotl.trained import TOWERS


def test_targets() -> None:
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    assert axolotl(**LORA, lora_target_modules=pattern).config["adapter"]["targets"] == [f"re:{pattern}"]
    experts = {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["mlp.experts.down_proj"]}
    assert axolotl(**LORA, **experts).config["adapter"]["targets"] == ["q_proj", "mlp.experts.down_proj"]
    both = {"lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    assert outcome(axolotl(**LORA, **both), "lora_target_modules") == "listed"
    # Axolotl adds the named modules to all linear ones, and embed_tokens is none of these.
    assert refused(**LORA, lora_target_linear=True, lora_target_modules=["embed_tokens"]) == {"lora_target_modules"}


SEEING = {"base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "processor_type": "AutoProcessor", "chat_template": "qwen2_vl"}


def test_pictures_of_the_qwen_families() -> None:
    whole = axolotl(**CHAT, **SEEING).config
    assert (whole["vision"], whole["data"]["template"]) == ({"tower": "trained", "projector": "trained"}, "tokenizer")
    frozen = {"tower": "frozen", "projector": "frozen"}
    assert axolotl(**CHAT, **SEEING, freeze_mm_modules=True).config["vision"] == frozen
    assert refused(**CHAT, chat_template="qwen2_vl") == {"datasets"}  # a text model


@pytest.mark.parametrize(
    ("family", "config", "model"),
    [
        ("qwen2-vl", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration"),
        ("qwen2.5-vl", "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3-vl", "Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
        ("qwen3.5", "Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_modules_of_a_tower_are_transformers(family: str, config: str, model: str) -> None:
    with torch.device("meta"):
        whole = getattr(transformers, model)(getattr(transformers, config)())
    adaptable = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv3d)
    names = {name for name, module in whole.named_modules() if isinstance(module, adaptable) and ".visual." in name}
    merger = {"merger.mlp.0", "merger.mlp.2"}  # these numbers are no layer's
    held = {name.removeprefix("model.visual.") for name in names}
    assert {name if name in merger else re.sub(r"\.\d+\.", ".0.", name) for name in held} == set(TOWERS[family])


TO_LANGUAGE = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"lora_target_linear": True}, "lora_target_linear"),
        ({"lora_target_modules": ["q_proj", "down_proj"]}, "lora_target_modules"),
        ({"lora_target_modules": ".*_proj"}, "lora_target_modules"),
        ({"lora_target_modules": r"model.visual.blocks.5.attn.qkv"}, "lora_target_modules"),
        ({"lora_target_modules": "all-linear"}, "lora_target_modules"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, None),
        ({"lora_target_modules": TO_LANGUAGE}, None),
        ({"lora_target_modules": "(model"}, None),  # no pattern, which the check of the config says
        ({"lora_target_linear": True, "freeze_mm_modules": True}, None),
    ],
)
def test_adapters_on_a_tower_are_refused(words: dict[str, Any], name: str | None) -> None:
    """PEFT adapts every module whose name ends with a target; `freeze_mm_modules` freezes adapters in the tower."""
    if name is None:
        assert axolotl(**CHAT, **SEEING, **LORA, **words).config.get("vision", {}).get("tower", "frozen") == "frozen"
    else:
        assert refused(**CHAT, **SEEING, **LORA, **words) == {name}


def test_down_proj_is_in_the_tower_of_one_family_only() -> None:
    other = SEEING | {"base_model": "Qwen/Qwen3.5-9B", "chat_template": "qwen3_5"}
    adapter = axolotl(**CHAT, **other, **LORA, lora_target_modules=["down_proj"]).config["adapter"]
    assert adapter["targets"] == ["down_proj"]


HEAD = "^lm_head.weight$"
UNFROZEN: list[tuple[list[str], bool]] = [  # patterns, whether they train all of a text model
    (["^model.language_model.*", "lm_head.*"], True),
    (["model.*", HEAD], True),
    (["model", "lm_head"], True),
    (["model.language_model.*", "lm_head", "embed_tokens"], True),
    ([HEAD], False),
    (["embed_tokens"], False),
    (["lm_head", "embed_tokens"], False),
    (["model.language_model.*"], False),
    (["model.*$", HEAD], False),
    (["model.layers.2[0-9]+.mlp"], False),
    (["model.*", "lm_head.weight$[:32000]"], False),
]


def unfreezes(pattern: str, name: str) -> bool:
    """Axolotl's utils/freeze.py, without ranges of rows."""
    return re.match(re.sub(r"\.(?!\+)", r"\\.", pattern), name) is not None


@pytest.mark.parametrize(("patterns", "whole"), UNFROZEN)
def test_unfrozen_parts(patterns: list[str], whole: bool) -> None:
    body = "model.language_model." if any("language_model" in one for one in patterns) else "model."
    names = [f"{body}embed_tokens.weight", f"{body}layers.3.mlp.up_proj.weight", f"{body}norm.weight", "lm_head.weight"]
    assert all(any(unfreezes(pattern, name) for pattern in patterns) for name in names) == whole
    if whole:
        assert outcome(axolotl(unfrozen_parameters=patterns), "unfrozen_parameters") == "carried"
    else:
        assert refused(unfrozen_parameters=patterns) == {"unfrozen_parameters"}


def test_unfrozen_parts_beside_an_adapter_or_a_tower() -> None:
    assert outcome(axolotl(**LORA, unfrozen_parameters=["model.layers.3"]), "unfrozen_parameters") == "changed"
    language = ["model.language_model.*", "lm_head"]
    assert axolotl(**CHAT, **SEEING, unfrozen_parameters=language).config.get("vision", {}) == {}  # frozen
    assert refused(**CHAT, **SEEING, unfrozen_parameters=["model.*", "lm_head"]) == {"unfrozen_parameters"}
