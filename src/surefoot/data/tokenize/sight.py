"""A model's eye as the data layer needs it: how many tokens a picture takes, and its pixels.

transformers' own processor of the model decides both, in the form that computes with Pillow and NumPy, so that pixels
are the same on every machine and nothing else need be installed. When records are tokenised a picture is opened once,
decoded to see that it is whole, and hashed; its pixels are made when a batch is, from the same bytes. Nothing is
fetched: a picture is a file.

    sight = read_sight(folder, encoder)
    picture = sight.look("cat.png", Path("data"))
    named_tensors = sight.pixels([picture])
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from surefoot.data.batching.batch import Pixels
from surefoot.data.formats.conversation import IMAGE, Picture
from surefoot.data.formats.rows import RowFault
from surefoot.data.tokenize.segments import Segment, TextEncoder
from surefoot.families.files import PROCESSOR_FILES
from surefoot.families.pictures import PictureRow, picture_row
from surefoot.system import hardware
from surefoot.system.errors import Fault, InputError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_PIXELS = 1 << 26  # of a file: 67 million, 200 MB as RGB; more is taken for an attack, or a mistake
_MOST_BYTES = 1 << 28
_ORIENTATION = 0x0112  # EXIF: from 5 on the picture lies on its side
_FETCHED = ("http://", "https://", "data:", "s3://", "gs://", "hf://")


def read_sight(folder: str, encoder: TextEncoder, max_pixels: int | None = None) -> Sight | None:
    """Of the model whose processor's files lie in `folder`; None where it sees nothing, or is of no known family.

    max_pixels: of a picture, in place of the processor's own.

    Raises InputError for a limit where there is no sight.
    """
    row = picture_row(Path(folder)) if folder else None
    if row is not None and set(encoder.control.values()).issuperset(row.tokens):
        return Sight(Path(folder), row, encoder, max_pixels)
    if max_pixels is not None:
        what = "limits pictures, and the model is not one whose pictures surefoot learns"
        raise InputError(Fault("data.max_pixels", what, "leave it out", code="SF-CONFIG-CONFLICT"))
    return None


class Sight:
    """See `read_sight`.

    token_id: of the token that stands for one feature of a picture.
    ids: of all tokens that a picture is written with, none of which is ever learned.
    """

    def __init__(self, folder: Path, row: PictureRow, encoder: TextEncoder, max_pixels: int | None):
        self._folder, self._row, self._max_pixels = folder, row, max_pixels
        number = {text: own for own, text in encoder.control.items()}
        self.token_id = number[row.token]
        self.ids = tuple(number[token] for token in row.tokens)

    @cached_property
    def identity(self) -> str:
        """All that decides tokens and pixels besides the pictures' files."""
        import PIL

        files = {path.name: path.read_text() for name in PROCESSOR_FILES if (path := self._folder / name).is_file()}
        versions = [hardware.versions().get("transformers"), PIL.__version__]
        return json.dumps([self._row.tokens, self._max_pixels, versions, files], sort_keys=True)

    @cached_property
    def _processor(self) -> Any:
        """transformers', made when the first picture is looked at: text needs none."""
        from transformers import AutoImageProcessor

        try:
            found: Any = AutoImageProcessor.from_pretrained(
                self._folder, backend="pil", trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            what = f"no processor of pictures can be read: {' '.join(str(error).split())[:200]}"
            fix = "take the model's own files"
            raise InputError(Fault(str(self._folder), what, fix, code="SF-MODEL-KIND")) from error
        if self._max_pixels is not None:
            least, key = found.size[self._row.least], self._row.most
            if self._max_pixels < least:
                what = f"is {self._max_pixels:,}, below the {least:,} that the model's processor begins at"
                raise InputError(Fault("data.max_pixels", what, "raise it", code="SF-CONFIG-CONFLICT"))
            found.size = {self._row.least: least, key: self._max_pixels}
        return found

    def look(self, path: str, folder: Path | None) -> Picture:
        """The picture's facts. Raises RowFault for a file that is missing, damaged, too large, or no picture.

        folder: below which a path that is not absolute lies.
        """
        if path.startswith(_FETCHED):
            raise RowFault("is an address, and nothing is fetched", "download it, and name the file")
        if folder is None and not os.path.isabs(path):
            raise RowFault("has no folder, because its records are read from afar", "download the data set")
        place = Path(folder or "", path.removeprefix("file://"))
        data, facts = _read(place)
        with _opened(data) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION, 1) >= 5:
                width, height = height, width
            image.draft("RGB", (image.width // 8, image.height // 8))  # of a JPEG an eighth is decoded to see the end
            image.load()
        digest = hashlib.sha256(data).hexdigest()
        return Picture(str(place), digest, width, height, self.tokens(width, height), facts.st_size, facts.st_mtime_ns)

    def tokens(self, width: int, height: int) -> int:
        """Features that stand for a picture of this size. Raises RowFault for one that the model cannot take."""
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise RowFault(f"the model takes none of {width} x {height} pixels: {error}") from None
        return patches // self._processor.merge_size**2

    def spread(self, segments: Sequence[Segment], pictures: Sequence[Picture]) -> Sequence[Segment]:
        """The segments with the tokens of each picture at its place."""
        if not pictures:
            return segments
        found: list[Segment] = []
        left = iter(pictures)
        for segment in segments:
            before, *rest = segment.text.split(IMAGE)
            found.append(segment._replace(text=before))
            for after in rest:
                if (picture := next(left, None)) is None:
                    raise RowFault("the template writes a turn with a picture twice", code="SF-DATA-PICTURE")
                found += [segment._replace(text=self._text(picture), content=False), segment._replace(text=after)]
        if next(left, None) is not None:
            raise RowFault("the template leaves out a turn with a picture", code="SF-DATA-PICTURE")
        return found

    def told(self, text: str, pictures: Iterator[Picture]) -> str:
        """A text with its pictures' names and sizes in place of their tokens. pictures: in order, and on from there."""

        def name(found: re.Match[str]) -> str:
            picture = next(pictures)
            facts = f"{picture.width} x {picture.height} pixels, {picture.tokens:,} tokens"
            return f"[{Path(picture.path).name}: {facts}]"

        return re.sub(f"(?:{re.escape(self._row.token)})+", name, text)

    def _text(self, picture: Picture) -> str:
        return self._row.before + self._row.token * picture.tokens + self._row.after

    def pixels(self, pictures: Sequence[Picture]) -> Pixels:
        """What the model's forward takes of these, in order. Raises InputError for a file that is not what it was when
        its record was read."""
        if not pictures:
            return ()
        made = self._processor(images=[_pixels(picture) for picture in pictures], return_tensors="pt")
        return tuple((name, made[name]) for name in sorted(made))


def is_same(picture: Picture) -> bool:
    """Whether the file is, by its size and time, the one that was looked at."""
    try:
        facts = os.stat(picture.path)
    except OSError:
        return False
    return (facts.st_size, facts.st_mtime_ns) == (picture.size, picture.changed)


def _read(place: Path) -> tuple[bytes, os.stat_result]:
    try:
        facts = place.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise RowFault("is no regular file", "name the picture's file")
        if facts.st_size > _MOST_BYTES:
            raise RowFault(f"has {facts.st_size:,} bytes, more than {_MOST_BYTES:,}", "make it smaller")
        return place.read_bytes(), facts
    except FileNotFoundError:
        raise RowFault(f"does not exist ({place})", "restore it, or remove the row") from None
    except (OSError, ValueError) as error:
        raise RowFault(f"cannot be read: {error}", "restore it, or remove the row") from None


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """A PIL image whose size is no attack. What Pillow raises inside is a RowFault."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own limit: ours is lower
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > _MOST_PIXELS:
                    what = f"has {width:,} x {height:,} pixels, more than {_MOST_PIXELS:,}"
                    raise RowFault(what, "make it smaller: the model sees far fewer")
                yield image
    except UnidentifiedImageError:
        raise RowFault(f"is no picture of a known format ({', '.join(_FORMATS)})", "save it as PNG or JPEG") from None
    except Image.DecompressionBombError:
        raise RowFault(f"has more than {_MOST_PIXELS:,} pixels", "make it smaller") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise RowFault(f"is damaged: {error}", "restore it, or remove the row") from None


def _pixels(picture: Picture) -> Any:
    """The picture upright, in RGB."""
    from PIL import ImageOps

    try:
        data, _ = _read(Path(picture.path))
        if hashlib.sha256(data).hexdigest() != picture.sha256:
            raise RowFault("is not what it was when its record was read (SHA-256 differs)", "restore it")
        with _opened(data) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except RowFault as fault:
        raise InputError(Fault(picture.path, fault.what, fault.fix, code="SF-DATA-PICTURE")) from None
