"""What looks like a key does not get through; ordinary messages do."""

import random
import re

import pytest

from helpers.secret_formats import CONTEXTS, LIKE_A_HASH, NAMES, drawn
from surefoot.system import redaction
from surefoot.system.redaction import hides, hides_any, redacted, veiled

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


def test_secrets_are_left_out() -> None:
    for text, secret in SECRETS:
        assert secret not in redacted(text)


def test_twin_that_knows_fewer_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_SHAPES", re.compile(r"\bhf_\w{8,}|(?<=://)[^/@\s]+(?=@)"))
    monkeypatch.setattr(redaction, "_LONG", re.compile(r"(?!)"))
    assert any(secret in redacted(text) for text, secret in SECRETS)


def test_ordinary_messages_stay_whole() -> None:
    for text in [
        "Connection refused: localhost:5000",
        "HTTPConnectionPool(host='10.0.0.7', port=5000): Max retries exceeded with url: /api/2.0/mlflow/runs",
        "basic authentication is not supported; give a token",
        "the experiment my-experiment-with-a-rather-long-name does not exist",
        "not logged in: `wandb login`, or set tracking.offline: true",
        "[Errno 2] No such file or directory: 'runs/a/tensorboard'",
        "special_tokens: {'pad_token': '<|end_of_text|>', 'bos_token': '<s>'}",
    ]:
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


def test_tokens_of_an_independent_list_are_veiled_wherever_they_stand() -> None:
    for seed in range(5):
        seen = {shape: veiled(f"could not reach it: {token} was refused") for shape, token in drawn(seed).items()}
        shown = {shape for shape, token in drawn(seed).items() if token in seen[shape]}
        assert shown == set(LIKE_A_HASH)


def leaks(seed: int) -> list[str]:
    """Texts that still show the plain value which they give to a name of the list."""
    draws = random.Random(seed)
    found = []
    for name in NAMES:
        for context in CONTEXTS:
            value = f"canary{draws.randrange(10**6)}"
            shown = veiled(context.format(name=name, value=value))
            if value in shown:
                found.append(shown)
    return found


def test_values_of_names_of_an_independent_list_are_veiled_in_every_notation() -> None:
    assert leaks(1) == []


def test_twin_that_knows_only_name_and_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_NAME", re.compile(r"(?<![\w.-])([\w.-]++)(=)"))
    assert leaks(1)


def test_secrets_by_hand() -> None:
    for text, secret in [
        ("postgres://u:can/ary6@h/db", "ary6"),
        ("amqp://u:can@ary6@h", "ary6"),
        ("proxy http://me:can/ary1@127.0.0.1:9 refused", "ary1"),
        ("https://b.s3/x?X-Amz-Signature=canary2sig&a=1", "canary2sig"),
        ("https://a.blob/x?sp=r&sig=canary3%2Bsas failed", "canary3"),
        ('{"Authorization": "Basic Y2FuYXJ5NA=="}', "Y2FuYXJ5NA"),
        ("Authorization: Digest username=x, response=canary4", "canary4"),
        ("> Cookie: a=1; session=canary5", "canary5"),
        ("password = 'correct horse battery staple', x", "battery"),
        (r'"{\"token\": \"canary6\"}"', "canary6"),
        ("{'credentials': {'user': 'me', 'key': 'canary7'}}", "canary7"),
        ("os.environ['HF_TOKEN'] = 'canary8'", "canary8"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIcanary9\nabc\n-----END RSA PRIVATE KEY-----", "canary9"),
        ("https://hooks.slack.com/services/T0/B0/canary10", "canary10"),
        ("the passphrase: swordfish", "swordfish"),
    ]:
        assert secret not in veiled(text)
        assert secret not in redacted(text)


INNOCENT = [
    "tokenizer: gpt2, tokenizer=runs/a/tokenizer.json",
    "max_tokens: 5, max_tokens=5, max_new_tokens=128",
    "author: me, author=me, authors=[a, b], authenticated=yes",
    "tokens_per_second=12.5 tokens=1000",
    "pad_token: <pad>, eos_token=<|im_end|>, token: '<|eot|>'",
    "runs/a/checkpoint-40/model.safetensors: 4000 bytes",
    "PWD=/home/me/work",
    "https://huggingface.co/Qwen/Qwen2.5-0.5B@main is no address of a hub",
    "meta-llama/Llama-3.1-8B-Instruct at revision main: key: value",
    f"sha256: {HEX}{HEX[:24]}, config_hash={HEX}",
    "hub_token: unknown key; api_key: is no setting",
    "hf_hub_download failed; set hf_transfer off; sk-learn-like names stay; npm_config_cache",
    "primary_key=id public_key=a cache_key: 3, sort_key: name, key='model'",
    "forward_pass: 3, compass=north, bypass: yes",
    "the password is not given",
    "password=${MY_PASSWORD}",
    "KeyError: 'lm_head.weight'; shape mismatch: (3, 4) != (4, 3)",
    "basic authentication is not supported",
]


def test_innocent_words_stay_whole() -> None:
    for text in INNOCENT:
        assert veiled(text) == text


def test_twin_that_hides_by_parts_of_names_takes_innocent_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "hides_any", lambda name: re.search("token|auth|key|pass|sha", name) is not None)
    assert any(veiled(text) != text for text in INNOCENT)


def test_names_that_hide() -> None:
    for name in NAMES:
        assert hides(name), name
    for name in ("tokenizer", "max_tokens", "author", "pad_token", "tokens_per_second", "sort_key", "PWD", "seed"):
        assert not hides_any(name), name


HOSTILE = [
    "://a:", "://", "token", 'token="', "token: is ", "authorization: is ", "eyJaaaaaaaaa-", "sk-", "hf_", "basic ",
    "bearer ", "-----BEGIN PRIVATE KEY", "a-", "?sig", "&x-", "\\", "token\\", 'token=\\"', "password = ", "secret_",
    "Aa", "token=[", "cookie:", "AGE-SECRET-KEY-", "0a-",
]  # fmt: skip


def test_hostile_texts_are_looked_through_once() -> None:
    """Whatever looked at the rest of the text again for each piece would take minutes."""
    for piece in HOSTILE:
        text = piece * (40_000 // len(piece))
        for look in (veiled, redacted, redaction.veiled_line):
            look(text)
            look(f"{text} end")
