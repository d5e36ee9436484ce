"""Functions run on two ranks for real: two processes, gloo on the CPU, one shared file to meet at.

    results = on_two_ranks(case, *arguments)   # case(ranks, *arguments) of each rank

The processes are forked from a server that has imported everything once and computed nothing. They stay for the next
call, which saves what libraries compute when they are used first (for DeepSpeed most of a call's time); after a call
that failed on a rank, the next one gets new processes. `case` is a function of a module that is importable from
`tests`; what it returns travels back by pickle, so plain values and numpy arrays only.
"""

import atexit
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.forked_command import forkserver

WORLD = 2
_LONGEST = 60  # seconds; a pair that hangs is killed, and its test fails instead of the whole suite
_pair: list[tuple[Any, Connection]] = []  # of each rank its process and the connection to it; empty where none runs


def on_two_ranks(case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `case` returned on each rank. Raises AssertionError with the tracebacks of ranks that failed."""
    if not _pair:
        _start()
    for _, connection in _pair:
        connection.send((case, arguments))
    answers = [_answer(connection) for _, connection in _pair]
    failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
    if failures:
        _end()
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


def _start() -> None:
    context = forkserver()
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, meeting, theirs), daemon=True)
        process.start()
        theirs.close()
        _pair.append((process, ours))


@atexit.register
def _end() -> None:
    for process, connection in _pair:
        process.kill()
        process.join()
        connection.close()
    _pair.clear()


def _answer(connection: Connection) -> tuple[bool, Any]:
    try:
        return connection.recv()
    except EOFError:
        return False, f"died, or was killed after {_LONGEST} s"


def _serve(rank: int, meeting: Path, connection: Connection) -> None:
    import torch
    from torch import distributed as dist

    from surefoot.training.ranks import Ranks

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST)
    os.environ["LOCAL_RANK"] = str(rank)  # every launcher sets it, and DeepSpeed asks for it
    torch.set_num_threads(1)
    limit = timedelta(seconds=_LONGEST)
    dist.init_process_group("cpu:gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=limit)
    while True:
        signal.alarm(0)
        try:
            case, arguments = connection.recv()
        except EOFError:  # the tests are over
            return
        signal.alarm(_LONGEST)
        try:
            connection.send((True, case(Ranks(rank, WORLD, rank), *arguments)))
            dist.barrier()
        except BaseException:
            connection.send((False, traceback.format_exc()))
            os._exit(1)  # the other rank, which may wait for this one, ends at once
