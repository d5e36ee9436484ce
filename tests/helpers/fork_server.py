"""Run many `surefoot` commands in fresh processes without paying for the imports each time.

The server imports everything once, computes nothing, and forks a child per command; so each child is a fresh process
that can be killed for real. A child may be told to send itself SIGKILL at a chosen place:

    {"at": "step", "n": 5}     just before optimizer step 5
    {"at": "log", "n": 5}      after step 5 moved the weights, before its row is logged
    {"at": "write", "n": 7}    before the 7th write of the command: a flush, a rename or a log row
    {"at": "sync", "n": 7}     the same, counted since training began (saving is a series of them)
    {"at": "save", "n": 7}     the same within saves only: before the 7th flush or rename that a save makes
    {"at": "rollout", "n": 7}  before the 7th token of an answer is drawn, counted over all batches of answers
    {"at": "again", "n": 2}    when steps are about to be taken for the 2nd time: after a rollback, from the checkpoint;
                               ranks but the first, when they are about to set up for them
    {"at": "update", "n": 7}   before the 7th micro-batch's forward pass, of all steps

"rank": 1 in addition means that rank alone. "delay": 0.01 lets it go on for so many seconds first, so that the signal
falls anywhere; "number": 15 sends another signal than SIGKILL. "beside": true in addition lets a thread finish every
checkpoint, however small.

A file for its position (`run_position`) tells afterwards where the signal fell.

A kill with a number that is never reached ends the log with `writes: <how many there were>`.

A command may also be run as several ranks, as a launcher would start them: a child for each.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.run_position import SAVE, Journal

_TESTS = str(Path(__file__).parents[1])
_SERVER = f"import sys; sys.path[0] = {_TESTS!r}; from helpers.fork_server import serve; serve()"
_LONGEST = 120  # seconds; a command that hangs is killed (-14), and its test fails instead of the whole suite


class ForkServer:
    """Context manager. `run` returns the exit code; -9 for a child that was killed.

    The server process is shared by all that ask for one in the same environment, and outlives them: starting it costs
    as much as several runs. deepspeed: whether it is imported once as well."""

    _shared: ClassVar[tuple[object, subprocess.Popen[str]] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()  # one request at a time
    _number: ClassVar[int] = 0  # of the last request; its answer begins with it
    seconds: ClassVar[float] = 0.0  # of the processor, that all commands have taken

    def __init__(self, deepspeed: bool = False):
        self._words = ["deepspeed"] if deepspeed else []

    def __enter__(self) -> ForkServer:
        told_by_pytest = "PYTEST_CURRENT_TEST"
        self._environment = {name: value for name, value in os.environ.items() if name != told_by_pytest}
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _process(self) -> subprocess.Popen[str]:
        wanted = (self._words, self._environment)
        shared = ForkServer._shared
        if shared is None or shared[0] != wanted or shared[1].poll() is not None:
            _end_shared()
            command = [sys.executable, "-c", _SERVER, *self._words]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
            )
            ForkServer._shared = shared = wanted, process
        return shared[1]

    def run(
        self,
        arguments: list[str],
        log: Path,
        kill: dict[str, Any] | None = None,
        folder: Path | None = None,
        ranks: int = 1,
        bad: Collection[Any] = (),
        change: str = "",
        where: Path | None = None,
    ) -> int:
        """folder: the working folder of the command, if not this process's own. ranks: as how many the command is run;
        the code is then the first one that is not 0. bad: records whose loss is NaN. change: "module:function", called
        with the rank before the command is. where: a file for the position of a command that is to be killed."""
        folder = folder or Path.cwd()
        request = {"arguments": arguments, "log": str(log), "kill": kill, "folder": str(folder), "ranks": ranks}
        request |= {"bad": list(bad), "change": change, "where": str(where or os.devnull)}
        with ForkServer._lock:
            return self._ask(request)

    def _ask(self, request: dict[str, Any]) -> int:
        process = self._process()
        assert process.stdin
        assert process.stdout
        ForkServer._number += 1
        process.stdin.write(json.dumps({**request, "number": ForkServer._number}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        number, code, seconds = answer.split() if answer.count(" ") == 2 else ("", "", "")
        assert number == str(ForkServer._number), f"the server's answer to request {ForkServer._number}: {answer!r}"
        ForkServer.seconds += float(seconds)
        return int(code)


@atexit.register
def _end_shared() -> None:
    if ForkServer._shared is None:
        return
    _, process = ForkServer._shared
    ForkServer._shared = None
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait(timeout=30)


def serve() -> None:
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import surefoot.runs.run  # noqa: F401
    from helpers.blank_pictures import blank_pictures
    from helpers.no_fsync import unflushed

    if "deepspeed" in sys.argv:
        from surefoot.system.libraries import import_deepspeed

        with open(os.devnull, "w") as silence, redirect_stdout(silence):
            import_deepspeed("cpu")

    gc.collect()
    gc.freeze()  # else each child's collector walks through all libraries, and copies the pages it walks over
    with blank_pictures(), unflushed():
        _answer()


def _answer() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                _be_rank(rank, request["ranks"], port)
                _child(request, rank)
            children.append(child)
        ends = [os.wait4(child, 0) for child in children]
        codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ends]
        seconds = sum(used.ru_utime + used.ru_stime for *_, used in ends)
        print(request["number"], next((code for code in codes if code), 0), f"{seconds:.3f}", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _be_rank(rank: int, world: int, port: int) -> None:
    if world == 1:
        return
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in told.items()}})


def _child(request: dict[str, Any], rank: int) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    signal.alarm(_LONGEST)
    if request["bad"]:
        from helpers.nan_examples import spoil

        spoil(request["bad"], pytest.MonkeyPatch())
    if request["change"]:
        module, _, name = request["change"].partition(":")
        getattr(importlib.import_module(module), name)(rank)
    kill = dict(request["kill"] or {})
    armed = kill and kill.pop("rank", rank) == rank
    counts = _arm(Path(request["where"]), **kill) if armed else None
    from surefoot.commands.main import main

    code = 1
    try:
        main(request["arguments"])
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        if counts:
            print("writes:", counts["write"])
        sys.stdout.flush()
        os._exit(code)


def _arm(
    where: Path, at: str, n: int, beside: bool = False, delay: float = 0.0, number: int = signal.SIGKILL
) -> dict[str, int]:
    """where: a file for the command's position. beside: checkpoints of any size are finished by a thread.
    Returns the counts. Flushes and renames are caught in `os`, where all libraries make them."""
    from surefoot.models import generate
    from surefoot.runs import follow, run
    from surefoot.system import durable
    from surefoot.training import loop, step

    if beside:
        from surefoot.runs import steps

        steps._LARGE = 0
    counts = {"write": 0, "sync": 0, "save": 0, "rollout": 0, "again": 0, "update": 0}
    training = False
    journal = Journal(where)

    def send() -> None:
        journal.signal()
        os.kill(os.getpid(), number)

    def die() -> None:
        if delay:
            timer = threading.Timer(delay, send)
            timer.daemon = True
            timer.start()
        else:
            send()

    def counted_at(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[place] += 1
            if at == place and counts[place] == n:
                die()
            return function(*arguments, **keywords)

        return call

    def counted(function: Callable[..., Any], save: bool = True) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            counts["write"] += 1
            counts["sync"] += training
            counts["save"] += save and journal.part == SAVE
            here = at in ("write", "sync") or (at == "save" and save and journal.part == SAVE)
            if here and counts[at] == n:
                die()
            return function(*arguments, **keywords)

        return call

    train_step = loop.train_step

    def armed_step(*arguments: Any, step: int, **keywords: Any) -> Any:
        nonlocal training
        training = True
        if at == "step" and step == n:
            die()
        report = train_step(*arguments, step=step, **keywords)
        if at == "log" and step == n:
            die()
        return report

    loop.train_step = armed_step
    journal.installed()
    run.note_rollbacks = counted_at("again", run.note_rollbacks)
    follow.load_and_check = counted_at("again", follow.load_and_check)
    generate.next_logits = counted_at("rollout", generate.next_logits)
    step.add_gradient = counted_at("update", step.add_gradient)
    os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
    durable.append_line = counted(durable.append_line, save=False)
    return counts
