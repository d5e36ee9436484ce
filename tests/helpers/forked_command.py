"""Run a `surefoot` command and the ranks that it starts as forks of a process that has imported everything.

    with Forked(["train", "run.yaml"], log, environment) as command:
        command.pid, command.poll(), command.kill(), command.wait(seconds)

Launcher, signals, pipes and ranks are the real ones, in processes that can be killed and stopped. A fork saves three
imports of torch, some 15 seconds of a core for two ranks. tests/distributed also runs commands as users type them.
"""

import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_PRELOADED = ["helpers.preloaded_imports"]
_RANK_FILE = "{log}.{rank}.pid"


def forkserver() -> Any:
    """Return the multiprocessing context whose processes are forked from one server in this session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    here = str(Path(__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:  # before 3.14 the server is not told our sys.path, and preloads nothing
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
        multiprocessing.forkserver.ensure_running()
    return context


class Forked:
    """A running command, with the methods of subprocess.Popen that tests use.

    words: arguments after `surefoot`.
    environment: the complete environment; a sitecustomize.py on its PYTHONPATH is run in each rank, as Python would.
    told: seconds that the launcher gives other ranks to end after one reports an error; None: its own, too few if
        the machine is busy.
    """

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str], told: float | None = None):
        self._log = log
        arguments = (list(words), log, dict(environment), told)
        self._process = forkserver().Process(target=_command, args=arguments, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked command", seconds)
        return code

    def kill(self) -> None:
        self._process.kill()

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the started ranks, by rank."""
        found = self._log.parent.glob(_RANK_FILE.format(log=self._log.name, rank="*"))
        return {int(path.suffixes[-2][1:]): int(path.read_text()) for path in found}


def _command(words: list[str], log: Path, environment: dict[str, str], told: float | None) -> None:
    """Run in the child that stands for the user's command."""
    from helpers.blank_pictures import blank_pictures
    from helpers.no_fsync import unflushed
    from helpers.unlaid_tables import unlaid_tables
    from surefoot.commands import launching

    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    begin(environment)
    kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    launching.subprocess = SimpleNamespace(Popen=_rank_of(words, log), **kept)  # type: ignore[attr-defined]
    if told is not None:
        launching._AFTER_ERROR = told
    with blank_pictures(), unlaid_tables(), unflushed():
        os._exit(_main(words))


def _rank_of(words: list[str], log: Path) -> type[subprocess.Popen[bytes]]:
    class Rank(subprocess.Popen[bytes]):
        """Forks a rank where the launcher would execute a program."""

        def _execute_child(self, *given: Any) -> None:
            told = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
            self.pid = os.fork()
            if self.pid == 0:
                _be_rank(words, told, log)
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(told[name] for name in pipes))  # type: ignore[attr-defined]

    return Rank


def _be_rank(words: list[str], told: Mapping[str, Any], log: Path) -> None:
    """Run as a rank; never returns."""
    code = 1
    try:
        os.setpgid(0, told["process_group"])
        for handle, place in ((told["p2cread"], 0), (told["c2pwrite"], 1), (told["errwrite"], 2)):
            if handle != -1:
                os.dup2(handle, place)
        begin(told["env"])
        for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            if (path := Path(folder) / "sitecustomize.py").is_file():
                runpy.run_path(str(path))
        pid_file = log.with_name(_RANK_FILE.format(log=log.name, rank=os.environ["RANK"]))
        pid_file.write_text(str(os.getpid()))
        code = _main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def begin(environment: Mapping[str, str]) -> None:
    """Give a child its environment, and new streams on handles 0 to 2: a file's stream cannot handle a pipe."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _main(words: list[str]) -> int:
    """Run `surefoot *words` and return the exit code."""
    from surefoot.commands.main import main

    try:
        main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
