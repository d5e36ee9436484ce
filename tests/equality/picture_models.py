"""The models and records with pictures of which TRL's numbers are recorded.

`python -m equality.picture_models FOLDER` writes NAME/policy and NAME/reference for each of MODELS, and PICTURES.
"""

import sys
from pathlib import Path
from typing import Any

from helpers.seeing import noise, seeing

MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Answers end with their stop token, so that both tools learn the same tokens.
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}\n{% endif %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
PICTURES = {"grain.png": (56, 84), "sand.png": (112, 64), "snow.png": (64, 64)}
_PLACE = {"type": "image"}


def _words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# What is asked, its pictures, the better and the worse answer. A record of two pictures, and one of none.
ASKED: list[tuple[list[dict[str, str]], list[str], str, str]] = [
    ([_words("what is this? "), _PLACE], ["grain.png"], "grain of a kind", "no"),
    ([_PLACE, _words(" or "), _PLACE, _words("?")], ["sand.png", "snow.png"], "the first", "the second of the two"),
    ([_words("and without one?")], [], "nothing", "something else"),
    ([_PLACE, _words("now?")], ["snow.png"], "snow", "it is sand, as before"),
]


def prompts() -> list[tuple[list[dict[str, Any]], list[str], str, str]]:
    """As ASKED, with each question as a list of one message, which nobody else holds."""
    return [([{"role": "user", "content": [dict(one) for one in parts]}], *rest) for parts, *rest in ASKED]


def write_pictures(folder: Path) -> None:
    for name, size in PICTURES.items():
        noise(folder / name, size)


def write_models(folder: Path, name: str) -> None:
    """`policy`, and `reference`: the same weights with noise in the language model and the tower."""
    import torch
    from transformers import AutoModelForImageTextToText

    policy = seeing(name, folder / "policy")
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    reference = seeing(name, folder / "reference")
    model = AutoModelForImageTextToText.from_pretrained(policy, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(reference)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_pictures(target / "pictures")
    for each in MODELS:
        write_models(target / each, each)
