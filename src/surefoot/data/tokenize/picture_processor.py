"""Image processing for vision models: how many tokens a picture takes, and its pixels.

transformers' image processor of the model decides both, with its Pillow/NumPy backend, so that pixels are the same on
every machine and no other package is needed. When records are tokenized, a picture is opened once, decoded to check
that it is intact, and hashed; its pixels are computed when a batch is built, from the same bytes. Pictures are local
files; nothing is downloaded.

A record names its pictures where they appear (parts of a message's content), or lists them in `images` and marks their
positions in the texts with `<image>`, one mark per picture, in order.

    processor = read_processor(folder, encoder)
    picture = processor.look("cat.png", Path("data"))
    named_tensors = processor.pixels([picture])
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
from surefoot.data.formats.conversation import IMAGE, MARK, Conversation, Picture, RowFault, Turn
from surefoot.data.tokenize.segments import Segment, TextEncoder
from surefoot.families.files import PROCESSOR_FILES, read_json_if_there
from surefoot.families.pictures import PictureRow, picture_row
from surefoot.system import hardware
from surefoot.system.errors import EnvironmentFault, Fault, InputError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_PIXELS = 1 << 26  # per file: 67 million, 200 MB as RGB; more is treated as an attack or a mistake
_MOST_BYTES = 1 << 28
_ORIENTATION = 0x0112  # EXIF tag; values from 5 swap width and height
_MISSING = re.compile(r"(?:Missing optional dependencies:|requires the) (\w+)")  # transformers' words
Look = Callable[[str], Picture]
_CODE = "SF-DATA-PICTURE"
_FETCHED = ("http://", "https://", "data:", "s3://", "gs://", "hf://")


def read_processor(folder: str, encoder: TextEncoder, max_pixels: int | None = None) -> PictureProcessor | None:
    """Load the image processing of the model in `folder`; None if it is a text model or of an unknown vision family.

    max_pixels: limit per picture, instead of the processor's own.

    Raises InputError if max_pixels is set but the model cannot use pictures.
    """
    row = picture_row(Path(folder)) if folder else None
    if row is not None and set(encoder.control.values()).issuperset(row.tokens):
        return PictureProcessor(Path(folder), row, encoder, max_pixels)
    if max_pixels is not None:
        raise _no_pictures()
    return None


def check_max_pixels(folder: Path, max_pixels: int) -> None:
    """Raise InputError unless the model in `folder` can limit its pictures to this size."""
    row = picture_row(folder)
    if row is None:
        raise _no_pictures()
    _processor(folder, row, max_pixels)


def _no_pictures() -> InputError:
    what = "limits pictures, but surefoot cannot train this model on pictures"
    return InputError(Fault("data.max_pixels", what, "remove it", code="SF-CONFIG-CONFLICT"))


def _processor(folder: Path, row: PictureRow, max_pixels: int | None) -> Any:
    """transformers' image processor, with the limit."""
    from transformers import AutoImageProcessor

    try:
        found: Any = AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:
        if missing := _MISSING.search(str(error)):
            what = f"transformers reads its pictures with the package {missing[1].lower()}, which is not installed"
            fix = "pip install 'surefoot[vision]'"
            raise EnvironmentFault(Fault(str(folder), what, fix, code="SF-PACKAGE")) from error
        what = f"the image processor cannot be loaded: {' '.join(str(error).split())[:200]}"
        fix = "use the model's original files"
        raise InputError(Fault(str(folder), what, fix, code="SF-MODEL-KIND")) from error
    if max_pixels is not None:
        if row.limit is None:
            what = "limits pictures, but this model uses fixed sizes"
            raise InputError(Fault("data.max_pixels", what, "remove it", code="SF-CONFIG-CONFLICT"))
        if least := row.limit(found, max_pixels):
            what = f"is {max_pixels:,}, below the minimum of the model's processor, {least:,}"
            raise InputError(Fault("data.max_pixels", what, "raise it", code="SF-CONFIG-CONFLICT"))
    return found


