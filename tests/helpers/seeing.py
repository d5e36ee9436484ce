"""Tiny models that see, with the processor's files of their family, and pictures of one colour.

folder = seeing("qwen2_5_vl", tmp_path / "base")
picture(tmp_path / "red.png", "red", (56, 28))
"""

import json
import random
from pathlib import Path

import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import zoo_tokenizers
from helpers.wrappers import WRAPPERS

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
# Written for these tests: as Qwen's, contents may be texts or lists of parts.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}
LARGEST = 8 * 8 * 28 * 28


def seeing(name: str, folder: Path, *, seed: int = 0, **text: object) -> Path:
    """Write a model folder that `from_pretrained` reads. text: other keys of text_config."""
    zoo_tokenizers.qwen(folder, TEMPLATE, thinks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    own, eye, others = WRAPPERS[name]
    eye = eye | {"patch_size": PATCH[name]}
    if name == "qwen2_5_vl":
        eye |= {"window_size": 4 * PATCH[name]}
    language = own | {"vocab_size": len(tokenizer) + 6, "eos_token_id": ids["<|im_end|>"], "pad_token_id": 0} | text
    config = CONFIG_MAPPING[name](text_config=language, vision_config=eye, **others)
    for key, mark in zip(("vision_start", "image", "vision_end", "video"), MARKS, strict=True):
        setattr(config, f"{key}_token_id", ids[mark])
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[ids["<|im_end|>"]])
    model.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH[name], size={"shortest_edge": 28 * 28, "longest_edge": LARGEST}
    )
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorFast"}))
    return folder


def picture(path: Path, colour: str, size: tuple[int, int] = (56, 56)) -> Path:
    """Write a picture of one colour. size: width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def noise(path: Path, size: tuple[int, int]) -> Path:
    """Write a picture of which every pixel counts, and which looks like no other. size: width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", size, random.Random(path.name).randbytes(3 * size[0] * size[1])).save(path)
    return path
