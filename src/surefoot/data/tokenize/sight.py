"""A model's eye as the data layer needs it: how many tokens a picture takes, and its pixels.

transformers' own processor of the model decides both, in the form that computes with Pillow and NumPy, so that pixels
are the same on every machine and nothing else need be installed. When records are tokenised a picture is opened once,
decoded to see that it is whole, and hashed; its pixels are made when a batch is, from the same bytes. Nothing is
fetched: a picture is a file.

A record names its pictures where they stand (parts of a message's content), or lists them beside texts in which
`<image>` marks their places, one mark for each, in order.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.batching.batch import Pixels
from surefoot.data.formats.conversation import IMAGE, MARK, Conversation, Picture, Turn
from surefoot.data.formats.rows import RowFault
from surefoot.data.tokenize.segments import Segment, TextEncoder
from surefoot.families.files import PROCESSOR_FILES, read_json_if_there
from surefoot.families.pictures import PictureRow, picture_row
from surefoot.system import hardware
from surefoot.system.errors import Fault, InputError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_PIXELS = 1 << 26  # of a file: 67 million, 200 MB as RGB; more is taken for an attack, or a mistake
_MOST_BYTES = 1 << 28
_ORIENTATION = 0x0112  # EXIF: from 5 on the picture lies on its side
Look = Callable[[str], Picture]
_CODE = "SF-DATA-PICTURE"
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
    ids: of all control tokens that a picture is written with.
    """

    def __init__(self, folder: Path, row: PictureRow, encoder: TextEncoder, max_pixels: int | None):
        self._folder, self._row, self._max_pixels = folder, row, max_pixels
        number = {text: own for own, text in encoder.control.items()}
        own = [token for token in (*row.tokens, *row.others) if token in number]
        self.token_id = number[row.token]
        self.ids = tuple(number[token] for token in own)
        self._written = re.compile("|".join(map(re.escape, own)))
        self._marks = re.compile(f"{re.escape(row.mark)}|{IMAGE}")

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
            if self._row.limit is None:
                what = "limits pictures, and this model sees all in sizes of its own"
                raise InputError(Fault("data.max_pixels", what, "leave it out", code="SF-CONFIG-CONFLICT"))
            if least := self._row.limit(found, self._max_pixels):
                what = f"is {self._max_pixels:,}, below the {least:,} that the model's processor begins at"
                raise InputError(Fault("data.max_pixels", what, "raise it", code="SF-CONFIG-CONFLICT"))
        return found

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """Of the processor that joins pictures and text."""
        return read_json_if_there(self._folder / "processor_config.json")

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
        return self._text(width, height).count(self._row.token)

    def _text(self, width: int, height: int) -> str:
        try:
            return self._row.write(self._processor, self._settings, height, width)
        except ValueError as error:
            raise RowFault(f"the model takes none of {width} x {height} pixels: {error}") from None
        except (KeyError, TypeError) as error:
            what = f"does not say how many tokens a picture takes ({error})"
            where = str(self._folder / "processor_config.json")
            raise InputError(Fault(where, what, "take the model's own files", code="SF-MODEL-KIND")) from None

    def spread(self, segments: Sequence[Segment], pictures: Sequence[Picture]) -> Sequence[Segment]:
        """The segments with the tokens of each picture at its place, which is the template's mark or `IMAGE`. The same
        characters as the mark in what the data holds are text."""
        if not pictures:
            return segments
        found: list[Segment] = []
        left = iter(pictures)
        for segment in segments:
            before, *rest = segment.text.split(IMAGE) if segment.content else self._marks.split(segment.text)
            found.append(segment._replace(text=before))
            for after in rest:
                if (picture := next(left, None)) is None:
                    raise RowFault("the template writes a turn with a picture twice", code=_CODE)
                text = self._text(picture.width, picture.height)
                found += [segment._replace(text=text, content=False), segment._replace(text=after)]
        if next(left, None) is not None:
            raise RowFault("the template leaves out a turn with a picture", code=_CODE)
        return found

    def within(self, ids: np.ndarray, pictures: Sequence[Picture]) -> np.ndarray:
        """[T]: where a row's ids belong to its pictures, from the first control token of each to the last."""
        places = np.flatnonzero(np.isin(ids, self.ids))
        found = np.zeros(len(ids), dtype=bool)
        for picture in pictures:
            count = len(self._written.findall(self._text(picture.width, picture.height)))
            own, places = places[:count], places[count:]
            found[own[0] : own[-1] + 1] = True
        return found

    def with_facts(self, text: str, pictures: Iterator[Picture]) -> str:
        """A text of whole pictures with their names and sizes in place of their tokens. pictures: in order, and on from
        there."""
        told, *rest = text.split(self._row.token)
        while rest:
            picture = next(pictures)
            facts = f"{picture.width} x {picture.height} pixels, {picture.tokens:,} tokens"
            told += f"[{Path(picture.path).name}: {facts}]{rest[picture.tokens - 1]}"
            rest = rest[picture.tokens :]
        return told

    def pixels(self, pictures: Sequence[Picture]) -> Pixels:
        """What the model's forward takes of these, in order. Raises InputError for a file that is not what it was when
        its record was read."""
        if not pictures:
            return ()
        images = [upright(picture) for picture in pictures]
        made = self._processor(images=images, return_tensors="pt", **self._row.calls(self._settings))
        return tuple((name, made[name]) for name in sorted(self._row.inputs))


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


