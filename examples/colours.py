"""A tiny model learns to name the colour of a square, from pictures that this script paints. Offline, on a CPU:

    python examples/colours.py runs/colours

It makes a Qwen2.5-VL with random weights, 800 pictures and a config, trains, and asks the trained model about 100
pictures that it has not seen, with plain transformers. Eight colours: chance is 12.5 %.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
)

import surefoot

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 50),
    "blue": (40, 60, 230),
    "yellow": (235, 220, 40),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
    "purple": (150, 40, 190),
    "orange": (250, 140, 20),
}
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "Which colour is the square?"


def make_base(folder: Path) -> None:
    """A model with random weights, a tokenizer of single bytes, and the processor's file."""
    bytes_alone = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(bytes_alone)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4]},
    }
    eye = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 96,
        "window_size": 56,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.1,
    }
    names = ("vision_start", "image", "vision_end", "video")
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=eye,
        tie_word_embeddings=True,
        **{f"{name}_token_id": ids[mark] for name, mark in zip(names, MARKS, strict=True)},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def paint(path: Path, colour: str, draw: random.Random) -> None:
    """A square of the colour, lighter or darker, somewhere on grey."""
    picture = Image.new("RGB", (56, 56), (draw.randrange(90, 150),) * 3)
    side, shade = draw.randrange(24, 44), draw.randrange(-20, 21)
    left, top = draw.randrange(56 - side), draw.randrange(56 - side)
    own = tuple(min(255, max(0, part + shade)) for part in COLOURS[colour])
    ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=own)
    picture.save(path)


def make_data(folder: Path, name: str, count: int, seed: int) -> Path:
    """count pictures, and the file of records beside them."""
    draw, rows = random.Random(seed), []
    (folder / name).mkdir(parents=True)
    for number in range(count):
        colour = draw.choice(list(COLOURS))
        paint(folder / name / f"{number}.png", colour, draw)
        turns = [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": colour}]
        rows.append({"messages": turns, "images": [f"{name}/{number}.png"]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / f"{name}.jsonl"


@torch.no_grad()
def share_right(model_folder: Path, data: Path) -> float:
    """Of the questions, how many plain transformers answers right with the model."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    processor = AutoImageProcessor.from_pretrained(model_folder, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    torch.set_num_threads(1)  # at this size a second one only waits
    right, rows = 0, [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows:
        pixels = processor(images=[Image.open(data.parent / row["images"][0])], return_tensors="pt")
        count = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2
        seen = MARKS[0] + MARKS[1] * count + MARKS[2]
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": seen + QUESTION}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(asked, return_tensors="pt", add_special_tokens=False)["input_ids"]
        kinds = (ids == model.config.image_token_id).int()
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, max_new_tokens=8, **pixels
        )
        answer = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        right += answer == row["messages"][1]["content"]
    return right / len(rows)


def main(folder: Path, *, count: int = 800, epochs: int = 4, asked: int = 100) -> float:
    """The share of colours named right after training on so many pictures, so many times; asked: of so many others."""
    folder.mkdir(parents=True)
    base, pictures = folder / "base", folder / "pictures"
    make_base(base)
    train, held_out = make_data(pictures, "train", count, seed=1), make_data(pictures, "held-out", asked, seed=2)
    before = share_right(base, held_out)
    surefoot.train(
        {
            "stage": "sft",
            "model": str(base),
            "data": {"train": str(train), "eval": str(held_out)},
            "batch": {"size": 16},
            "optim": {"lr": 2e-3},
            "duration": f"{epochs} epochs",
            "output": str(folder / "run"),
        }
    )
    after = share_right(folder / "run", held_out)
    print(f"colours named right: {before:.1%} before, {after:.1%} after")
    return after


if __name__ == "__main__":
    main(Path(sys.argv[1]))
