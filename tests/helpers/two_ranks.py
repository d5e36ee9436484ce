"""Functions run on two ranks for real: two processes, gloo on the CPU, one shared file to meet at.

    results = on_two_ranks(case, tmp_path, *arguments)   # case(ranks, *arguments) of each rank

The processes are forked from a server that has imported everything once and computed nothing, so a pair starts in
milliseconds and shares no state with any other. `case` is a function of a module that is importable from `tests`; what
it returns travels back by pickle, so plain values and numpy arrays only.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.forked_command import forkserver

WORLD = 2
_LONGEST = 60  # seconds; a pair that hangs is killed, and its test fails instead of the whole suite


def on_two_ranks(case: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `case` returned on each rank. Raises AssertionError with the tracebacks of ranks that failed."""
    context = forkserver()
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    pairs = [context.Pipe() for _ in range(WORLD)]
    workers = [
        context.Process(target=_work, args=(rank, meeting, pairs[rank][1], case, arguments), daemon=True)
        for rank in range(WORLD)
    ]
    for worker, (_, theirs) in zip(workers, pairs, strict=True):
        worker.start()
        theirs.close()
    answers = [_answer(ours) for ours, _ in pairs]
    for worker in workers:
        worker.join()
    failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


def _answer(connection: Connection) -> tuple[bool, Any]:
    try:
        return connection.recv()
    except EOFError:
        return False, f"died, or was killed after {_LONGEST} s"


def _work(rank: int, meeting: Path, connection: Connection, case: Callable[..., Any], arguments: tuple[Any]) -> None:
    import torch
    from torch import distributed as dist

    from surefoot.training.ranks import Ranks

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST)
    os.environ["LOCAL_RANK"] = str(rank)  # every launcher sets it, and DeepSpeed asks for it
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "cpu:gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=_LONGEST),
        )
        connection.send((True, case(Ranks(rank, WORLD, rank), *arguments)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        connection.send((False, traceback.format_exc()))