class PictureProcessor:
    """Image processing of one model; created by `read_processor`.

    token_id: id of the token that stands for one feature of a picture.
    ids: ids of all control tokens that a picture is written with.
    by_row: as in `PictureRow`.
    """

    def __init__(self, folder: Path, row: PictureRow, encoder: TextEncoder, max_pixels: int | None):
        self._folder, self._row, self._max_pixels = folder, row, max_pixels
        number = {text: own for own, text in encoder.control.items()}
        own = [token for token in (*row.tokens, *row.others) if token in number]
        self.token_id = number[row.token]
        self.ids = tuple(number[token] for token in own)
        self.by_row = row.by_row
        self._written = re.compile("|".join(map(re.escape, own)))
        self._marks = re.compile(f"{re.escape(row.mark)}|{IMAGE}")

    @cached_property
    def identity(self) -> str:
        """Everything that decides tokens and pixels besides the picture files."""
        import PIL

        files = {path.name: path.read_text() for name in PROCESSOR_FILES if (path := self._folder / name).is_file()}
        versions = [hardware.versions().get("transformers"), PIL.__version__]
        return json.dumps([self._row.tokens, self._max_pixels, versions, files], sort_keys=True)

    @cached_property
    def _processor(self) -> Any:
        """transformers' image processor, loaded with the first picture: text needs none."""
        return _processor(self._folder, self._row, self._max_pixels)

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """Settings of the processor that combines pictures and text."""
        return read_json_if_there(self._folder / "processor_config.json")

    def look(self, path: str, folder: Path | None) -> Picture:
        """Open and check a picture. Raises RowFault for a file that is missing, damaged, too large, or not a picture.

        folder: base folder of relative paths; a file that is not there may lie below the working directory.
        """
        if path.startswith(_FETCHED):
            raise RowFault("is a URL, and surefoot downloads no pictures", "download it, and use the file's path")
        if folder is None and not os.path.isabs(path):
            raise RowFault("has no base folder, because its records are streamed", "download the data set")
        place = Path(folder or "", named := path.removeprefix("file://"))
        if not place.is_file() and Path(named).is_file():
            place = Path(named)
        data, facts = _read(place)
        with _opened(data) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION, 1) >= 5:
                width, height = height, width
            image.draft("RGB", (image.width // 8, image.height // 8))  # decode a JPEG at 1/8 size: enough to check it
            # Decoding all of it finds truncated files, which reading the header alone does not.
            image.load()
        digest = hashlib.sha256(data).hexdigest()
        return Picture(str(place), digest, width, height, self.tokens(width, height), facts.st_size, facts.st_mtime_ns)

    def tokens(self, width: int, height: int) -> int:
        """Return the number of feature tokens of a picture of this size. Raises RowFault if the model cannot use it."""
        return self._text(width, height).count(self._row.token)

    def _text(self, width: int, height: int) -> str:
        try:
            return self._row.write(self._processor, self._settings, height, width)
        except ValueError as error:
            raise RowFault(f"the model cannot use {width} x {height} pixels: {error}") from None
        except (KeyError, TypeError) as error:
            what = f"does not say how many tokens a picture takes ({error})"
            where = str(self._folder / "processor_config.json")
            raise InputError(Fault(where, what, "use the model's original files", code="SF-MODEL-KIND")) from None

    def spread(self, segments: Sequence[Segment], pictures: Sequence[Picture]) -> Sequence[Segment]:
        """Insert each picture's tokens at its position: the template's mark, or `IMAGE` in the data. The mark's
        characters in the data are plain text."""
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
        """Mark the tokens of pictures, from the first control token of each to the last: [T] bool."""
        places = np.flatnonzero(np.isin(ids, self.ids))
        found = np.zeros(len(ids), dtype=bool)
        for picture in pictures:
            count = len(self._written.findall(self._text(picture.width, picture.height)))
            own, places = places[:count], places[count:]
            found[own[0] : own[-1] + 1] = True
        return found

    def with_facts(self, text: str, pictures: Iterator[Picture]) -> str:
        """Replace the tokens of each picture by its name and size, for display. Advances `pictures` by the pictures
        that the text contains."""
        shown, *rest = text.split(self._row.token)
        while rest:
            picture = next(pictures)
            facts = f"{picture.width} x {picture.height} pixels, {picture.tokens:,} tokens"
            shown += f"[{Path(picture.path).name}: {facts}]{rest[picture.tokens - 1]}"
            rest = rest[picture.tokens :]
        return shown

    def pixels(self, pictures: Sequence[Picture]) -> Pixels:
        """Return the tensors for the model's forward of these pictures, in order. Raises InputError if a file changed
        since its record was read."""
        if not pictures:
            return ()
        images = [upright(picture) for picture in pictures]
        made = self._processor(images=images, return_tensors="pt", **self._row.calls(self._settings))
        # Llama 4's are bf16, which weights in fp32 do not take; where they are bf16, autocast makes these so again.
        return tuple((name, _in_fp32(made[name])) for name in sorted(self._row.inputs))


def _in_fp32(values: Any) -> Any:
    return values.float() if values.is_floating_point() else values


def is_same(picture: Picture) -> bool:
    """Whether the file still has the size and modification time that it had when it was read."""
    try:
        facts = os.stat(picture.path)
    except OSError:
        return False
    return (facts.st_size, facts.st_mtime_ns) == (picture.size, picture.changed)


def _read(place: Path) -> tuple[bytes, os.stat_result]:
    try:
        facts = place.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise RowFault("is not a regular file", "name the picture's file")
        if facts.st_size > _MOST_BYTES:
            raise RowFault(f"has {facts.st_size:,} bytes, more than {_MOST_BYTES:,}", "make it smaller")
        return place.read_bytes(), facts
    except FileNotFoundError:
        raise RowFault(f"does not exist ({place})", "restore it, or remove the row") from None
    except (OSError, ValueError) as error:
        raise RowFault(f"cannot be read: {error}", "restore it, or remove the row") from None


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Yield a PIL image, after checking its size. Exceptions of Pillow inside the block become RowFaults."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about its own limit; ours is lower
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > _MOST_PIXELS:
                    what = f"has {width:,} x {height:,} pixels, more than {_MOST_PIXELS:,}"
                    raise RowFault(what, "make it smaller: the model sees far fewer")
                yield image
    except UnidentifiedImageError:
        raise RowFault(
            f"is not a picture of a known format ({', '.join(_FORMATS)})", "save it as PNG or JPEG"
        ) from None
    except Image.DecompressionBombError:
        raise RowFault(f"has more than {_MOST_PIXELS:,} pixels", "make it smaller") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise RowFault(f"is damaged: {error}", "restore it, or remove the row") from None


def upright(picture: Picture) -> Any:
    """Return the picture as an RGB PIL image, rotated by its EXIF orientation. Raises InputError if the file changed
    since its record was read."""
    from PIL import ImageOps

    try:
        data, _ = _read(Path(picture.path))
        if hashlib.sha256(data).hexdigest() != picture.sha256:
            raise RowFault("has changed since its record was read (SHA-256 differs)", "restore it")
        with _opened(data) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except RowFault as fault:
        raise InputError(Fault(picture.path, fault.what, fault.fix, code=_CODE)) from None


def refuse_pictures(conversation: Conversation, why: str, fix: str) -> Conversation:
    """Return the conversation unchanged. Raises RowFault if it has a picture."""
    turns = conversation.turns
    if any(turn.images for turn in turns) or (conversation.images and any(MARK in turn.text for turn in turns)):
        raise RowFault(f"has a picture, but {why}", fix, _CODE)
    return conversation


def with_pictures(conversation: Conversation, look: Look) -> Conversation:
    """Attach the conversation's pictures, and put `IMAGE` at the position of each in its texts.

    look: open the picture at a path; raises RowFault if it cannot be used.
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
        what = f"lists {len(conversation.images)} pictures, but its texts have no place for {len(listed)} of them"
        raise RowFault(what, f"write {MARK} at the position of each", _CODE)
    return replace(conversation, turns=tuple(turns), pictures=tuple(_looked(look, *one) for one in paths))


def _in_turn(turn: Turn, listed: list[str], number: int) -> tuple[Turn, list[str]]:
    """Put `IMAGE` at each picture's position in the turn, and return the pictures' paths.

    listed: pictures of the record without a position yet; those used are removed.

    In a message that consists of parts, `<image>` is plain text: its pictures are parts.
    """
    own = list(turn.images)
    if not own and listed:
        turn = replace(turn, content=turn.content.replace(MARK, IMAGE), context=turn.context.replace(MARK, IMAGE))
    places = turn.text.count(IMAGE)
    if own and len(own) != places:
        raise RowFault(f"turn {number} contains U+FDD0, which is reserved for pictures", "remove the character", _CODE)
    if places and turn.role not in ("user", "tool", "system"):
        raise RowFault(f"turn {number} is an answer with a picture", "answers can only contain text", _CODE)
    paths = []
    for path in own or [""] * places:
        if not path and not listed:
            what = f"turn {number} has a place for a picture, but 'images' has no picture left for it"
            raise RowFault(what, "list a path for each", _CODE)
        paths.append(path or listed.pop(0))
    return turn, paths


def _looked(look: Look, number: int, path: str) -> Picture:
    try:
        return look(path)
    except RowFault as fault:
        raise RowFault(f"turn {number}, picture {path!r}: {fault.what}", fault.fix, _CODE) from None
