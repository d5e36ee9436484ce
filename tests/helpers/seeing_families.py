"""Tiny vision-language models of families other than Qwen's, with their processor files, and transformers' processors.

Message contents are lists of parts, as in these families' published templates; Gemma's and Mistral's also take strings.

    folder = seeing_family("gemma3", tmp_path / "base")
    inputs = reference("gemma3", folder)(text=[text], images=[image], return_tensors="pt")
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from helpers import zoo_tokenizers
from helpers.wrappers import WRAPPERS

_ONE_PART = "{% if part.type == 'image' %}MARK{% else %}{{ part.text | trim }}{% endif %}"
_EITHER = (
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}" + _ONE_PART + "{% endfor %}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "BEGIN{{ 'model' if message.role == 'assistant' else message.role }}\n" + _EITHER + "END\n{% endfor %}"
    "{% if add_generation_prompt %}BEGINmodel\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]"
    + _EITHER.replace(" | trim", "")
    + "[/INST]{% else %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
_MLLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    + _EITHER.replace(" | trim", "")
    + "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Pictures stand before the texts of their turn, wherever they were.
_LLAVA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# As in the published InternVL3.5-HF.
_INTERNVL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An answer ends where the next turn begins, and here also at the end.
_GLM = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n"
    + _EITHER.replace(" | trim", "").replace("MARK", "<|begin_of_image|><|image|><|end_of_image|>")
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<|user|>{% endif %}"
)
_PADDLE = (
    "<|begin_of_sentence|>{% for message in messages %}{% if message.role == 'user' %}User: "
    + _EITHER.replace(" | trim", "").replace("MARK", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    + "\n{% else %}Assistant:\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
_LFM2 = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    + _EITHER.replace(" | trim", "")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}


@dataclass(frozen=True)
class _Family:
    """A family.

    model: its name in `WRAPPERS`, if another.
    eye, text, others: changes of the vision, text and whole config.
    processor: transformers' module and class.
    eye_class: image processor class in the published preprocessor_config.json; pil: the one that writes the file here.
    settings: content of processor_config.json.
    roles: special tokens by the tokenizer's names for them.
    package: that transformers sees with, besides those of surefoot; the family's tests skip without it.
    """

    template: str
    stop: str
    tokens: tuple[str, ...]
    processor: tuple[str, str]
    pil: tuple[str, str]
    eye_class: str
    size: dict[str, Any]
    settings: dict[str, Any]
    eye: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    gemma: bool = False
    text: dict[str, Any] = field(default_factory=dict)
    package: str = ""

    @property
    def image(self) -> str:
        return self.roles.get("image_token", "<image>")


_LLAVA_SETTINGS = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
}
_SMOL = _Family(
    template=_SMOLVLM,
    stop="<end_of_utterance>",
    tokens=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES),
    processor=("smolvlm", "SmolVLMProcessor"),
    pil=("smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
    eye_class="SmolVLMImageProcessorFast",
    size={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    settings={"image_seq_len": 4},
    eye={"image_size": 32},
    others={"scale_factor": 2},
)
_GEMMA4 = _Family(
    template=_GEMMA.replace("BEGIN", "<|turn>").replace("END", "<turn|>"),
    stop="<turn|>",
    tokens=(
        *("<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|video|>"),
        *("<|audio>", "<|audio|>", "<audio|>"),
    ),
    roles={
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    processor=("gemma4", "Gemma4Processor"),
    pil=("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil"),
    eye_class="Gemma4ImageProcessorFast",
    size={"max_soft_tokens": 70},
    settings={},
    gemma=True,
    text={"use_bidirectional_attention": "vision"},
)
FAMILIES = {
    "gemma3": _Family(
        template=_GEMMA.replace("BEGIN", "<start_of_turn>").replace("END", "<end_of_turn>"),
        stop="<end_of_turn>",
        tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        roles={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        processor=("gemma3", "Gemma3Processor"),
        pil=("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
        eye_class="Gemma3ImageProcessorFast",
        size={"size": {"height": 32, "width": 32}},
        settings={"image_seq_length": 4},
        eye={"image_size": 32},
        gemma=True,
    ),
    "gemma3n": _Family(
        template=_GEMMA.replace("BEGIN", "<start_of_turn>").replace("END", "<end_of_turn>"),
        stop="<end_of_turn>",
        # As in the published tokenizer: those from <end_of_image> on have embeddings of their own.
        tokens=(
            *("<start_of_image>", "<start_of_audio>"),
            *("<end_of_image>", "<image_soft_token>", "<end_of_audio>", "<audio_soft_token>"),
        ),
        roles={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        processor=("gemma3n", "Gemma3nProcessor"),
        pil=("siglip.image_processing_pil_siglip", "SiglipImageProcessorPil"),
        eye_class="SiglipImageProcessorFast",
        size={"size": {"height": 64, "width": 64}},
        settings={"image_seq_length": 4},
        gemma=True,
        package="timm",
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(
        _GEMMA4,
        processor=("gemma4_unified", "Gemma4UnifiedProcessor"),
        pil=("gemma4_unified.image_processing_gemma4_unified", "Gemma4UnifiedImageProcessor"),
        eye_class="Gemma4UnifiedImageProcessor",
        package="torchvision",
    ),
    "internvl": _Family(
        template=_INTERNVL,
        stop="<|im_end|>",
        tokens=("<img>", "<IMG_CONTEXT>", "</img>", "<video>"),
        roles={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor=("internvl", "InternVLProcessor"),
        pil=("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil"),
        eye_class="GotOcr2ImageProcessorFast",
        size={"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 6},
        settings={"image_seq_length": 4},
        others={"image_seq_length": 4},
    ),
    "glm46v": _Family(
        template=_GLM,
        stop="<|user|>",
        tokens=(
            "[gMASK]",
            "<sop>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|begin_of_image|>",
            "<|image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|video|>",
            "<|end_of_video|>",
        ),
        roles={"image_token": "<|image|>", "video_token": "<|video|>"},
        processor=("glm46v", "Glm46VProcessor"),
        pil=("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil"),
        eye_class="Glm46VImageProcessorFast",
        size={"patch_size": 8, "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 64 * 64}},
        settings={},
    ),
    "paddleocr_vl": _Family(
        template=_PADDLE,
        stop="</s>",
        tokens=("<|begin_of_sentence|>", "</s>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
        roles={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        processor=("paddleocr_vl", "PaddleOCRVLProcessor"),
        pil=("paddleocr_vl.image_processing_pil_paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
        eye_class="PaddleOCRVLImageProcessor",
        size={"patch_size": 8, "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}},
        settings={},
    ),
    "llava": _Family(
        template=_LLAVA,
        stop="<|im_end|>",
        tokens=("<image>",),
        processor=("llava", "LlavaProcessor"),
        pil=("clip.image_processing_pil_clip", "CLIPImageProcessorPil"),
        eye_class="CLIPImageProcessor",
        size={"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        settings=_LLAVA_SETTINGS,
        eye=_CLIP,
    ),
    "llava_next": _Family(
        template=_LLAVA,
        stop="<|im_end|>",
        tokens=("<image>",),
        processor=("llava_next", "LlavaNextProcessor"),
        pil=("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil"),
        eye_class="LlavaNextImageProcessorFast",
        size={
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16]],
        },
        settings=_LLAVA_SETTINGS,
        eye=_CLIP,
        others={"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16]]},
        model="llava",
    ),
    "smolvlm": _SMOL,
    "idefics3": _Family(
        template=_SMOLVLM,
        stop="<end_of_utterance>",
        # <global-img> is no token of the published Idefics3.
        tokens=tuple(token for token in _SMOL.tokens if token != "<global-img>"),
        processor=("idefics3", "Idefics3Processor"),
        pil=("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
        eye_class="Idefics3ImageProcessor",
        size=_SMOL.size,
        settings=_SMOL.settings,
        eye=_SMOL.eye | {"model_type": "idefics3_vision"},
        others=_SMOL.others,
        model="smolvlm",
    ),
    "mistral3": _Family(
        template=_MISTRAL.replace("MARK", "[IMG]"),
        stop="</s>",
        tokens=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        roles={"image_token": "[IMG]"},
        processor=("pixtral", "PixtralProcessor"),
        pil=("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil"),
        eye_class="PixtralImageProcessorFast",
        size={"size": {"longest_edge": 64}, "patch_size": 8},
        settings={"patch_size": 8, "spatial_merge_size": 2},
        eye={"image_size": 64},
        others={"spatial_merge_size": 2},
    ),
    "lfm2_vl": _Family(
        template=_LFM2.replace("MARK", "<image>"),
        stop="<|im_end|>",
        tokens=(
            "<|startoftext|>",
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
        ),
        roles={"image_token": "<image>", "bos_token": "<|startoftext|>"},
        processor=("lfm2_vl", "Lfm2VlProcessor"),
        pil=("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor"),
        eye_class="Lfm2VlImageProcessorFast",
        size={"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 2, "max_image_tokens": 4, "max_tiles": 6},
        settings={},
        package="torchvision",
    ),
    "llama4": _Family(
        template=_MLLAMA.replace("start_header_id", "header_start")
        .replace("end_header_id", "header_end")
        .replace("<|eot_id|>", "<|eot|>")
        .replace("MARK", "<|image|>"),
        stop="<|eot|>",
        tokens=(
            *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>"),
        ),
        processor=("llama4", "Llama4Processor"),
        pil=("llama4.image_processing_llama4", "Llama4ImageProcessor"),
        eye_class="Llama4ImageProcessorFast",
        size={"size": {"height": 16, "width": 16}, "max_patches": 6},
        settings={"patch_size": 4},
        roles={"image_token": "<|patch|>"},
        eye={"patch_size": 4, "intermediate_size": 64},
        package="torchvision",
    ),
    "mllama": _Family(
        template=_MLLAMA,
        stop="<|eot_id|>",
        tokens=("<|image|>",),
        roles={"image_token": "<|image|>", "pad_token": "<|finetune_right_pad_id|>"},
        processor=("mllama", "MllamaProcessor"),
        pil=("mllama.image_processing_pil_mllama", "MllamaImageProcessorPil"),
        eye_class="MllamaImageProcessor",
        size={"size": {"height": 16, "width": 16}},
        settings={},
    ),
}


def seeing_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model folder that `from_pretrained` reads."""
    family = FAMILIES[name]
    if family.package:
        pytest.importorskip(family.package)
    _tokenizer(family, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.get_vocab()
    text, eye, others = WRAPPERS[family.model or name]
    language = text | family.text | {"vocab_size": len(tokenizer) + 6, "pad_token_id": 0}
    language |= {"eos_token_id": ids[family.stop], "bos_token_id": tokenizer.bos_token_id}
    if name == "mllama":  # the embedding has 8 more rows than the head, for this token
        language["vocab_size"] = ids["<|image|>"]
    if name == "gemma3n":
        first, audio = ids["<end_of_image>"], ids["<end_of_audio>"]
        language["vocab_size_per_layer_input"] = first
        eye = eye | {"vocab_offset": first, "vocab_size": audio - first}
        others = others | {"audio_config": others["audio_config"] | {"vocab_offset": audio, "vocab_size": 2}}
    config = CONFIG_MAPPING[name](text_config=language, vision_config=eye | family.eye, **others, **family.others)
    config.image_token_id = ids[family.image]
    if name == "mistral3":
        config.vision_feature_layer = -1
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or float(parameter.abs().max()) == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(eos_token_id=[ids[family.stop]])
    model.save_pretrained(folder)
    _class(*family.pil)(**family.size).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_processor_type": family.eye_class}))
    (folder / "processor_config.json").write_text(
        json.dumps(family.settings | {"processor_class": family.processor[1]})
    )
    return folder


def _tokenizer(family: _Family, folder: Path) -> None:
    template = family.template.replace("MARK", family.roles.get("boi_token", family.image))
    if family.gemma:
        if family.package or "<|turn>" in family.tokens:  # whose template writes the token of a feature
            template = template.replace(family.roles["boi_token"], family.image)
        zoo_tokenizers.gemma(folder, template, image=False)
    elif family.stop == "<|eot_id|>":
        zoo_tokenizers.llama3(folder, template, pad=True)
    else:
        zoo_tokenizers.qwen(folder, template, thinks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)}, replace_extra_special_tokens=False)
    if "<s>" in family.tokens:
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if family.stop == "<end_of_utterance>":
        tokenizer.add_special_tokens({"eos_token": family.stop})
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | family.roles))


def reference(name: str, folder: Path) -> Any:
    """Return transformers' processor of the family, without video and sound, which need other packages."""
    family = FAMILIES[name]
    if name == "mistral3":  # its module also names the image processor that computes with torchvision
        pil = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
    kind: Any = _class(f"{family.processor[0]}.processing_{family.processor[0]}", family.processor[1])
    module: Any = importlib.import_module(kind.__module__)
    if hasattr(module, "num2words"):
        module.num2words = module.num2words or (lambda number: str(number))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for role, token in family.roles.items():
        setattr(tokenizer, role, token)
        setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(token))
    made = kind.__new__(kind)
    init: Callable[..., None] = getattr(kind.__init__, "__wrapped__", kind.__init__)
    gemma4 = ("gemma4", "gemma4_unified")
    beside = {"video_processor": None} if name in (*gemma4, "smolvlm", "internvl", "glm46v") else {}
    beside |= {"feature_extractor": None} if name in (*gemma4, "gemma3n") else {}
    made.check_argument_for_proper_class = lambda *given: None
    eye = AutoImageProcessor.from_pretrained(folder, backend="pil")
    init(
        made,
        image_processor=eye,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **beside,
        **family.settings,
    )
    return made


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)
