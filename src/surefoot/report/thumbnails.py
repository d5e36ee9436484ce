"""Thumbnails of samples: in data.json for the report, and as colored blocks on a terminal.

At most `MOST` per sample, `SIDE` pixels wide and high, so that a report stays one small file.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

if TYPE_CHECKING:  # reports must not import torch
    from surefoot.data.formats.conversation import Picture

SIDE, MOST = 112, 4
_LONGEST = 1 << 16  # characters in base64; a JPEG of SIDE x SIDE pure noise has half as many
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
_COLUMNS = 24  # of a terminal


def to_json(picture: Picture) -> dict[str, Any]:
    """Thumbnail for data.json. Raises InputError for a file that changed since its record was read."""
    made = io.BytesIO()
    _small(picture, SIDE, SIDE).save(made, "JPEG", quality=85)
    return {
        "name": Path(picture.path).name,
        "width": picture.width,
        "height": picture.height,
        "tokens": picture.tokens,
        "jpeg": base64.b64encode(made.getvalue()).decode(),
    }


def from_json(written: Mapping[str, Any]) -> tuple[str, str]:
    """Return the picture's caption and its JPEG in base64, empty if the file holds anything else."""
    # data.json may be untrusted and this goes into the page: allow only base64 of a small picture.
    said = f"{written['name']}: {written['width']:,} x {written['height']:,} pixels, {written['tokens']:,} tokens"
    jpeg = str(written["jpeg"])
    return said, jpeg if len(jpeg) <= _LONGEST and _BASE64.fullmatch(jpeg) else ""


class Blocks:
    """Rich renderable: a picture as colored half blocks, two pixels per character; empty without colors."""

    def __init__(self, picture: Picture, indent: int):
        self._picture, self._indent = picture, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        if console.color_system not in ("256", "truecolor"):
            return
        image = _small(self._picture, _COLUMNS, _COLUMNS)
        width, height = image.size
        colors = [Color.from_rgb(*own) for own in _rgb(image)]
        for top in range(0, height - height % 2, 2):
            yield Segment(" " * self._indent)
            rows = (colors[row * width : (row + 1) * width] for row in (top, top + 1))
            for upper, lower in zip(*rows, strict=True):
                yield Segment("▀", Style(color=upper, bgcolor=lower))
            yield Segment.line()


def _small(picture: Picture, width: int, height: int) -> Any:
    """Shrink to at most this size, in RGB; never enlarge."""
    from surefoot.data.tokenize.picture_processor import upright

    image = upright(picture)
    image.thumbnail((width, height))
    return image


def _rgb(image: Any) -> list[tuple[int, int, int]]:
    numbers = image.tobytes()
    return [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, len(numbers), 3)]
