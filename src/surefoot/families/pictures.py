"""How families write a picture among the tokens of a text, by transformers' class that prepares their pictures.

A picture's place is `before`, as many `token`s as it has features, and `after`, as the family's chat template and
processor write it. A tokenizer without these tokens belongs to another family that prepares pictures the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.families.files import read_json_if_there


@dataclass(frozen=True)
class PictureRow:
    """before, token, after: control tokens, see above.
    least, most: keys of the processor's `size`, pixels of a picture.
    """

    token: str
    before: str = ""
    after: str = ""
    least: str = "shortest_edge"
    most: str = "longest_edge"

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(token for token in (self.before, self.token, self.after) if token)


_QWEN = PictureRow("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
ROWS: Mapping[str, PictureRow] = {"Qwen2VLImageProcessor": _QWEN}  # Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5


def picture_row(folder: Path) -> PictureRow | None:
    """That of the model, or of the tokenizer's files, in `folder`; None where it sees nothing, or is not known."""
    files = [read_json_if_there(folder / name) for name in ("processor_config.json", "preprocessor_config.json")]
    for found in files:
        own: Any = (found or {}).get("image_processor", found)
        kind = own.get("image_processor_type") if isinstance(own, dict) else None
        if isinstance(kind, str):
            return ROWS.get(kind.removesuffix("Fast").removesuffix("Pil"))
    return None
