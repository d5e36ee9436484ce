"""Servers that do not answer are told while they are waited for, and which one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.faults import gives
from helpers.http_stub import answering
from surefoot.methods import waiting
from surefoot.methods.waiting import silence_told
from surefoot.system.posting import server

STUCK = 60.0  # seconds after which a wait for the other side has failed


def test_the_server_that_is_silent_is_told_and_again_when_it_has_been_so_twice_as_long(monkeypatch):
    monkeypatch.setattr(waiting, "LEAST", 0.05)
    told, twice, goes_on = [], threading.Event(), threading.Event()

    def notify(sentence, *, caution=True):
        told.append(sentence)
        if len(told) == 2:
            twice.set()

    def silent(*_):
        assert goes_on.wait(STUCK)
        return 200, 1

    with answering(lambda *_: (200, 1)) as well, answering(silent) as ill, ThreadPoolExecutor(3) as pool:
        servers = [server(one.address, "key") for one in (well, ill)]
        with silence_told(servers, notify):
            asked = [pool.submit(servers[1].post, "/", number) for number in range(3)]
            assert servers[0].post("/", 1) == 1
            assert twice.wait(STUCK)
            goes_on.set()
            assert [one.result() for one in asked] == [1, 1, 1]
    assert all(sentence.startswith(ill.address) and gives(sentence, 3) for sentence in told)


@pytest.mark.parametrize("answers", [True, False], ids=["", "twin: it answers nothing"])
def test_a_server_that_answers_some_of_its_requests_is_not_told(monkeypatch, answers):
    monkeypatch.setattr(waiting, "LEAST", 0.4)
    told, goes_on, count = [], threading.Event(), 0

    def one_after_the_other(path, body):
        nonlocal count
        count += 1
        if body == "last":
            assert goes_on.wait(STUCK)
        return 200, 1

    with answering(one_after_the_other) as stub, ThreadPoolExecutor(1) as pool:
        asked = server(stub.address, "key")
        with silence_told([asked], lambda sentence, *, caution=True: told.append(sentence)):
            late = pool.submit(asked.post, "/", "last")
            pause = threading.Event()
            for _ in range(12):
                pause.wait(0.1)
                if answers:
                    asked.post("/", 1)
            goes_on.set()
            late.result()
    assert bool(told) != answers
