"""Answers of the server that forks commands belong to their requests, whoever asks at the same time."""

import pytest

from helpers.fork_server import ForkServer


class Connection:
    """To a server that answers each request with a number, a code and seconds; remembers whether anybody else could
    have asked meanwhile."""

    def __init__(self, numbers):
        self.numbers, self.locked = list(numbers), []

    def send(self, request):
        self.locked.append(ForkServer._lock.locked())

    def recv(self):
        self.locked.append(ForkServer._lock.locked())
        return self.numbers.pop(0), 7, 0.5


@pytest.fixture
def ask(monkeypatch, tmp_path):
    def with_answers(*numbers):
        connection = Connection(numbers)
        monkeypatch.setattr(ForkServer, "_number", 0)
        monkeypatch.setattr(ForkServer, "seconds", 0.0)
        monkeypatch.setattr(ForkServer, "_connection", lambda self: connection)
        return connection, lambda: ForkServer().run(["plan"], tmp_path / "log.txt")

    return with_answers


def test_every_request_has_a_number_and_gets_the_answer_with_it(ask):
    _, run = ask(1, 2)
    assert [run(), run()] == [7, 7]
    assert ForkServer.seconds == 1.0


@pytest.mark.parametrize("answers", [(1, 1), (1, 3)])
def test_twin_an_answer_to_another_request_is_noticed(ask, answers):
    """A request that was given up leaves its answer in the connection."""
    _, run = ask(*answers)
    assert run() == 7
    with pytest.raises(AssertionError, match="the server's answer to request 2"):
        run()


def test_nobody_asks_between_a_request_and_its_answer(ask):
    connection, run = ask(1)
    run()
    assert connection.locked == [True, True]
    assert not ForkServer._lock.locked()


def test_twin_without_the_lock_somebody_could(ask):
    connection, _ = ask(1)
    ForkServer()._ask({})
    assert connection.locked == [False, False]
