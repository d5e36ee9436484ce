"""Run many `surefoot` commands in fresh processes without the import time of each.

The server imports everything once, computes nothing, and forks a child per command, so each child is a fresh process
that can really be killed. A child can be told to send itself SIGKILL at a chosen place:

    {"at": "step", "n": 5}     just before optimizer step 5
    {"at": "log", "n": 5}      after step 5 has changed the weights, before its row is logged
    {"at": "write", "n": 7}    before the command's 7th write: a flush, a rename or a log row
    {"at": "sync", "n": 7}     the same, counted from the start of training (a save consists of several)
    {"at": "save", "n": 7}     the same, counted within saves only: before their 7th flush or rename
    {"at": "rollout", "n": 7}  before the 7th token of answers is drawn, counted over all batches
    {"at": "reward", "n": 7}   before the rewards of stage grpo are requested for the 7th time
    {"at": "turn", "n": 7}     before the policy generates a turn of multi-turn answers for the 7th time
    {"at": "tool", "n": 7}     before the 7th call of an environment, in its thread, while other calls continue
    {"at": "again", "n": 2}    when steps are about to be taken for the 2nd time, after a rollback; on ranks other than
                               the first, when they are about to set up for them
    {"at": "update", "n": 7}   before the forward pass of the 7th micro-batch of all steps

Further keys: "rank": 1, only that rank; "delay": 0.01, continue for so many seconds first, so that the signal falls
anywhere; "number": 15, another signal than SIGKILL; "beside": true, a thread finishes every checkpoint, however small.

A file for the position (`run_position`) shows afterwards where the signal fell. If "n" is never reached, the log ends
with `writes: <how many there were>`.

A command can also run as several ranks, one child each, as a launcher would start them.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.forked_command import begin, forkserver
from helpers.run_position import SAVE, Journal

_LONGEST = 120  # seconds; a command that hangs is killed (-14), and its test fails instead of the whole suite


class ForkServer:
    """Context manager. `run` returns the exit code, -9 for a killed child.

    The server, a fork of `helpers.preloaded_imports`, is shared by all users and outlives them. Each child has its
    caller's current environment; what libraries read from it at import keeps its earlier value.
    """

    _shared: ClassVar[tuple[Any, Connection] | None] = None  # its process, and the connection to it
    _lock: ClassVar[threading.Lock] = threading.Lock()  # one request at a time
    _number: ClassVar[int] = 0  # of the last request; its answer begins with it
    seconds: ClassVar[float] = 0.0  # of the processor, that all commands have taken

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _connection(self) -> Connection:
        shared = ForkServer._shared
        if shared is None or not shared[0].is_alive():
            context = forkserver()
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            ForkServer._shared = shared = process, ours
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
        """Run a command and return its exit code.

        folder: working folder, if not this process's.
        ranks: number of ranks; the exit code is then the first non-zero one.
        bad: records with a NaN loss.
        change: "module:function", called with the rank before the command.
        where: file for the position of a command that is to be killed.
        """
        folder = folder or Path.cwd()
        told_by_pytest = "PYTEST_CURRENT_TEST"
        environment = {name: value for name, value in os.environ.items() if name != told_by_pytest}
        request = {
            "arguments": arguments,
            "log": str(log),
            "kill": kill,
            "folder": folder or Path.cwd(),
            "ranks": ranks,
        }
        request |= {"bad": list(bad), "change": change, "where": where or os.devnull, "environment": environment}
        with ForkServer._lock:
            return self._ask(request)

    def _ask(self, request: dict[str, Any]) -> int:
        connection = self._connection()
        ForkServer._number += 1
        connection.send({**request, "number": ForkServer._number})
        number, code, seconds = connection.recv()
        assert number == ForkServer._number, f"the server's answer to request {ForkServer._number}: {number}"
        ForkServer.seconds += seconds
        return code


@atexit.register
def _end_shared() -> None:
    if ForkServer._shared is None:
        return
    process, connection = ForkServer._shared
    ForkServer._shared = None
    connection.close()
    process.join(timeout=30)


def _serve(connection: Connection) -> None:
    from helpers.blank_pictures import blank_pictures
    from helpers.no_fsync import unflushed
    from helpers.unlaid_tables import unlaid_tables

    with blank_pictures(), unlaid_tables(), unflushed():
        while True:
            try:
                request = connection.recv()
            except EOFError:  # the tests are over
                return
            connection.send(_answer(request, connection))


def _answer(request: dict[str, Any], connection: Connection) -> tuple[int, int, float]:
    """Return (number of the request, first non-zero exit code, processor seconds)."""
    port = _free_port()
    children = []
    for rank in range(request["ranks"]):
        child = os.fork()
        if child == 0:
            connection.close()
            _child(request, rank, port)
        children.append(child)
    ends = [os.wait4(child, 0) for child in children]
    codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ends]
    seconds = sum(used.ru_utime + used.ru_stime for *_, used in ends)
    return request["number"], next((code for code in codes if code), 0), seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _be_rank(rank: int, world: int, port: int) -> None:
    if world == 1:
        return
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in told.items()}})


def _child(request: dict[str, Any], rank: int, port: int) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, handle in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(handle, number)
    begin(request["environment"])
    _be_rank(rank, request["ranks"], port)
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
    """Prepare the kill, and return the counts. Flushes and renames are intercepted in `os`, which all libraries use.

    where: file for the position.
    beside: whether a thread finishes checkpoints of any size.
    """
    from surefoot.methods.environments.multi_turn import MultiTurn
    from surefoot.methods.grpo import answering
    from surefoot.models import generate
    from surefoot.runs import follow, run
    from surefoot.system import durable
    from surefoot.training import loop, step

    if beside:
        from surefoot.runs import steps

        steps._LARGE = 0
    places = "write", "sync", "save", "rollout", "reward", "turn", "tool", "again", "update"
    counts = dict.fromkeys(places, 0)
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
    answering.grade_all = counted_at("reward", answering.grade_all)
    MultiTurn._turn = counted_at("turn", MultiTurn._turn)
    MultiTurn._say = counted_at("tool", MultiTurn._say)
    step.add_gradient = counted_at("update", step.add_gradient)
    os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
    durable.append_lines = counted(durable.append_lines, save=False)
    return counts
