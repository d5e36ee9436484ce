"""Finish checkpoints in a background thread while training continues: one at a time, and no error is lost.

    with background_writer(over=16 << 20) as writer:
        with begin_checkpoint(...) as pending:      # writes the files, into the page cache
            write_model(pending.folder)
        folder = writer.take(pending.finish, pending.size, note)    # hashed, flushed and committed by the thread
        ...
        for note, folder in writer.finished():      # raises the error of a failed checkpoint
            ...

Hashing the files, flushing them and deleting older checkpoints need no access to the weights, which keep changing. The
page cache serves as the snapshot: writing to it takes four to five times as long as a copy in memory, but the system
frees its pages once they are on disk, and the run needs no second copy of weights and moments. A checkpoint that is
interrupted in between was never committed, and the one before it remains valid.

Trade-off: while it hashes, the thread takes a CPU core from training.
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
    """Whether a thread of this process is currently finishing a checkpoint."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


class BackgroundWriter:
    """Finishes checkpoints in a thread, one at a time.

    over: size in bytes from which on a thread is used; a smaller checkpoint is finished immediately, which takes less
        time than a thread.
    """

    def __init__(self, over: int):
        self._over = over
        self._thread: threading.Thread | None = None
        self._note: Any = None
        self._found: Path | BaseException | None = None

    def take(self, finish: Finish, size: int, note: Any = None) -> Path | None:
        """Finish a checkpoint; return its folder if done, None if a thread is finishing it. No other may be pending:
        call `finished` first.

        size: bytes of its files.
        note: returned by `finished` along with the folder.
        """
        assert self._thread is None, "one checkpoint at a time"
        if size < self._over:
            return finish()
        self._note = note
        # Not a daemon, so that the interpreter waits for it on exit.
        self._thread = threading.Thread(target=self._run, args=(finish,), name=_THREAD)
        self._thread.start()
        return None

    def finished(self, wait: bool = False) -> list[tuple[Any, Path]]:
        """Return (note, folder) of a checkpoint that was finished since the last call.

        wait: whether to wait for a pending one.

        Raises the error of a checkpoint that failed.
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
    """Context of a writer; waits at its end for a pending checkpoint. Its error is raised, or added as a note to an
    error of the block."""
    writer = BackgroundWriter(over)
    try:
        yield writer
    except BaseException as error:
        try:
            writer.finished(wait=True)
        except Exception as second:
            error.add_note(f"the pending checkpoint failed as well: {second}")
        raise
    writer.finished(wait=True)
