"""The processes of one run: how they find each other, share values from rank 0, and all end when one fails.

    with open_session(ranks, timeout) as session:
        if ranks.is_first:
            session.hand_over({"plan": ...})     # after planning and data preparation, which may take long
        else:
            values = session.await_lead()
        session.start_group("cpu")               # collectives work from here on
        ...

The ranks find each other through a torch.distributed store held by rank 0 (or torchrun). There is no process group
until `start_group`, so tokenization may still fork. A `Watchdog` runs for the whole session. An exception that leaves
the block is published to all ranks: the rank that published first raises it, the others raise `EndedElsewhere`, which
prints nothing.

After a rollback to a checkpoint, all ranks start again (`begin_anew`) in the same process group.

With a single process the session has no store, and every method does nothing.
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
_GOODBYE = 60.0  # seconds that the rank with the store waits for the others to finish
_MARGIN = 5.0  # seconds in which a watchdog publishes a fault it found
_BACKEND = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset)|Broken pipe")


class EndedElsewhere(SurefootError):
    """Another rank published a fault; this rank prints nothing and exits with the same code."""

    def __init__(self, fault: RankFault):
        super().__init__(())
        self.args = ("\n".join(fault.lines),)  # for the run's own log
        self.exit_code = fault.code


class Session:
    """This rank's session.

    store: shared store; None with a single process.
    timeout: seconds that a collective may take.
    """

    def __init__(
        self, ranks: Ranks, store: Store | None, activity: Activity, watchdog: Watchdog | None, timeout: float
    ):
        self.ranks, self.activity = ranks, activity
        self._store, self._watchdog, self._timeout = store, watchdog, timeout
        self._start = 0  # number of `begin_anew` calls; part of every key, so that old values are not read

    def begin_anew(self) -> None:
        """Discard the values shared so far, to start again from a checkpoint. Every rank must call it."""
        self._start += 1
        self.activity.begin_anew()

    def hand_over(self, values: Mapping[str, Any]) -> None:
        """On rank 0: publish JSON-able values for which the other ranks wait."""
        if self._store is not None:
            self._store.set(self._key(_LEAD), json.dumps(values))

    def await_lead(self) -> dict[str, Any]:
        """On other ranks: wait for rank 0's values, without a time limit. Raises EndedElsewhere if a rank failed."""
        assert self._store is not None
        with self.activity.during("waiting for rank 0"):
            # Polled: a blocking `wait` has a time limit, and would not see that another rank has failed.
            while not self._store.check([self._key(_LEAD)]):
                self._raise_published()
                time.sleep(_POLL)
            return json.loads(self._store.get(self._key(_LEAD)))

    def gather(self, name: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Gather a JSON-able value per rank on rank 0, which waits for all; returns [] on other ranks."""
        if self._store is None:
            return [dict(value)]
        self._store.set(self._key(f"{name}/{self.ranks.rank}"), json.dumps(value))
        if not self.ranks.is_first:
            return []
        keys = [self._key(f"{name}/{rank}") for rank in range(self.ranks.world)]
        # Polled, as in `await_lead`.
        while not self._store.check(keys):
            self._raise_published()
            time.sleep(_POLL)
        return [json.loads(one) for one in self._store.multi_get(keys)]

    def start_group(self, device: str) -> None:
        """Create the process group: gloo on the CPU, NCCL between GPUs. `begin_anew` keeps it, because libraries hold
        on to subgroups made from it."""
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
        """Set the function that logs why the watchdog ended the run."""
        if self._watchdog is not None:
            self._watchdog.note = note

    def _key(self, name: str) -> str:
        return f"{self._start}/{name}"

    def _raise_published(self) -> None:
        assert self._store is not None
        if (fault := published_fault(self._store)) is not None:
            raise EndedElsewhere(fault)

    @contextmanager
    def shared_faults(self) -> Iterator[None]:
        """Publish exceptions of the block to all ranks; only the rank that published first raises its own."""
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
        """Raises EndedElsewhere if another rank published first."""
        assert self._store is not None
        try:
            fault = publish_fault(self._store, RankFault(self.ranks.rank, code, lines))
        except RuntimeError:  # the store ended with its rank; the watchdog will report that and end this process
            time.sleep(SILENT)
            return
        if fault.rank != self.ranks.rank:
            raise EndedElsewhere(fault) from error

    def _await_the_cause(self) -> None:
        """Wait for the cause of a broken collective: published by the failed rank or found by the watchdog."""
        assert self._store is not None
        until = time.monotonic() + SILENT + _MARGIN
        while time.monotonic() < until:
            with suppress(RuntimeError):
                self._raise_published()
            time.sleep(_POLL)

    def close(self, failed: bool) -> None:
        """End this rank's part of the session."""
        if self._store is None or self._watchdog is None:
            return
        self.activity.over = True
        self._watchdog.stop()
        with suppress(RuntimeError):
            mark_done(self._store, self.ranks.rank, self.ranks.world, LINGER if failed else _GOODBYE)
        if dist.is_initialized() and not failed:  # if a rank is gone, this could block forever
            dist.destroy_process_group()


def is_broken_connection(error: Exception) -> bool:
    """Whether the error is a failed collective. gloo and NCCL also raise plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_BACKEND.search(str(error))))


@contextmanager
def open_session(ranks: Ranks, timeout: float, launcher: int | None = None) -> Iterator[Session]:
    """Open the session of this process; it is closed at the end of the block.

    timeout: seconds that one rank may wait for another.
    launcher: process id of the launcher; this process exits when the launcher does.

    Raises EnvironmentFault if the ranks cannot connect to each other.
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
    """Connect to the store at MASTER_ADDR and MASTER_PORT, held by torchrun or else by rank 0.

    limit: timeout in seconds.
    """
    try:
        found, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timedelta(seconds=limit)))
    except (RuntimeError, ValueError) as error:
        what = f"rank {ranks.rank} of {ranks.world} cannot reach the others: {' '.join(str(error).split())[:200]}"
        raise EnvironmentFault(
            Fault("MASTER_ADDR", what, "check the address, the port and the network", code="SF-PARALLEL")
        ) from None
    return PrefixStore("surefoot", found)
