"""How families write a picture among the tokens of a text, by transformers' class that prepares their pictures.

A chat template writes a short mark in a picture's place, and the family's processor the picture's tokens in place of
the mark: as many `token`s as the picture has features, with what stands before, between and behind them. How many
depends on the picture's size, and on the files of the processor.

A tokenizer without these tokens belongs to another family that prepares pictures the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.families.files import read_json_if_there

# Text of a picture: transformers' image processor, the object in processor_config.json, height and width in pixels.
Write = Callable[[Any, Mapping[str, Any], int, int], str]
Limit = Callable[[Any, int], int]


@dataclass(frozen=True)
class PictureRow:
    """mark: what the chat template writes for a picture.

    token: stands for one feature of a picture.
    tokens: control tokens that the tokenizer must have, `token` among them.
    write: see above. Raises ValueError for a picture that the model does not take, KeyError for a setting that
        processor_config.json lacks.
    inputs: what the model's forward takes of what the image processor makes.
    limit: sets the most pixels of a picture in the image processor, and returns 0; or the least that can be set, where
        that is more. None: every picture comes out in one size, or in sizes that the model knows by its own config.
    others: control tokens that it is written with where the tokenizer has them.
    calls: what the image processor is called with besides the pictures.
    """

    mark: str
    token: str
    tokens: tuple[str, ...]
    write: Write
    inputs: tuple[str, ...]
    limit: Limit | None = None
    others: tuple[str, ...] = ()
    calls: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: {}


def _qwen(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    count = processor.get_number_of_image_patches(height, width, {}) // processor.merge_size**2
    return "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"


def _limit_qwen(processor: Any, most: int) -> int:
    least = processor.size["shortest_edge"]
    if most >= least:
        processor.size = {"shortest_edge": least, "longest_edge": most}
    return 0 if most >= least else least


def _gemma3(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    one = "\n\n<start_of_image>" + "<image_soft_token>" * settings.get("image_seq_length", 256) + "<end_of_image>\n\n"
    crops = 0
    if processor.do_pan_and_scan:
        from numpy import broadcast_to

        keys = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        asked = {f"pan_and_scan_{key}": getattr(processor, f"pan_and_scan_{key}") for key in keys}
        crops = len(processor.pan_and_scan(broadcast_to(0, (3, height, width)), **asked))
    if not crops:
        return one
    joined = " ".join([one] * crops)
    return f"Here is the original image {one} and here are some crops to help you see better {joined}"


def _gemma4(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """The largest size of this shape in which sides are whole blocks, a token each, and no more than may be."""
    block = processor.patch_size * processor.pooling_kernel_size
    scale = math.sqrt(processor.max_soft_tokens * block**2 / (height * width))
    rows, columns = (math.floor(scale * side / block) for side in (height, width))
    if not rows and not columns:
        raise ValueError("no side makes a block")
    if not rows:
        rows, columns = 1, min(width // height, processor.max_soft_tokens)
    elif not columns:
        rows, columns = min(height // width, processor.max_soft_tokens), 1
    return "<|image>" + "<|image|>" * (rows * columns) + "<image|>"


_GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # of a picture: what transformers lets it have


def _limit_gemma4(processor: Any, most: int) -> int:
    pixels = (processor.patch_size * processor.pooling_kernel_size) ** 2
    allowed = [count for count in _GEMMA4_TOKENS if count * pixels <= most]
    if not allowed:
        return _GEMMA4_TOKENS[0] * pixels
    processor.max_soft_tokens = allowed[-1]
    return 0


def _llava(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    patch = settings["patch_size"]
    count = (size["height"] // patch) * (size["width"] // patch)
    return "<image>" * (count + _beside_patches(settings))


def _beside_patches(settings: Mapping[str, Any]) -> int:
    """Features that the vision tower adds (CLIP's first), less the first where the projector leaves it out."""
    drops = settings.get("vision_feature_select_strategy") == "default"
    return settings.get("num_additional_image_tokens", 0) - drops


def _llava_next(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """The whole picture small, and in tiles: rows of patches without the padding, each with a line break's feature."""
    size = processor.size
    side = size.get("shortest_edge") or min(size["height"], size["width"])
    across = side // settings["patch_size"]
    best = max(processor.image_grid_pinpoints, key=lambda grid: _kept(grid, height, width))
    rows, columns = (across * (edge // side) for edge in best)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return "<image>" * (rows * columns + rows + across**2 + _beside_patches(settings))


def _kept(grid: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """How many pixels of the picture a grid of tiles (height, width) keeps; as many as it leaves empty, negative."""
    scale = min(grid[0] / height, grid[1] / width)
    kept = min(int(height * scale) * int(width * scale), height * width)
    return kept, kept - grid[0] * grid[1]


def _tiles(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """Idefics3's and SmolVLM's: tiles row by row, each with its place, then the whole picture small."""
    tile = processor.max_image_size["longest_edge"]
    if processor.size.get("longest_edge", 0) % tile:
        raise ValueError(f"size.longest_edge is no multiple of {tile}, the side of a tile")
    _, rows, columns = processor.get_number_of_image_patches(height, width, {})
    features = "<image>" * settings.get("image_seq_len", 169)
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{_FAKE}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
    gap = "\n" if text else ""
    return f"{text}{gap}{_FAKE}<global-img>{features}{_FAKE}"


_FAKE = "<fake_token_around_image>"


def _limit_tiles(processor: Any, most: int) -> int:
    tile = processor.max_image_size["longest_edge"]
    if most < tile**2:
        return tile**2
    processor.size = {"longest_edge": math.isqrt(most) // tile * tile}
    return 0


def _pixtral(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    side = _pixtral_side(settings)
    ratio = max(height, width) / processor.size["longest_edge"]
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not height or not width:
        raise ValueError("one side vanishes when it is made smaller")
    row = "[IMG]" * math.ceil(width / side)
    return "[IMG_BREAK]".join([row] * math.ceil(height / side)) + "[IMG_END]"


def _pixtral_side(settings: Mapping[str, Any]) -> int:
    """Pixels of what becomes one feature."""
    return settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)


def _limit_pixtral(processor: Any, most: int) -> int:
    least = 64**2
    if most >= least:
        processor.size = {"longest_edge": math.isqrt(most)}
    return 0 if most >= least else least


_PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_QWEN = PictureRow(
    mark="<|vision_start|><|image_pad|><|vision_end|>",
    token="<|image_pad|>",
    tokens=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    write=_qwen,
    inputs=("pixel_values", "image_grid_thw"),
    limit=_limit_qwen,
)
_IDEFICS3 = PictureRow(
    mark="<image>",
    token="<image>",
    tokens=(_FAKE, "<image>"),
    write=_tiles,
    inputs=("pixel_values", "pixel_attention_mask"),
    limit=_limit_tiles,
    others=("<global-img>", *_PLACES),
)
ROWS: Mapping[str, PictureRow] = {
    "Qwen2VLImageProcessor": _QWEN,  # Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5
    "Gemma3ImageProcessor": PictureRow(
        mark="<start_of_image>",
        token="<image_soft_token>",
        tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        write=_gemma3,
        inputs=("pixel_values",),
    ),
    "Gemma4ImageProcessor": PictureRow(
        mark="<|image|>",
        token="<|image|>",
        tokens=("<|image>", "<|image|>", "<image|>"),
        write=_gemma4,
        inputs=("pixel_values", "image_position_ids"),
        limit=_limit_gemma4,
    ),
    "LlavaProcessor": PictureRow("<image>", "<image>", ("<image>",), _llava, ("pixel_values",)),
    "LlavaNextImageProcessor": PictureRow(
        "<image>", "<image>", ("<image>",), _llava_next, ("pixel_values", "image_sizes")
    ),
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
    "PixtralImageProcessor": PictureRow(  # Pixtral and Mistral 3
        mark="[IMG]",
        token="[IMG]",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        write=_pixtral,
        inputs=("pixel_values", "image_sizes"),
        limit=_limit_pixtral,
        calls=lambda settings: {"patch_size": _pixtral_side(settings)},
    ),
}


Part = Literal["tower", "projector"]
PARTS: tuple[Part, ...] = ("tower", "projector")
_TOWERS = ("vision_tower", "vision_model", "visual")
_PROJECTORS = ("multi_modal_projector", "embed_vision", "connector", "merger", "deepstack_merger_list")


def part_of(parameter: str) -> Part | None:
    """What a parameter of a model that sees belongs to, by its name in transformers: the vision tower, or the projector
    that maps its features to the language model's width and may lie inside it. None: neither."""
    names = parameter.split(".")[:-1]
    if any(name in _PROJECTORS for name in names):
        return "projector"
    return "tower" if any(name in _TOWERS for name in names) else None


def modules_of(part: Part, parameters: Collection[str]) -> tuple[str, ...]:
    """The outermost modules that hold this part and nothing else, lists taken apart (PEFT takes none).

    parameters: names of all that tower and projector hold.
    """
    others = {name for name in parameters if part_of(name) != part}
    found: dict[str, None] = {}
    for parameter in (name for name in parameters if part_of(name) == part):
        names = parameter.split(".")[:-1]
        words = _TOWERS if part == "tower" else _PROJECTORS
        end = 1 + next(place for place, name in enumerate(names) if name in words)
        while end < len(names) and (names[end].isdigit() or _holds(names[:end], others)):
            end += 1
        found[".".join(names[:end])] = None
    return tuple(found)


def _holds(module: Sequence[str], parameters: Collection[str]) -> bool:
    return any(name.startswith(".".join(module) + ".") for name in parameters)


def picture_row(folder: Path) -> PictureRow | None:
    """That of the model, or of the tokenizer's files, in `folder`; None where it sees nothing, or is not known."""
    names: list[str] = []
    for file in ("processor_config.json", "preprocessor_config.json"):
        found = read_json_if_there(folder / file)
        own: Any = found.get("image_processor", found)
        kinds = [own.get("image_processor_type") if isinstance(own, dict) else None, found.get("processor_class")]
        names += [one.removesuffix("Fast").removesuffix("Pil") for one in kinds if isinstance(one, str)]
    return next((ROWS[name] for name in names if name in ROWS), None)
