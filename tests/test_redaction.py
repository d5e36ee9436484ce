"""What looks like a key does not get through; ordinary messages do."""

from __future__ import annotations

import re

import pytest

from surefoot import redaction
from surefoot.redaction import redacted

HEX = "0123456789abcdef0123456789abcdef01234567"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
SECRETS = [
    ("no route to https://me:hunter2@host/x", "hunter2"),
    (f"key {HEX} is unknown", HEX),
    (f"key local-{HEX} is unknown", HEX),
    ("401 for hf_" + "AbCdEfGh" * 4, "AbCdEfGh"),
    ("Incorrect API key provided: sk-proj-Ab12_Cd34-Ef56Gh78", "Ef56Gh78"),
    ("wandb_v1_AbCdEf0123_xyzXYZ is not valid", "xyzXYZ"),
    (f"header Authorization: Bearer {JWT}", JWT[-20:]),
    (f"Bearer {JWT} was refused", JWT[:20]),
    (f"token {JWT}", JWT[-20:]),
    ("bearer abcdefghijkl", "abcdefghijkl"),
    ("{'Authorization': 'Basic bWU6aHVudGVyMg=='}", "bWU6aHVudGVyMg"),
    ("GET /api?write_token=short1&run=a", "short1"),
    ("WANDB_API_KEY='s3cret' is wrong", "s3cret"),
    ("password: hunter2, user: me", "hunter2"),
    ("{'hub_token': 'short1', 'pad_token': '<pad>'}", "short1"),
    ("ghp_0123456789abcdefABCDEF", "abcdefABCDEF"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_are_left_out(text: str, secret: str) -> None:
    assert secret not in redacted(text)


def test_twin_that_knows_fewer_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_SECRET", re.compile(r"\bhf_\w{8,}|(?<=://)[^/@\s]+(?=@)"))
    assert any(secret in redacted(text) for text, secret in SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        "Connection refused: localhost:5000",
        "HTTPConnectionPool(host='10.0.0.7', port=5000): Max retries exceeded with url: /api/2.0/mlflow/runs",
        "basic authentication is not supported; give a token",
        "the experiment my-experiment-with-a-rather-long-name does not exist",
        "not logged in: `wandb login`, or set tracking.offline: true",
        "[Errno 2] No such file or directory: 'runs/a/tensorboard'",
        "special_tokens: {'pad_token': '<|end_of_text|>', 'bos_token': '<s>'}",
    ],
)
def test_ordinary_messages_stay_whole(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("  hub_token: SECRET9", "  hub_token: …"),
        ('{"a": 1, "wandb_api_key": "SECRET9"}', '{"a": 1, "wandb_api_key": …'),
        ("seed: 3  # pad_token: <pad>", "seed: 3  # pad_token: <pad>"),
        ("url: https://me:hunter2@host/x", "url: https://…         @host/x"),
    ],
)
def test_a_line_of_a_file_keeps_its_width(line: str, left: str) -> None:
    assert redaction.veiled_line(line).rstrip() == left
    assert len(redaction.veiled_line(line)) == len(line)


def test_words_of_a_command() -> None:
    words = ["run", "--", "HF_TOKEN=a1", "x", "--hub-token", "b2", "--hub_token=c3", "--pad_token", "d4", "--seed", "5"]
    shown = redaction.veiled_words(words)
    assert shown == ["run", "--", "HF_TOKEN=…", "x", "--hub-token", "…", "--hub_token=…", *words[7:]]


def test_a_message_keeps_what_it_is_about() -> None:
    message = f"{HEX} differs from {HEX}: hub_token: is no setting; model.path=runs/a-long-name-of-a-run-2026-11-21-x"
    assert redaction.veiled(message) == message
    assert redaction.veiled("HF_HUB_OFFLINE is set") == "HF_HUB_OFFLINE is set"
    assert redaction.veiled("error: wandb_api_key=s3cret: unknown key") == "error: wandb_api_key=… unknown key"


def test_a_line_of_megabytes_is_looked_through_once() -> None:
    """It took hours, and a line of many names went beyond Python's depth."""
    assert redaction.veiled_line("a" * 2_000_000) == "a" * 2_000_000
    many = ", ".join(f'"name{number}": {number}' for number in range(5000))
    assert redaction.veiled_line(f"{many}, hub_token: SECRET9").rstrip() == f"{many}, hub_token: …"
    assert redaction.veiled("a" * 2_000_000 + " hub_token=SECRET9").endswith(" hub_token=…")
