"""Finish checkpoints while the steps go on: one thread, one checkpoint at a time, and no error is lost.

    with background_writer(over=16 << 20) as writer:
        with begin_checkpoint(...) as begun:        # the files are written, into the disk's cache
            write_model(begun.folder)
        folder = writer.take(begun.finish, begun.size, note)    # hashed, flushed and committed by the thread
        ...
        for note, folder in writer.finished():      # raises what a checkpoint ran into
            ...

To hash the files, to wait until the disk has them and to delete older ones needs no weights, which go on changing. The
snapshot is the page cache: to write into it takes four to five times as long as a copy in memory, but its pages are the
system's to give back once they are on the disk, and a run has no second set of weights and moments. A checkpoint that
is killed in between was never committed, and the one before it stands.

Trade-off: the thread takes a processor from the steps for as long as it hashes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Finish = Callable[[], Path]
_THREAD = "checkpoint"


def is_writing() -> bool:
    """Whether a thread of this process is finishing a checkpoint at this moment."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


class BackgroundWriter:
    """Finishes checkpoints in a thread, one at a time.

    over: bytes of a checkpoint from which on a thread finishes it; a smaller one is finished at once, in less time than
        a thread would take to start and report.
    """

    def __init__(self, over: int):
        self._over = over
        self._thread: threading.Thread | None = None
        self._note: Any = None
        self._found: Path | BaseException | None = None

    def take(self, finish: Finish, size: int, note: Any = None) -> Path | None:
        """Finish a checkpoint of so many bytes. Returns its folder where that is done, None where a thread is at it.
        No other may be on its way: call `finished` first.

        note: given back with its folder.
        """
        assert self._thread is None, "one checkpoint at a time"
        if size < self._over:
            return finish()
        self._note = note
        # Not a daemon: a program that ends while it writes waits for it.
        self._thread = threading.Thread(target=self._run, args=(finish,), name=_THREAD)
        self._thread.start()
        return None

    def finished(self, wait: bool = False) -> list[tuple[Any, Path]]:
        """(note, folder) of a checkpoint that became whole since the last call.

        wait: for the one that is on its way.

        Raises what stopped it.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return []
        self._thread.join()
        self._thread, found = None, self._found
        if isinstance(found, BaseException):
            raise found
        assert found is not None
        return [(self._note, found)]

    def _run(self, finish: Finish) -> None:
        try:
            self._found = finish()
        except BaseException as error:
            self._found = error


@contextmanager
def background_writer(over: int) -> Iterator[BackgroundWriter]:
    """Waits, at its end, for what is on its way. What that ran into is raised, unless another error is on its way."""
    writer = BackgroundWriter(over)
    try:
        yield writer
    except BaseException as error:
        try:
            writer.finished(wait=True)
        except Exception as second:
            error.add_note(f"the checkpoint that was on its way failed as well: {second}")
        raise
    writer.finished(wait=True)
