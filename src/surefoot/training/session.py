"""Processes that make one run: how they meet, what rank 0 hands the others, and how the fault of one ends all.

    with open_session(ranks, timeout) as session:
        if ranks.is_first:
            session.hand_over({"plan": ...})     # after it has planned and prepared the data, at its own pace
        else:
            given = session.await_lead()
        session.start_group("cpu")               # from here on there are collectives
        ...

They meet in a store of torch.distributed that rank 0 (or torchrun) holds; no process group exists until `start_group`,
so whoever tokenises may fork. A `Watchdog` runs from the beginning to the end. An error that leaves the block is
published to all: the rank that published it first raises it, the others raise `EndedElsewhere`, which prints nothing.

A run that goes back to a checkpoint begins anew on all ranks (`begin_anew`), in the same process group.

A run in one process has the same session without a store: every call is there and does nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from surefoot.system.errors import EnvironmentFault, Fault, SurefootError
from surefoot.training.activity import Activity
from surefoot.training.ranks import Ranks
from surefoot.training.watchdog import (
    LINGER,
    MEETING,
    SILENT,
    RankFault,
    Watchdog,
    mark_done,
    publish_fault,
    published_fault,
)

_LEAD = "lead"
_POLL = 0.1  # seconds
_GOODBYE = 60.0  # seconds that the rank with the store waits for the others' last words
_MARGIN = 5.0  # seconds in which a watchdog publishes what it found
_BACKEND = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset)|Broken pipe")


class EndedElsewhere(SurefootError):
    """Another rank published why the run ends; this one prints nothing and leaves with the same code."""

    def __init__(self, fault: RankFault):
        super().__init__(())
        self.args = ("\n".join(fault.lines),)  # for the run's own log
        self.exit_code = fault.code


class Session:
    """Of this rank.

    store: None where it is alone.
    """

    def __init__(
        self, ranks: Ranks, store: Store | None, activity: Activity, watchdog: Watchdog | None, timeout: float
    ):
        self.ranks, self.activity = ranks, activity
        self._store, self._watchdog, self._timeout = store, watchdog, timeout
        self._beginning = 0  # what is handed over belongs to one

    def begin_anew(self) -> None:
        """Forget what ranks handed over: the run starts again from a checkpoint. Every rank must call it."""
        self._beginning += 1
        self.activity.begin_anew()

    def hand_over(self, given: Mapping[str, Any]) -> None:
        """Rank 0: what the others wait for. JSON-able."""
        if self._store is not None:
            self._store.set(self._key(_LEAD), json.dumps(given))

    def await_lead(self) -> dict[str, Any]:
        """Other ranks: what rank 0 handed over. It may take its time; raises EndedElsewhere where it failed."""
        assert self._store is not None
        with self.activity.during("waiting for rank 0"):
            while not self._store.check([self._key(_LEAD)]):
                self._raise_published()
                time.sleep(_POLL)
            return json.loads(self._store.get(self._key(_LEAD)))

    def gather(self, name: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank has under that name, by rank; for the first one only, which waits for all. JSON-able."""
        if self._store is None:
            return [dict(value)]
        self._store.set(self._key(f"{name}/{self.ranks.rank}"), json.dumps(value))
        if not self.ranks.is_first:
            return []
        keys = [self._key(f"{name}/{rank}") for rank in range(self.ranks.world)]
        while not self._store.check(keys):
            self._raise_published()
            time.sleep(_POLL)
        return [json.loads(one) for one in self._store.multi_get(keys)]

    def start_group(self, device: str) -> None:
        """The process group: gloo on the host, NCCL between GPUs. It stays where the run begins anew, as libraries keep
        groups that they made of it."""
        if self._store is None or self._watchdog is None or dist.is_initialized():
            return
        self._watchdog.meet()
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.ranks.rank,
            world_size=self.ranks.world,
            timeout=timedelta(seconds=self._timeout),
        )

    def note_with(self, note: Callable[[str], None]) -> None:
        """Where the end of the run is noted when the watchdog ends it."""
        if self._watchdog is not None:
            self._watchdog.note = note

    def _key(self, name: str) -> str:
        return f"{self._beginning}/{name}"

    def _raise_published(self) -> None:
        assert self._store is not None
        if (fault := published_fault(self._store)) is not None:
            raise EndedElsewhere(fault)

    @contextmanager
    def shared_faults(self) -> Iterator[None]:
        """What is raised in the block is published to all ranks; one of them raises it."""
        try:
            yield
        except EndedElsewhere:
            raise
        except SurefootError as error:
            if self._store is not None:
                self._publish(error.exit_code, tuple(map(str, error.faults)), error)
                if not self.ranks.is_first:  # the message of rank 0 needs no rank in it
                    own = f"rank {self.ranks.rank}"
                    error.faults = tuple(
                        replace(one, where=f"{own}: {one.where}" if one.where else own) for one in error.faults
                    )
            raise
        except Exception as error:
            if self._store is not None:
                if is_broken_connection(error):
                    self._await_the_cause()
                self._publish(SurefootError.exit_code, (f"{type(error).__name__}: {error}",), error)
            raise

    def _publish(self, code: int, lines: tuple[str, ...], error: Exception) -> None:
        """Raises EndedElsewhere where another rank was first."""
        assert self._store is not None
        try:
            fault = publish_fault(self._store, RankFault(self.ranks.rank, code, lines))
        except RuntimeError:  # the store went with its rank, and the watchdog is about to say so
            time.sleep(SILENT)
            return
        if fault.rank != self.ranks.rank:
            raise EndedElsewhere(fault) from error

    def _await_the_cause(self) -> None:
        """A collective breaks because a rank failed or is gone; which, the store or the watchdog knows soon."""
        assert self._store is not None
        until = time.monotonic() + SILENT + _MARGIN
        while time.monotonic() < until:
            with suppress(RuntimeError):
                self._raise_published()
            time.sleep(_POLL)

    def close(self, failed: bool) -> None:
        """This rank's part is done."""
        if self._store is None or self._watchdog is None:
            return
        self.activity.over = True
        self._watchdog.stop()
        with suppress(RuntimeError):
            mark_done(self._store, self.ranks.rank, self.ranks.world, LINGER if failed else _GOODBYE)
        if dist.is_initialized() and not failed:  # with a rank gone it could wait without end
            dist.destroy_process_group()


