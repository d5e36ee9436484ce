"""Which weights Axolotl's configs train: targets of an adapter, unfrozen parts, tower and projector."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from interop.axolotl_configs import CHAT, LORA, axolotl, refused
from interop.small_configs import outcome
from surefoot.interop.axolotl.trained import TOWERS, _every, _freezes, is_linear
from surefoot.planning.trained import trains


def test_targets() -> None:
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    assert axolotl(**LORA, lora_target_modules=pattern).config["adapter"]["targets"] == [f"re:{pattern}"]
    experts = {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["mlp.experts.down_proj"]}
    assert axolotl(**LORA, **experts).config["adapter"]["targets"] == ["q_proj", "mlp.experts.down_proj"]
    both = {"lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    assert outcome(axolotl(**LORA, **both), "lora_target_modules") == "listed"
    # Axolotl adds the named modules to all linear ones, and embed_tokens is none of these.
    assert refused(**LORA, lora_target_linear=True, lora_target_modules=["embed_tokens"]) == {"lora_target_modules"}


OWN = {"chat_template": "tokenizer_default"}
SEEING = {"base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "processor_type": "AutoProcessor", "chat_template": "qwen2_vl"}


def test_pictures_of_the_qwen_families() -> None:
    whole = axolotl(**CHAT, **SEEING).config
    assert (whole["vision"], whole["data"]["template"]) == ({"tower": "trained", "projector": "trained"}, "tokenizer")
    assert "encoding" not in whole["data"]  # which is refused with pictures
    assert axolotl(**CHAT, **OWN).config["data"]["encoding"] == "whole"  # twin: texts
    llama = SEEING | {"base_model": "alpindale/Llama-3.2-11B-Vision-Instruct", "chat_template": "llama3_2_vision"}
    assert axolotl(**CHAT, **llama).config["data"]["template"] == "tokenizer"
    unified = SEEING | {"base_model": "google/gemma-4-12B-it", "chat_template": "gemma4_unified"}
    assert axolotl(**CHAT, **unified).config["vision"] == {"projector": "trained"}  # it has no tower
    frozen = {"tower": "frozen", "projector": "frozen"}
    assert axolotl(**CHAT, **SEEING, freeze_mm_modules=True).config["vision"] == frozen
    assert refused(**CHAT, chat_template="qwen2_vl") == {"datasets"}  # a text model


def _llava(eye: str, text: str = "LlamaConfig") -> Any:
    return transformers.LlavaConfig(
        vision_config=getattr(transformers, eye)(), text_config=getattr(transformers, text)()
    )


def _seeing(name: str, eye: str = "") -> Any:
    vision = {"vision_config": getattr(transformers, eye)()} if eye else {}
    return getattr(transformers, f"{name}Config")(**vision)


def _without_head(name: str) -> Any:
    return getattr(transformers, f"{name}Config")(
        vision_config={"model_type": "siglip2_vision_model", "vision_use_head": False}
    )


# The name of a published model -> transformers' class, and a config of its family.
MODELS = {
    "Qwen/Qwen2-VL-7B-Instruct": ("Qwen2VL", lambda: _seeing("Qwen2VL")),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VL", lambda: _seeing("Qwen2_5_VL")),
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen3VL", lambda: _seeing("Qwen3VL")),
    "Qwen/Qwen3.5-9B": ("Qwen3_5", lambda: _seeing("Qwen3_5")),
    "google/gemma-3-4b-it": ("Gemma3", lambda: _seeing("Gemma3")),
    "google/gemma-4-E2B-it": ("Gemma4", lambda: _seeing("Gemma4", "Gemma4VisionConfig")),
    "google/gemma-3n-E2B-it": ("Gemma3n", lambda: _seeing("Gemma3n")),
    "google/gemma-4-12B-it": ("Gemma4Unified", lambda: _seeing("Gemma4Unified", "Gemma4UnifiedVisionConfig")),
    "LiquidAI/LFM2-VL-450M": ("Lfm2Vl", lambda: _without_head("Lfm2Vl")),
    "llava-hf/llava-1.5-7b-hf": ("Llava", lambda: _llava("CLIPVisionConfig")),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": ("SmolVLM", lambda: _seeing("SmolVLM")),
    "OpenGVLab/InternVL3_5-8B-HF": ("InternVL", lambda: _seeing("InternVL")),
    "zai-org/GLM-4.6V-Flash": ("Glm46V", lambda: _seeing("Glm46V")),
    "PaddlePaddle/PaddleOCR-VL-1.6": ("PaddleOCRVL", lambda: _seeing("PaddleOCRVL")),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("Llama4", lambda: _seeing("Llama4")),
    "alpindale/Llama-3.2-11B-Vision-Instruct": ("Mllama", lambda: _seeing("Mllama")),
    "mistral-community/pixtral-12b": ("Llava", lambda: _llava("PixtralVisionConfig", "MistralConfig")),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ("Mistral3", lambda: _seeing("Mistral3")),
}


@pytest.mark.parametrize("base", MODELS)
def test_modules_of_a_tower_are_transformers(base: str) -> None:
    kind, config = MODELS[base]
    if kind == "Gemma3n":
        pytest.importorskip("timm")
    with torch.device("meta"):
        whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config())
    adaptable = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv2d, torch.nn.Conv3d)
    kinds = {
        name.removeprefix("model."): type(one) for name, one in whole.named_modules() if isinstance(one, adaptable)
    }
    kinds = {
        name: kind
        for name, kind in kinds.items()
        if not name.startswith(("language_model", "text_model", "lm_head"))
        and "audio" not in name  # which no picture reaches
    }
    merger = {"visual.merger.mlp.0", "visual.merger.mlp.2"}  # these numbers are no layer's
    held = {name if name in merger else re.sub(r"\.\d+(?=\.)", ".0", name) for name in kinds}
    ((family, found),) = [one for one in TOWERS.items() if re.search(one[0], base.lower())]
    assert held == set(found)
    if kind != "Gemma3n":  # no layer there is linear, so that any target in it is refused
        assert {f"model.{name}" for name in kinds} <= set(_every(found))
    assert {name for name in kinds if is_linear(name, family)} == {
        name for name, kind in kinds.items() if kind.__name__.endswith("Linear")
    }
    assert {name for name in kinds if _freezes(name)} == {name for name in kinds if PREFIXES & set(name.split("."))}


# utils/freeze.py of Axolotl, without those of sounds.
PREFIXES = {"vision_tower", "vision_model", "vision_encoder", "embed_vision", "multi_modal_projector", "visual"}


@pytest.mark.parametrize("base", ["meta-llama/Llama-3.2-3B", "my-model"])
def test_families_that_are_not_seen_with_are_refused(base: str) -> None:
    assert refused(**CHAT, base_model=base, processor_type="AutoProcessor") == {"processor_type"}


TO_LANGUAGE = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"


GLM, GEMMA = {"base_model": "zai-org/GLM-4.6V-Flash"}, {"base_model": "google/gemma-3-4b-it"}
PADDLE = {"base_model": "PaddlePaddle/PaddleOCR-VL-1.6"}
IN_PADDLE = (
    r"(model\.language_model\.layers\.\d+\.mlp\.up_proj|model\.visual\.vision_model\.encoder\.layers\.\d+\.mlp\.fc[12]"
)
BOTH = {"tower": "adapter", "projector": "adapter"}


@pytest.mark.parametrize(
    ("words", "vision"),
    [
        ({"lora_target_modules": ["q_proj", "v_proj"]}, {}),
        ({"lora_target_modules": TO_LANGUAGE}, {}),
        ({"lora_target_modules": "(model"}, {}),  # no pattern, which the check of the config says
        ({"lora_target_modules": ["q_proj", "down_proj"]}, {"tower": "adapter"}),
        ({"lora_target_modules": ".*_proj"}, {"tower": "adapter"}),
        ({"lora_target_modules": r"model.visual.blocks.5.attn.qkv"}, {"tower": "adapter"}),
        ({"lora_target_modules": "all-linear"}, BOTH),  # PEFT's own
        ({"lora_target_linear": True, "freeze_mm_modules": True}, {"tower": "frozen", "projector": "frozen"}),
        (GEMMA | {"lora_target_modules": ["q_proj"]}, {"tower": "adapter"}),
        (GEMMA | {"lora_target_modules": ["o_proj"]}, {}),
        (GEMMA | {"lora_target_modules": TO_LANGUAGE}, {}),
        (GLM | {"lora_target_modules": ["gate_proj"]}, BOTH),
        (GLM | {"lora_target_modules": ["q_proj"]}, {}),
        (PADDLE | {"lora_target_modules": f"{IN_PADDLE})"}, {"tower": "adapter"}),
        (PADDLE | {"lora_target_modules": rf"{IN_PADDLE}|model\.projector\.linear_[12])"}, BOTH),
        (PADDLE | {"lora_target_linear": True}, BOTH),
        (PADDLE | {"lora_target_linear": True, "freeze_mm_modules": True}, {"tower": "frozen", "projector": "adapter"}),
        (PADDLE | {"adapter": None, "freeze_mm_modules": True}, {"tower": "frozen", "projector": "trained"}),
    ],
)  # fmt: skip
def test_adapters_on_a_tower(words: dict[str, Any], vision: dict[str, str]) -> None:
    """PEFT adapts every module whose name ends with a target; `freeze_mm_modules` freezes adapters in the tower.

    Beside PEFT: `tests/runs/test_vision_adapters.py`.
    """
    assert axolotl(**(CHAT | SEEING | LORA | OWN | words)).config.get("vision", {}) == vision


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"lora_target_linear": True}, "lora_target_linear"),  # its own list has `proj`, also a convolution's name
        (GLM | {"lora_target_linear": True}, "lora_target_linear"),
        ({"lora_target_modules": ["proj"]}, "lora_target_modules"),
        ({"base_model": "google/gemma-4-E2B-it", "lora_target_modules": ["q_proj"]}, "lora_target_modules"),
        (PADDLE | {"lora_target_modules": ["q_proj", "patch_embedding"]}, "lora_target_modules"),
    ],
)
def test_adapters_on_what_is_no_linear_layer_are_refused(words: dict[str, Any], name: str) -> None:
    assert refused(**(CHAT | SEEING | LORA | OWN | words)) == {name}


def test_down_proj_is_in_the_tower_of_one_family_only() -> None:
    other = SEEING | {"base_model": "Qwen/Qwen3.5-9B", "chat_template": "qwen3_5"}
    adapter = axolotl(**CHAT, **other, **LORA, lora_target_modules=["down_proj"]).config["adapter"]
    assert adapter["targets"] == ["down_proj"]


HEAD = "^lm_head.weight$"
NAMES = [f"model.layers.{number}.{module}.weight" for number in range(32)
         for module in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "input_layernorm")]  # fmt: skip
NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
UNFROZEN: list[list[str]] = [
    ["model.*", HEAD],
    ["model", "lm_head"],
    ["model.layers", "lm_head", "embed_tokens"],
    [HEAD],
    ["lm_head", "embed_tokens"],
    ["model.layers.2[0-9]+.mlp"],
    ["model.layers.[0-7].", "^model.embed_tokens.weight$"],
    ["model.layers.2[0-9]+.block.up", "model.layers.3.self_attn.q_proj", "model.norm"],
]


def unfreezes(pattern: str, name: str) -> bool:
    """Axolotl's utils/freeze.py, without ranges of rows."""
    return re.match(re.sub(r"\.(?!\+)", r"\\.", pattern), name) is not None


