"""Asking a server: retries, time limits, and one line for whatever goes wrong."""

import socket
import threading
from contextlib import contextmanager

import pytest

from helpers.http_stub import answering
from surefoot.system.errors import EnvironmentFault, InputError
from surefoot.system.posting import GivenUp, Requests, Server, server


def quick(stub, **limits) -> Server:
    return server(stub.address, "key", **({"pause": 0.01, "timeout": 5.0} | limits))


@contextmanager
def refused(where):
    with pytest.raises(EnvironmentFault) as caught:
        yield
    assert [(one.where, one.code) for one in caught.value.faults] == [(where, "SF-SERVER")]


def test_what_is_answered_comes_back_as_json():
    with answering(lambda path, body: (200, {"path": path, "got": body})) as stub:
        assert quick(stub).post("/a", [1, "é"]) == {"path": "/a", "got": [1, "é"]}
        assert quick(stub).get("/b") == {"path": "/b", "got": None}


def test_trouble_that_passes_is_asked_again_and_a_refusal_is_not():
    replies = iter([(503, "busy"), (500, "oh"), (200, 7)])
    with answering(lambda *_: next(replies)) as stub:
        assert quick(stub).post("/", 1) == 7
        assert len(stub.asked) == 3
    with answering(lambda *_: (400, "bad\nmodel name")) as stub:
        with refused(stub.address + "/"):
            quick(stub).post("/", 1)
        assert len(stub.asked) == 1
    with answering(lambda *_: (500, "")) as stub:
        with refused(stub.address + "/"):
            quick(stub).post("/", 1)
        assert len(stub.asked) == 3


def test_half_an_answer_is_asked_for_again():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"

    def serve(listening):
        for body in (b"1", b"17"):
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head + body)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        port = listening.getsockname()[1]
        assert Server(f"http://127.0.0.1:{port}", pause=0.01).get("/") == 17


def test_silence_ends():
    with answering(lambda *_: (200, 1)) as stub:
        stub.delay = 2.0
        with refused(stub.address + "/"):
            quick(stub, timeout=0.05, tries=2).post("/", 1)


def test_nobody_there():
    with refused("http://127.0.0.1:9/x"):
        Server("http://127.0.0.1:9", tries=1).post("/x", 1)


def test_no_other_address_is_asked(monkeypatch):
    with answering(lambda *_: (200, "elsewhere")) as other, answering(lambda *_: (200, 1)) as stub:
        stub.redirect = other.address
        with refused(stub.address + "/"):
            quick(stub).post("/", 1)
        stub.redirect = ""
        monkeypatch.setenv("http_proxy", other.address)
        assert quick(stub).post("/", 1) == 1
        assert other.asked == []


@pytest.mark.parametrize("said", ["Success: loaded", "[" * 200_000, "9" * 5_000], ids=["words", "nested", "digits"])
def test_an_answer_that_is_no_json_is_none(said):
    with answering(lambda *_: (200, said)) as stub:
        assert quick(stub).post("/", 1) is None


def test_what_is_no_address_is_refused():
    for address in ["ftp://a", "http://", "http://a:b", "localhost:8000", "http://a:99999"]:
        with pytest.raises(InputError) as caught:
            server(address, "ppo.vllm_url")
        assert [(one.where, one.code) for one in caught.value.faults] == [("ppo.vllm_url", "SF-CONFIG-VALUE")]


def test_a_password_is_not_repeated():
    with pytest.raises(InputError) as raised:
        server("http://me:secret@host", "key")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("watched", [True, False])
def test_requests_under_way_can_be_given_up(monkeypatch, watched):
    """And are not made again. The twin's connection is not known."""
    asked, goes_on, found = threading.Event(), threading.Event(), []

    def silent(*_):
        asked.set()
        assert goes_on.wait(60)
        return 200, 1

    def ask():
        try:
            found.append(given.post("/", 1))
        except GivenUp as error:
            found.append(error.faults[0].code)

    if not watched:
        monkeypatch.setattr(Requests, "watch", lambda own, connection: None)
    with answering(silent) as stub:
        given, thread = quick(stub, timeout=120.0), threading.Thread(target=ask)
        thread.start()
        assert asked.wait(60)
        assert given.requests.silence[0] == 1
        given.requests.give_up()
        thread.join(60 if watched else 0.2)
        assert thread.is_alive() != watched
        goes_on.set()
        thread.join()
        assert found == ["SF-SERVER" if watched else 1]
        assert given.requests.silence == (0, 0.0)
        with refused(stub.address + "/again"):
            given.post("/again", 1)
        assert [path for path, _ in stub.asked] == ["/"]