def is_broken_connection(error: Exception) -> bool:
    """Whether a collective failed. gloo and NCCL raise plain RuntimeErrors, too."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_BACKEND.search(str(error))))


@contextmanager
def open_session(ranks: Ranks, timeout: float, launcher: int | None = None) -> Iterator[Session]:
    """The session of this process, closed at the end of the block.

    timeout: seconds that one rank may wait for another.
    launcher: process id of the one without which this process has no reason to go on.

    Raises EnvironmentFault where the ranks do not find each other.
    """
    activity, meeting = Activity(), min(timeout, MEETING)
    if ranks.world == 1:
        yield Session(ranks, None, activity, None, timeout)
        return
    store = _meet(ranks, meeting)
    watchdog = Watchdog(store, ranks.rank, ranks.world, activity, launcher=launcher, meeting=meeting)
    session = Session(ranks, store, activity, watchdog, timeout)
    watchdog.start()
    failed = True
    try:
        with session.shared_faults():
            yield session
        failed = False
    finally:
        session.close(failed)


def _meet(ranks: Ranks, limit: float) -> Store:
    """The store that MASTER_ADDR and MASTER_PORT name; torchrun holds it itself, else rank 0 does.

    limit: seconds.
    """
    try:
        found, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timedelta(seconds=limit)))
    except (RuntimeError, ValueError) as error:
        what = f"rank {ranks.rank} of {ranks.world} does not reach the others: {' '.join(str(error).split())[:200]}"
        raise EnvironmentFault(
            Fault("MASTER_ADDR", what, "check the address, the port and the network", code="SF-PARALLEL")
        ) from None
    return PrefixStore("surefoot", found)
