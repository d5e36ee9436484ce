"""Environments on an OpenEnv server: its sessions, its fields, and servers that are none or die."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import surefoot
from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.openenv_stub import SCHEMA, guessing, observed, openenv
from helpers.tiny_models import curt
from surefoot.config.methods import EnvironmentTerm
from surefoot.methods.environments.opened import open_environment
from surefoot.methods.environments.replies import Reply


def term_of(address: str, **keys) -> EnvironmentTerm:
    return EnvironmentTerm(name=address, **({"observation": "prompt", "seconds": 5} | keys))


def test_an_episode_is_a_session_with_the_records_fields_and_a_seed():
    with openenv(guessing) as server:
        environment = open_environment(term_of(server.address))
        one, other = environment.make(), environment.make()
        assert one.reset({"word": "heron"}, 7) == Reply(())
        assert other.reset({"word": "trout"}, 8) == Reply(())
        long = "x" * 70_000
        assert one.step(long) == Reply((("user", "2 left " + "é" * 100, ""),), 700.0)
        assert [one.step("no").done, one.step("heron").done] == [False, True]
        assert not other.step("no").done
        one.close()
        assert [session["record"] for session in server.sessions] == [
            {"seed": 7, "word": "heron"},
            {"seed": 8, "word": "trout"},
        ]


def test_fields_that_are_not_named_are_found_in_the_schemas():
    with openenv(guessing) as server:
        episode = open_environment(term_of(server.address, observation=None)).make()
        assert json.loads(episode.reset({}, 0).text) == {"prompt": "", "left": 3}
    alone = {**SCHEMA, "observation": {"properties": {"prompt": {"type": "string"}, "done": {}}}}
    with openenv(guessing, alone) as server:
        episode = open_environment(term_of(server.address, observation=None)).make()
        episode.reset({}, 0)
        assert episode.step("a").text.startswith("2 left")


@pytest.mark.parametrize(
    ("seen", "done", "text"),
    [
        (0, False, "0"),
        (False, False, "false"),
        ({"left": []}, False, '{"left": []}'),
        ("", False, ""),
        (None, False, ""),
        ("over", True, "over"),
        (None, True, ""),
    ],
)
def test_only_none_is_no_text_and_the_server_says_when_it_is_done(seen, done, text):
    with openenv(lambda session, message: observed(0.5, done and message["type"] == "step", prompt=seen)) as server:
        episode = open_environment(term_of(server.address)).make()
        assert episode.reset({}, 0).text == text
        reply = episode.step("a")
    assert (reply.text, reply.done, reply.reward) == (text, done, 0.5)
    assert bool(reply.said) == (text != "" or not done)


@pytest.mark.parametrize(
    ("keys", "schema", "where"),
    [
        ({"action": "code"}, SCHEMA, "grpo.environment.action"),
        ({"observation": "stdout"}, SCHEMA, "grpo.environment.observation"),
        (
            {},
            {**SCHEMA, "action": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
            "grpo.environment.action",
        ),
    ],
)
def test_fields_that_the_server_has_not_are_refused(keys, schema, where):
    with openenv(guessing, schema) as server, raises_fault("SF-ENVIRONMENT", where):
        open_environment(term_of(server.address, **keys))


def test_a_server_of_another_kind_is_refused():
    with answering(lambda path, body: (200, {"hello": 1})) as stub, raises_fault("SF-SERVER", stub.address):
        open_environment(term_of(stub.address))
    with answering(lambda path, body: (200, SCHEMA)) as stub:
        environment = open_environment(term_of(stub.address))
        with raises_fault("SF-SERVER", f"{stub.address}/ws"):
            environment.make()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"type": "error", "data": {"message": "bad\nmove", "code": "EXECUTION_ERROR"}}, "SF-ENVIRONMENT"),
        ({"type": "observation", "data": {"observation": {}}}, "SF-SERVER"),
        ([1], "SF-SERVER"),
        (b"not json", "SF-SERVER"),
        (None, "SF-SERVER"),
    ],
)
def test_what_is_no_observation_is_one_line(said, code):
    with openenv(lambda session, message: said) as server:
        episode = open_environment(term_of(server.address)).make()
        with raises_fault(code, f"{server.address}/ws") as caught:
            episode.reset({}, 0)
        assert "\n" not in caught.value.faults[0].what


def test_a_run_learns_from_a_server_and_counts_sessions_that_die(tmp_path):
    curt(tmp_path / "base")
    rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    died = []

    def once(session, message):
        if message["type"] == "step" and not died:
            died.append(message)
            return None
        if message["type"] == "step" and session["record"]["answer"] == "99":
            return observed(0, True, prompt="")
        return guessing(session, message)

    with openenv(once) as server:
        config = {
            "stage": "grpo",
            "model": str(tmp_path / "base"),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {"train": str(tmp_path / "prompts.jsonl"), "max_length": 400},
            "grpo": {
                "max_new_tokens": 300,
                "group": 4,
                "environment": {"name": server.address, "observation": "prompt"},
            },
            "batch": {"size": 8},
            "precision": "fp32",
            "duration": "1 steps",
            "checkpoint": {"every": "1 steps"},
            "output": str(tmp_path / "run"),
        }
        surefoot.train(config, stream=io.StringIO())
        assert server.asked == ["/schema"] * 2  # before the model is loaded, and after
    (row,) = [
        one
        for one in map(json.loads, (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines())
        if "loss" in one
    ]
    assert row["environment_repeated"] == 1
    assert row["reward"] > 0
    assert row["mismatch"] < 1e-5
    config["duration"] = "2 steps"
    other = {**SCHEMA, "observation": {"properties": {**SCHEMA["observation"]["properties"], "hint": {}}}}
    with openenv(guessing, other) as server, raises_fault("SF-RESUME-CHANGED", "grpo.environment"):
        config["grpo"]["environment"]["name"] = server.address
        surefoot.train(config, stream=io.StringIO(), resume=True)
    with openenv(guessing) as server:  # twin: the same at another address
        config["grpo"]["environment"]["name"] = server.address
        surefoot.train(config, stream=io.StringIO(), resume=True)
