"""A board that serves while a block runs, and ends with it however that ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.commands.board.server import Board


@contextmanager
def serving(root: Path, port: int = 0, *, token: str = "", beat: float = 15.0) -> Iterator[Board]:
    """token: instead of a new one. beat: seconds of silence between heartbeats."""
    with Board(root, port, look=0.05, beat=beat) as board:
        board.token = token or board.token
        thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()
