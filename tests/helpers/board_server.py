"""Serve a board while a block runs; it ends with the block, also on an error."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.commands.board.server import Board


@contextmanager
def serving(root: Path, port: int = 0, *, token: str = "", beat: float = 15.0) -> Iterator[Board]:
    """Yield the server of a board. token: None makes a new one. beat: seconds between heartbeats."""
    with Board(root, port, look=0.05, beat=beat) as board:
        board.token = token or board.token
        thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()
