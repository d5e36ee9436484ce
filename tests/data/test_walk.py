"""The way of a record from its file to a batch: few files, few frames, in the order in which docs name them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from helpers.prepared import prepared
from surefoot import data
from surefoot.data.batching.loader import Layout, example_batches
from surefoot.data.batching.order import step_examples
from surefoot.data.formats import reader

ROOM = Path(data.__file__).parent
MOST_FRAMES = 8  # of data/ from `prepare_data` to the reader of a format, both counted
# In the order in which a record enters them. What is not here is no part of the way, and a new file has to say why.
FILES = (
    "prepare.py",
    "tokenize/segments.py",
    "tokenize/picture_processor.py",
    "sources/resolve.py",
    "sources/records.py",
    "tokenize/tokenize_file.py",
    "chat/templates.py",
    "chat/jinja_template.py",
    "chat/render.py",
    "formats/conversation.py",
    "chat/sandbox.py",
    "chat/turn_by_turn.py",
    "tokenize/cache.py",
    "formats/reader.py",
    "formats/supervised.py",
    "sources/text.py",
    "formats/registry.py",
    "tokenize/encode.py",
    "tokenize/dataset.py",
    "checks.py",
    "audit.py",
    "batching/order.py",
    "batching/loader.py",
    "batching/batch.py",
)


class Walk:
    """The files of data/ that are entered, in order, and the frames of data/ that stand when `read_alpaca` begins."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.frames: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := _of_room(frame)) is None:
            return
        if file not in self.files:
            self.files.append(file)
        if frame.f_code.co_name == "read_alpaca" and not self.frames:
            above: FrameType | None = frame
            while above is not None:
                name = above.f_code.co_name
                self.frames += [name] if _of_room(above) and name != "<listcomp>" else []  # Python 3.12 has none
                above = above.f_back


def _of_room(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOM).as_posix() if path.is_relative_to(ROOM) else None


@pytest.fixture
def walk(llama3, tmp_path) -> Callable[[], Walk]:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"instruction": "Add 1 and 1!", "input": "", "output": "It is 2."}) + "\n")

    def call() -> Walk:
        seen = Walk()
        sys.setprofile(seen)
        try:
            found = prepared(file, llama3, tmp_path / "cache", template_asked=False)
            _, places = step_examples(0, 0, found.mixture, 1)
            (batch,) = example_batches(found.train, places, Layout(pad_id=0))
        finally:
            sys.setprofile(None)
        assert batch.weight > 0
        return seen

    return call


def test_the_way_of_a_record(walk):
    seen = walk()
    assert tuple(seen.files) == FILES
    assert len(seen.frames) <= MOST_FRAMES, seen.frames


def test_twin_with_a_function_that_passes_on(walk, monkeypatch):
    direct = reader.conversations_of
    source = "def conversations_of(row, read):\n    return direct(row, read)\n"
    names = {"direct": direct}
    exec(compile(source, reader.__file__, "exec"), names)
    monkeypatch.setattr(reader, "conversations_of", names["conversations_of"])
    assert len(walk().frames) > MOST_FRAMES


def test_twin_that_goes_through_another_file(walk, monkeypatch):
    direct = reader.conversations_of
    names = {"direct": direct}
    source = "def conversations_of(row, read):\n    return direct(row, read)\n"
    exec(compile(source, str(ROOM / "formats/more.py"), "exec"), names)
    monkeypatch.setattr(reader, "conversations_of", names["conversations_of"])
    assert "formats/more.py" in walk().files
