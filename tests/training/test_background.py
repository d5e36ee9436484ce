"""Checkpoints that a thread finishes: one at a time, whole or absent, and no error is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from helpers.faults import raises_fault
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.background import background_writer

LARGE = 100


class Slow:
    """A checkpoint that becomes whole when it is told to."""

    def __init__(self, name="checkpoint-2", error: BaseException | None = None):
        self.path, self.error = Path(name), error
        self.go, self.thread = threading.Event(), None

    def __call__(self):
        self.thread = threading.current_thread()
        assert self.go.wait(20)
        if self.error:
            raise self.error
        return self.path


def test_it_is_told_of_once_it_is_whole():
    slow = Slow()
    with background_writer(LARGE) as writer:
        assert writer.take(slow, LARGE, "step 2") is None
        assert writer.finished() == []
        slow.go.set()
        assert writer.finished(wait=True) == [("step 2", slow.path)]
        assert writer.finished(wait=True) == []
    assert slow.thread is not threading.main_thread()


def test_a_small_one_is_finished_at_once():
    slow = Slow()
    slow.go.set()
    with background_writer(LARGE) as writer:
        assert writer.take(slow, LARGE - 1) == slow.path
    assert slow.thread is threading.main_thread()


def test_two_at_once_are_refused():
    slow = Slow()
    with background_writer(LARGE) as writer:
        writer.take(slow, LARGE)
        with pytest.raises(AssertionError):
            writer.take(slow, LARGE)
        slow.go.set()


def test_the_end_waits_for_it():
    slow = Slow()
    threading.Timer(0.05, slow.go.set).start()
    with background_writer(LARGE) as writer:
        writer.take(slow, LARGE)
    assert slow.thread
    assert not slow.thread.is_alive()


@pytest.mark.parametrize("asked", [True, False], ids=["at the next step", "at the end"])
def test_what_it_ran_into_is_raised(asked):
    slow = Slow(error=EnvironmentFault(Fault("checkpoint-2", "full", code="SF-DISK-FULL")))
    slow.go.set()

    def run():
        with background_writer(LARGE) as writer:
            writer.take(slow, LARGE)
            if asked:
                writer.finished(wait=True)
                pytest.fail("it was silent")

    with raises_fault("SF-DISK-FULL", "checkpoint-2"):
        run()


def test_another_error_is_not_hidden_by_it():
    slow = Slow(error=EnvironmentFault(Fault("checkpoint-2", "full")))
    slow.go.set()

    def run():
        with background_writer(LARGE) as writer:
            writer.take(slow, LARGE)
            raise RuntimeError("the step")

    with pytest.raises(RuntimeError, match="the step") as caught:
        run()
    assert "checkpoint-2: full" in caught.value.__notes__[0]
