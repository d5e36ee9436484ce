"""A vLLM server, as its protocol has it: right answers become rollouts, wrong ones one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.faults import raises_fault
from helpers.http_stub import answering
from surefoot.models.generate import Decoding
from surefoot.models.rollout import VllmRollouts
from surefoot.system.posting import server

STOP = 2
ASKED = Decoding(max_new_tokens=3, stop_ids=frozenset({STOP}), pad_id=0, temperature=1.0)


def completion(ids, logprobs=None):
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"}]}


def serving(reply):
    """reply: body of a completion request -> its answer."""

    def answer(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        return reply(path, body)

    return answering(answer)


def client(stub, **limits) -> VllmRollouts:
    return VllmRollouts(server(stub.address, "ppo.vllm_url", **({"pause": 0.01, "timeout": 5.0} | limits)))


def test_each_prompt_is_asked_with_a_seed_of_its_own_and_keeps_its_place():
    with serving(lambda _, body: (200, completion([body["prompt"][0], 9, STOP]))) as stub:
        found = client(stub).answer([[5, 6], [7], [5, 6]], replace(ASKED, seed=3))
        bodies = [body for path, body in stub.asked if path == "/v1/completions"]
        again = client(stub).answer([[5, 6]], replace(ASKED, seed=3), [2])
        last = stub.asked[-1][1]
    assert [one.prompt for one in found] == [(5, 6), (7,), (5, 6)]
    assert [one.response for one in found] == [(5, 9, STOP), (7, 9, STOP), (5, 9, STOP)]
    assert all(one.stopped and one.logprobs == (-0.5,) * 3 for one in found)
    assert len({body["seed"] for body in bodies}) == 3  # equal prompts too
    assert last["seed"] in {body["seed"] for body in bodies if body["prompt"] == [5, 6]}
    assert again == found[2:]
    (sent,) = {json.dumps({k: v for k, v in body.items() if k not in ("prompt", "seed")}) for body in bodies}
    sent = json.loads(sent)
    assert (sent["model"], sent["stop_token_ids"], sent["max_tokens"]) == ("base", [STOP], 3)
    assert sent["repetition_penalty"] == 1.0  # whatever the model's generation_config.json says


def test_log_probabilities_at_another_temperature_are_not_handed_on():
    with serving(lambda *_: (200, completion([8, 8, 8]))) as stub:
        (found,) = client(stub).answer([[5]], replace(ASKED, temperature=0.7))
    assert found.logprobs is None
    assert not found.stopped


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        (completion([]), ()),
        (completion([8, STOP], [-1.0]), (2, 1)),
        (completion([8, 8, 8, 8]), (4, 3)),
        (completion([8, STOP, 8]), ()),
        (completion([8, 8]), ()),
        *((completion([8, STOP], [-1.0, value]), ()) for value in (float("nan"), float("-inf"), 0.5)),
        *(
            (form, ("choices", "token_ids", "logprobs"))
            for form in (
                {"choices": []},
                {"choices": [{"text": "hello"}]},
                "no json",
                {"choices": [{"token_ids": [1], "logprobs": None}]},
            )
        ),
    ],
)
def test_an_answer_that_is_wrong_ends_the_run_in_one_line(answer, facts):
    with serving(lambda *_: (200, answer)) as stub:
        place = f"{stub.address}/v1/completions"
        with raises_fault("SF-SERVER", place, *facts) as raised:
            client(stub).answer([[5]], ASKED)
    assert raised.value.exit_code == 3


def test_a_server_that_fails_or_is_slow_ends_the_run():
    with serving(lambda *_: (500, "engine-died")) as stub:
        with raises_fault("SF-SERVER", f"{stub.address}/v1/completions", 500, "engine-died"):
            client(stub).answer([[5]], ASKED)
        assert len(stub.asked) == 1 + 3
    with serving(lambda *_: (200, completion([STOP]))) as stub:
        engine = client(stub, timeout=0.05, tries=1)
        stub.delay = 2.0
        with raises_fault("SF-SERVER", f"{stub.address}/v1/completions"):
            engine.answer([[5]], ASKED)
    with answering(lambda *_: (200, {})) as stub, raises_fault("SF-SERVER", f"{stub.address}/v1/models"):
        client(stub)


def test_the_policy_is_loaded_under_a_new_name_and_the_one_before_dropped(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with serving(lambda path, _: (200, completion([STOP]) if path == "/v1/completions" else "Success")) as stub:
        engine = client(stub)
        engine.synchronise(tmp_path, "step-1")
        engine.synchronise(tmp_path, "step-2")
        engine.answer([[5]], ASKED)
    paths = [(path, body.get("lora_name", body.get("model"))) for path, body in stub.asked[1:]]
    assert paths == [
        ("/v1/load_lora_adapter", "step-1"),
        ("/v1/load_lora_adapter", "step-2"),
        ("/v1/unload_lora_adapter", "step-1"),
        ("/v1/completions", "step-2"),
    ]
    assert stub.asked[1][1]["lora_path"] == str(tmp_path)


def test_what_vllm_cannot_serve_is_refused_before_it_is_asked(tmp_path):
    with serving(lambda *_: (404, "not-found")) as stub:
        engine = client(stub)
        with raises_fault("SF-ADAPTER-FIT", tmp_path):
            engine.synchronise(tmp_path, "a")
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
        with raises_fault("SF-ADAPTER-DORA", f"{tmp_path}/adapter_config.json"):
            engine.synchronise(tmp_path, "a")
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        with raises_fault("SF-SERVER", f"{stub.address}/v1/load_lora_adapter", 404, "not-found"):
            engine.synchronise(tmp_path, "a")
