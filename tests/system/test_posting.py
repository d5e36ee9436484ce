"""Asking a server: retries, time limits, and one line for whatever goes wrong."""

from __future__ import annotations

import pytest

from helpers.http_stub import answering
from surefoot.system.errors import EnvironmentFault, InputError
from surefoot.system.posting import Server, server


def quick(stub, **limits) -> Server:
    return server(stub.address, "key", **({"pause": 0.01, "timeout": 5.0} | limits))


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
        with pytest.raises(EnvironmentFault, match="answers 400: bad model name; see that the server runs"):
            quick(stub).post("/", 1)
        assert len(stub.asked) == 1
    with answering(lambda *_: (500, "")) as stub:
        with pytest.raises(EnvironmentFault, match="answers 500") as raised:
            quick(stub).post("/", 1)
        assert len(stub.asked) == 3
        assert raised.value.exit_code == 3


def test_silence_ends():
    with answering(lambda *_: (200, 1)) as stub:
        stub.delay = 2.0
        with pytest.raises(EnvironmentFault, match=r"does not answer within 0\.05 s"):
            quick(stub, timeout=0.05, tries=2).post("/", 1)


def test_nobody_there():
    with pytest.raises(EnvironmentFault, match=r"http://127\.0\.0\.1:9/x: cannot be reached"):
        Server("http://127.0.0.1:9", tries=1).post("/x", 1)


def test_no_other_address_is_asked(monkeypatch):
    with answering(lambda *_: (200, "elsewhere")) as other, answering(lambda *_: (200, 1)) as stub:
        stub.redirect = other.address
        with pytest.raises(EnvironmentFault, match="answers 302"):
            quick(stub).post("/", 1)
        stub.redirect = ""
        monkeypatch.setenv("http_proxy", other.address)
        assert quick(stub).post("/", 1) == 1
        assert other.asked == []


@pytest.mark.parametrize("said", ["Success: loaded", "[" * 200_000, "9" * 5_000], ids=["words", "nested", "digits"])
def test_an_answer_that_is_no_json_is_none(said):
    with answering(lambda *_: (200, said)) as stub:
        assert quick(stub).post("/", 1) is None


@pytest.mark.parametrize("address", ["ftp://a", "http://", "http://a:b", "localhost:8000", "http://a:99999"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match=r"ppo\.vllm_url: .* is no address such as"):
        server(address, "ppo.vllm_url")


def test_a_password_is_not_repeated():
    with pytest.raises(InputError) as raised:
        server("http://me:secret@host", "key")
    assert "secret" not in str(raised.value)