@pytest.mark.parametrize("patterns", UNFROZEN)
def test_what_is_unfrozen_is_axolotls(patterns: list[str]) -> None:
    theirs = {name for name in NAMES if any(unfreezes(pattern, name) for pattern in patterns)}
    found = axolotl(unfrozen_parameters=patterns).config["model"].get("trained", [".*"])
    assert {name for name in NAMES if trains(name.removesuffix(".weight"), found)} == theirs
    assert not theirs or {name for name in NAMES if trains(name.removesuffix(".weight"), found[:-1])} != theirs


def test_parts_of_a_module_and_of_a_model_that_sees_are_refused() -> None:
    assert refused(unfrozen_parameters=["model.*", "lm_head.weight$[:32000]"]) == {"unfrozen_parameters"}
    assert refused(**CHAT, **SEEING, unfrozen_parameters=["model.*", "lm_head"]) == {"unfrozen_parameters"}
    whole = axolotl(unfrozen_parameters=["^model.language_model.*", "lm_head.*"])
    assert (outcome(whole, "unfrozen_parameters"), whole.config.get("vision")) == ("carried", None)


def test_unfrozen_parts_beside_an_adapter_or_a_tower() -> None:
    assert outcome(axolotl(**LORA, unfrozen_parameters=["model.layers.3"]), "unfrozen_parameters") == "changed"
    language = ["model.language_model.*", "lm_head"]
    assert axolotl(**CHAT, **SEEING, unfrozen_parameters=language).config.get("vision", {}) == {}  # frozen
