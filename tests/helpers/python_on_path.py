"""A `python` on PATH for scripts under test: every call is a fork of a process that has loaded torch and surefoot.

    with served_python(tmp_path / "python") as served:
        subprocess.run([served.program, "-c", code])  # all tests have the fixtures `served` and `forked_python`
        served.write_scripts(folder)  # surefoot's scripts, with this python in their first line
        subprocess.run(["./finetune.py", "--help"], env=served.environment)

A call has the caller's arguments, folder, environment, streams and exit code; SIGINT, SIGTERM and the signal that ends
it are passed on. `surefoot` and `accelerate` are served as well. Each call saves the seconds of these imports. Unlike a
new Python, modules are loaded already, and the called process is not the one that computes.
"""

import json
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from helpers.forked_command import begin, forkserver
from surefoot.interop.compat import write_scripts

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
talk = socket.socket(socket.AF_UNIX)
talk.connect({place!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(talk, [len(request).to_bytes(8, "big")], [0, 1, 2])
talk.sendall(request)
answers = talk.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(answers.readline() or 1)  # nothing: the tests are over
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_PROGRAMS = {"surefoot": "surefoot.commands.main", "accelerate": "accelerate.commands.accelerate_cli"}


@dataclass(frozen=True)
class Served:
    """The served Python.

    program: path of `python`.
    environment: environment variables with it and the other programs first on PATH.
    """

    program: Path
    environment: dict[str, str]

    def write_scripts(self, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(self.program))
            write_scripts(folder, overwrite=False)


@contextmanager
def served_python(folder: Path) -> Iterator[Served]:
    """Yield the served Python. folder: created."""
    folder.mkdir()
    program, place = folder / "python", str(folder / "socket")
    texts = {"python": _CLIENT.format(python=sys.executable, place=place)}
    for name, module in _PROGRAMS.items():
        texts[name] = f"#!{program}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        threading.Thread(target=_serve, args=(listening, str(program)), daemon=True).start()
        path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        yield Served(program, {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"})
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket, program: str) -> None:
    while True:
        try:
            talk, _ = listening.accept()
        except OSError:  # shut down
            return
        with talk:
            forkserver().Process(target=_answer, args=(talk, program), daemon=True).start()


def _answer(talk: socket.socket, program: str) -> None:
    """Handle one call: a child runs it, and its exit status is returned to the caller."""
    head, handles, _, _ = socket.recv_fds(talk, 8, 3)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += talk.recv(1 << 16)
    words, folder, environment = json.loads(request)
    child = os.fork()
    if child == 0:
        for place, handle in enumerate(handles):
            os.dup2(handle, place)
            os.close(handle)
        os.chdir(folder)
        begin(environment)
        sys.executable = program
        os._exit(_outcome(words))
    for handle in handles:
        os.close(handle)
    with suppress(OSError):  # the caller may have been killed
        talk.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        talk.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _outcome(words: list[str]) -> int:
    try:
        _run(words)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _run(words: list[str]) -> None:
    """Run `python -c CODE …`, `python -m MODULE …` or `python SCRIPT …`."""
    told = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    ours = str(Path(__file__).parents[1])
    sys.path[:] = [*told, *(entry for entry in sys.path if entry != ours)]
    what, *rest = [word for word in words if word != "-u"]
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
