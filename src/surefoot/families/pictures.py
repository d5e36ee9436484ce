"""How families represent an image in the tokens of a text, by transformers' image processor class.

A chat template writes a short placeholder for an image. The family's processor replaces it by the image's tokens: one
`token` per feature, with the family's tokens before, between and after them. Their number depends on the image size and
the processor's files.

A tokenizer without these tokens belongs to another family that uses the same image processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json_if_there

# (image processor, content of processor_config.json, height and width in pixels) -> text of the image.
Write = Callable[[Any, Mapping[str, Any], int, int], str]
Limit = Callable[[Any, int], int]


@dataclass(frozen=True)
class PictureRow:
    """How a family represents images.

    mark: placeholder that the chat template writes for an image.
    token: token for one image feature.
    tokens: control tokens that the tokenizer must have, including `token`.
    write: returns the text of an image. Raises ValueError for an unsupported image, KeyError for a setting that is
        missing in processor_config.json.
    inputs: outputs of the image processor that the model's forward takes.
    limit: sets the maximum pixels per image in the image processor and returns 0; if that is below the possible
        minimum, returns the minimum. None: image sizes are fixed.
    others: control tokens that are used if the tokenizer has them.
    calls: extra arguments of the image processor.
    by_row: whether pixels are [B, pictures of a row, ...], so that all rows of a batch need equally many pictures.
    """

    mark: str
    token: str
    tokens: tuple[str, ...]
    write: Write
    inputs: tuple[str, ...]
    limit: Limit | None = None
    others: tuple[str, ...] = ()
    calls: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: {}
    by_row: bool = False


def _limit_by_size(processor: Any, most: int) -> int:
    least = processor.size["shortest_edge"]
    if most >= least:
        processor.size = {"shortest_edge": least, "longest_edge": most}
    return 0 if most >= least else least


def _limit_glm(processor: Any, most: int) -> int:
    """Its limits count the pixels of all frames, and a picture stands for `temporal_patch_size` of them."""
    frames = processor.temporal_patch_size
    return -(-_limit_by_size(processor, most * frames) // frames)


def _merged(begin: str, token: str, end: str, limit: Limit) -> PictureRow:
    """Qwen-VL's form: patches of a picture in its own shape, of which squares are merged into one feature."""

    def write(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
        count = processor.get_number_of_image_patches(height, width, {}) // processor.merge_size**2
        return begin + token * count + end

    inputs = ("pixel_values", "image_grid_thw")
    return PictureRow(begin + token + end, token, (begin, token, end), write, inputs, limit)


def _gemma3_picture(settings: Mapping[str, Any]) -> str:
    return "\n\n<start_of_image>" + "<image_soft_token>" * settings.get("image_seq_length", 256) + "<end_of_image>\n\n"


def _gemma3(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    one = _gemma3_picture(settings)
    crops = 0
    if processor.do_pan_and_scan:
        from numpy import broadcast_to

        keys = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        arguments = {f"pan_and_scan_{key}": getattr(processor, f"pan_and_scan_{key}") for key in keys}
        crops = len(processor.pan_and_scan(broadcast_to(0, (3, height, width)), **arguments))
    if not crops:
        return one
    joined = " ".join([one] * crops)
    return f"Here is the original image {one} and here are some crops to help you see better {joined}"


def _gemma4(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """Largest size of this aspect ratio whose sides are whole blocks, one token each, within the maximum."""
    block = processor.patch_size * processor.pooling_kernel_size
    scale = math.sqrt(processor.max_soft_tokens * block**2 / (height * width))
    rows, columns = (math.floor(scale * side / block) for side in (height, width))
    if not rows and not columns:
        raise ValueError("both sides are smaller than a block")
    if not rows:
        rows, columns = 1, min(width // height, processor.max_soft_tokens)
    elif not columns:
        rows, columns = min(height // width, processor.max_soft_tokens), 1
    return "<|image>" + "<|image|>" * (rows * columns) + "<image|>"


_GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # tokens per image that transformers allows


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
    return "<image>" * (count + _extra_features(settings))


def _extra_features(settings: Mapping[str, Any]) -> int:
    """Extra features of the vision tower (CLIP's class token), minus the first if the projector drops it."""
    drops = settings.get("vision_feature_select_strategy") == "default"
    return settings.get("num_additional_image_tokens", 0) - drops


def _llava_next(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """The downscaled image, then tiles: rows of patches without padding, each followed by a newline feature."""
    size = processor.size
    side = size.get("shortest_edge") or min(size["height"], size["width"])
    across = side // settings["patch_size"]
    best = max(processor.image_grid_pinpoints, key=lambda grid: _kept(grid, height, width))
    rows, columns = (across * (edge // side) for edge in best)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return "<image>" * (rows * columns + rows + across**2 + _extra_features(settings))


def _kept(grid: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Return (image pixels that a grid of tiles (height, width) keeps, minus its empty pixels)."""
    scale = min(grid[0] / height, grid[1] / width)
    kept = min(int(height * scale) * int(width * scale), height * width)
    return kept, kept - grid[0] * grid[1]


def _tiles(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """Idefics3 and SmolVLM: tiles row by row, each with its position, then the downscaled image."""
    tile = processor.max_image_size["longest_edge"]
    if processor.size.get("longest_edge", 0) % tile:
        raise ValueError(f"size.longest_edge is not a multiple of {tile}, the side of a tile")
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
        raise ValueError("one side becomes 0 when the image is scaled down")
    row = "[IMG]" * math.ceil(width / side)
    return "[IMG_BREAK]".join([row] * math.ceil(height / side)) + "[IMG_END]"


def _pixtral_side(settings: Mapping[str, Any]) -> int:
    """Side in pixels of the square that becomes one feature."""
    return settings.get("patch_size", 16) * settings.get("spatial_merge_size", 1)


def _limit_pixtral(processor: Any, most: int) -> int:
    least = 64**2
    if most >= least:
        processor.size = {"longest_edge": math.isqrt(most)}
    return 0 if most >= least else least


_IN_TILES = {"crop_to_patches": True}  # InternVL's processor asks for it, whatever the image processor's file says


def _internvl(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    tiles = processor.get_number_of_image_patches(height, width, _IN_TILES)
    return "<img>" + "<IMG_CONTEXT>" * (settings.get("image_seq_length", 256) * tiles) + "</img>"


def _limit_internvl(processor: Any, most: int) -> int:
    tile = processor.size["height"] * processor.size["width"]
    if most >= tile:
        processor.max_patches = most // tile
    return 0 if most >= tile else tile


def _lfm2(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """The whole image; a large one is tiles row by row, each with its position, and then the downscaled image."""
    patch, joined = processor.encoder_patch_size, processor.downsample_factor
    most = {"max_image_tokens": processor.max_image_tokens, "encoder_patch_size": patch, "downsample_factor": joined}
    sides = processor.smart_resize(height, width, min_image_tokens=processor.min_image_tokens, **most)
    named = settings.get("use_image_special_tokens", True)
    begin, end, small = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>") if named else ("", "", "")
    count = math.prod(math.ceil(side // patch / joined) for side in sides)
    fewest, tiles, tile = processor.min_tiles, processor.max_tiles, processor.tile_size
    of_tile = math.ceil(tile // patch / joined) ** 2
    if count > max(processor.max_image_tokens, of_tile * processor.do_image_splitting):
        raise ValueError("one side is too long for the other")
    whole, features = "<image>" * count, "<image>" * of_tile
    tolerance = processor.max_pixels_tolerance
    splits = processor.do_image_splitting and not fewest == tiles == 1
    if not splits or not processor._is_image_too_large(height, width, max_pixels_tolerance=tolerance, **most):
        return begin + whole + end
    columns, rows, *_ = processor._get_grid_layout(height, width, fewest, tiles, tile)
    text = begin
    for row, column in product(range(1, rows + 1), range(1, columns + 1)):
        text += (f"<|img_row_{row}_col_{column}|>" if named else "") + features
    return text + (small + whole if processor.use_thumbnail else "") + end


def _llama4(processor: Any, settings: Mapping[str, Any], height: int, width: int) -> str:
    """Tiles row by row, with a token behind each, and the downscaled image; a small image alone."""
    side = processor.size["height"]
    shuffled = round(1 / settings.get("pixel_shuffle_ratio", 0.5) ** 2)
    features = "<|patch|>" * ((side // settings.get("patch_size", 14)) ** 2 // shuffled)
    rows, columns = _canvas(processor, side, height, width)
    row = "<|tile_x_separator|>".join([features] * columns) + "<|tile_y_separator|>"
    return "<|image_start|>" + (row * rows if rows * columns > 1 else "") + "<|image|>" + features + "<|image_end|>"


def _canvas(processor: Any, side: int, height: int, width: int) -> tuple[int, int]:
    """Return rows and columns of the tiles. The image fills them in one direction: enlarged as little as can be
    (as much, with resize_to_max_canvas), else reduced as little; of these, the fewest pixels."""
    from numpy import float32

    alike: dict[float, list[tuple[int, int]]] = {}  # by shape, in transformers' order
    for count in range(processor.max_patches, 0, -1):
        for rows in (one for one in range(1, count + 1) if count % one == 0):
            alike.setdefault(rows / (count // rows), []).append((rows, count // rows))
    canvases = [one for group in alike.values() for one in group]
    scales = {
        (rows, columns): min(float32(rows * side) / float32(height), float32(columns * side) / float32(width))
        for rows, columns in canvases
    }
    enlarging = [one for one in scales.values() if one >= 1]
    best = (max if processor.resize_to_max_canvas else min)(enlarging) if enlarging else max(scales.values())
    return min((one for one in canvases if scales[one] == best), key=lambda one: one[0] * one[1])


def _limit_llama4(processor: Any, most: int) -> int:
    tile = processor.size["height"] * processor.size["width"]
    if most >= tile:
        processor.max_patches = min(processor.max_patches, most // tile)
    return 0 if most >= tile else tile


def _limit_lfm2(processor: Any, most: int) -> int:
    """As many tiles as fit; where too few do, the whole image alone."""
    feature, tile = (processor.encoder_patch_size * processor.downsample_factor) ** 2, processor.tile_size**2
    least = processor.min_image_tokens * feature
    if most < least:
        return least
    processor.max_tiles = min(processor.max_tiles, most // tile)
    processor.do_image_splitting = processor.do_image_splitting and processor.min_tiles <= processor.max_tiles
    processor.max_image_tokens = min(processor.max_image_tokens, most // feature)
    return 0


_PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_LFM2_PLACES = tuple(f"<|img_row_{row}_col_{column}|>" for row, column in product(range(1, 11), range(1, 11)))
_GLM = _merged("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", _limit_glm)
_GEMMA4 = PictureRow(
    mark="<|image|>",
    token="<|image|>",
    tokens=("<|image>", "<|image|>", "<image|>"),
    write=_gemma4,
    inputs=("pixel_values", "image_position_ids"),
    limit=_limit_gemma4,
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
    # Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5
    "Qwen2VLImageProcessor": _merged("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", _limit_by_size),
    "Glm4vImageProcessor": _GLM,  # GLM-4.1V and GLM-4.5V
    "Glm46VImageProcessor": _GLM,
    "PaddleOCRVLImageProcessor": _merged("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", _limit_by_size),
    "Gemma3ImageProcessor": PictureRow(
        mark="<start_of_image>",
        token="<image_soft_token>",
        tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        write=_gemma3,
        inputs=("pixel_values",),
    ),
    "Gemma3nProcessor": PictureRow(  # the image processor is SigLIP's
        mark="<image_soft_token>",
        token="<image_soft_token>",
        tokens=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        write=lambda processor, settings, height, width: _gemma3_picture(settings),
        inputs=("pixel_values",),
    ),
    "Gemma4ImageProcessor": _GEMMA4,
    "Gemma4UnifiedImageProcessor": _GEMMA4,  # 12B, which has no tower: its projector reads the pixels
    "InternVLProcessor": PictureRow(  # the image processor is GOT-OCR2's
        mark="<IMG_CONTEXT>",
        token="<IMG_CONTEXT>",
        tokens=("<img>", "<IMG_CONTEXT>", "</img>"),
        write=_internvl,
        inputs=("pixel_values",),
        limit=_limit_internvl,
        calls=lambda settings: _IN_TILES,
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
    "Lfm2VlImageProcessor": PictureRow(
        mark="<image>",
        token="<image>",
        tokens=("<image>",),
        write=_lfm2,
        inputs=("pixel_values", "pixel_attention_mask", "spatial_shapes"),
        limit=_limit_lfm2,
        others=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_LFM2_PLACES),
    ),
    "Llama4ImageProcessor": PictureRow(
        mark="<|image|>",
        token="<|patch|>",
        tokens=("<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"),
        write=_llama4,
        inputs=("pixel_values",),
        limit=_limit_llama4,
        others=("<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    "MllamaImageProcessor": PictureRow(  # its tiles are read by cross-attention and take no positions of the text
        mark="<|image|>",
        token="<|image|>",
        tokens=("<|image|>",),
        write=lambda processor, settings, height, width: "<|image|>",
        inputs=("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
        by_row=True,
    ),
}


def picture_row(folder: Path) -> PictureRow | None:
    """Return the row of the model or processor in `folder`; None for text-only or unknown models."""
    names: list[str] = []
    for file in ("processor_config.json", "preprocessor_config.json"):
        found = read_json_if_there(folder / file)
        own: Any = found.get("image_processor", found)
        kinds = [own.get("image_processor_type") if isinstance(own, dict) else None, found.get("processor_class")]
        names += [one.removesuffix("Fast").removesuffix("Pil") for one in kinds if isinstance(one, str)]
    return next((ROWS[name] for name in names if name in ROWS), None)
