"""A `surefoot` on PATH for scripts under test: every call is a fresh child of the fork server, which has torch loaded.

    with served_surefoot(tmp_path / "served") as environment:
        subprocess.run(["bash", "script.sh"], env=environment)

What the commands say goes to the script's stdout, and the exit code is the command's own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.fork_server import ForkServer

_CLIENT = """#!{python} -IS
import json, os, socket, sys
talk = socket.socket(socket.AF_UNIX)
talk.connect({place!r})
talk.sendall(json.dumps([sys.argv[1:], os.getcwd()]).encode() + b"\\n")
code, said = json.loads(talk.makefile().readline())
print(said, end="")
sys.exit(code)
"""


@contextmanager
def served_surefoot(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which `surefoot` is the served one. folder: made, for the client and its logs."""
    folder.mkdir()
    place = str(folder / "socket")
    client = folder / "surefoot"
    client.write_text(_CLIENT.format(python=sys.executable, place=place))
    client.chmod(0o755)
    with ForkServer() as server, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        threading.Thread(target=_serve, args=(listening, server, folder), daemon=True).start()
        yield {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket, server: ForkServer, folder: Path) -> None:
    number = 0
    while True:
        try:
            talk, _ = listening.accept()
        except OSError:  # shut down
            return
        number += 1
        with talk:
            arguments, where = json.loads(talk.makefile().readline())
            log = folder / f"{number}.log"
            code = server.run(arguments, log, folder=Path(where))
            answer = [code, log.read_text(encoding="utf-8") if log.exists() else ""]
            talk.sendall(json.dumps(answer).encode() + b"\n")