def upright(picture: Picture) -> Any:
    """The picture as it is looked at, a PIL image in RGB. Raises InputError for a file that is not what it was when its
    record was read."""
    from PIL import ImageOps

    try:
        data, _ = _read(Path(picture.path))
        if hashlib.sha256(data).hexdigest() != picture.sha256:
            raise RowFault("is not what it was when its record was read (SHA-256 differs)", "restore it")
        with _opened(data) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except RowFault as fault:
        raise InputError(Fault(picture.path, fault.what, fault.fix, code=_CODE)) from None


def refuse_pictures(conversation: Conversation, why: str, fix: str) -> Conversation:
    """The conversation, which has none. Raises RowFault where it has."""
    turns = conversation.turns
    if any(turn.images for turn in turns) or (conversation.images and any(MARK in turn.text for turn in turns)):
        raise RowFault(f"has a picture, and {why}", fix, _CODE)
    return conversation


def with_pictures(conversation: Conversation, look: Look) -> Conversation:
    """The conversation with its pictures, and `IMAGE` for each in its texts.

    look: the picture of a path; raises RowFault for one that cannot be learned.
    """
    if not conversation.images and not any(turn.images for turn in conversation.turns):
        return conversation
    listed = list(conversation.images)
    turns, paths = [], []
    for number, turn in enumerate(conversation.turns, start=1):
        turn, found = _in_turn(turn, listed, number)
        turns.append(turn)
        paths += [(number, path) for path in found]
    if listed:
        what = f"lists {len(listed)} more of its {len(conversation.images)} pictures than its texts have places for"
        raise RowFault(what, f"write {MARK} where each stands", _CODE)
    return replace(conversation, turns=tuple(turns), pictures=tuple(_looked(look, *one) for one in paths))


def _in_turn(turn: Turn, listed: list[str], number: int) -> tuple[Turn, list[str]]:
    """The turn with `IMAGE` at each place, and the paths. listed: pictures without a place yet; those found are taken.

    A mark in a message of parts is text: its places are parts.
    """
    own = list(turn.images)
    if not own and listed:
        turn = replace(turn, content=turn.content.replace(MARK, IMAGE), context=turn.context.replace(MARK, IMAGE))
    places = turn.text.count(IMAGE)
    if own and len(own) != places:
        raise RowFault(f"turn {number} holds U+FDD0, which stands for pictures", "remove the character", _CODE)
    if places and turn.role not in ("user", "tool", "system"):
        raise RowFault(
            f"turn {number} is an answer with a picture", "a model that writes text learns no pictures", _CODE
        )
    paths = []
    for path in own or [""] * places:
        if not path and not listed:
            what = f"turn {number} has a place for a picture, and no picture for it is left in 'images'"
            raise RowFault(what, "list a path for each", _CODE)
        paths.append(path or listed.pop(0))
    return turn, paths


def _looked(look: Look, number: int, path: str) -> Picture:
    try:
        return look(path)
    except RowFault as fault:
        raise RowFault(f"turn {number}, picture {path!r}: {fault.what}", fault.fix, _CODE) from None
