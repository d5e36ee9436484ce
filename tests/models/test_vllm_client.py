"""A vLLM server, as its protocol has it: right answers become rollouts, wrong ones one line."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from helpers.faults import raises_fault
from helpers.http_stub import answering
from helpers.vllm_answers import completion
from surefoot.models.generate import Decoding
from surefoot.models.vllm import VllmRollouts
from surefoot.system.posting import server

STOP = 2
PATH = "/inference/v1/generate"
ASKED = Decoding(max_new_tokens=3, stop_ids=frozenset({STOP}), pad_id=0, temperature=1.0)


def is_probe(body):
    return body["sampling_params"]["temperature"] == 2.0


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
    with serving(lambda _, body: (200, completion([body["token_ids"][0], 9, STOP]))) as stub:
        found = client(stub).answer([[5, 6], [7], [5, 6]], replace(ASKED, seed=3))
        bodies = [body for path, body in stub.asked if path == PATH]
        again = client(stub).answer([[5, 6]], replace(ASKED, seed=3), [2])
        last = stub.asked[-1][1]
    assert [one.prompt for one in found] == [(5, 6), (7,), (5, 6)]
    assert [one.response for one in found] == [(5, 9, STOP), (7, 9, STOP), (5, 9, STOP)]
    assert all(one.stopped and one.logprobs == (-0.5,) * 3 for one in found)
    seeds = {body["sampling_params"].pop("seed"): body["token_ids"] for body in bodies}
    assert len(seeds) == 3  # equal prompts too
    assert seeds[last["sampling_params"]["seed"]] == [5, 6]
    assert again == found[2:]
    (sent,) = {json.dumps({k: v for k, v in body.items() if k != "token_ids"}) for body in bodies}
    sent = json.loads(sent)
    sampling = sent["sampling_params"]
    assert (sent["model"], sampling["stop_token_ids"], sampling["max_tokens"]) == ("base", [STOP], 3)
    assert sampling["repetition_penalty"] == 1.0  # whatever the model's generation_config.json says


def test_token_ids_go_there_and_come_back_and_no_text_is_made_of_either():
    """Of any ids, also of those whose text has other ids."""
    draw = random.Random(1)
    for _ in range(20):
        prompt = [draw.randrange(3, 30_000) for _ in range(draw.randrange(1, 9))]
        answer = [draw.randrange(3, 30_000) for _ in range(2)] + [STOP]
        with serving(lambda *_, answer=answer: (200, completion(answer, text="another text"))) as stub:
            (found,) = client(stub).answer([prompt], ASKED)
            (body,) = [body for path, body in stub.asked if path == PATH]
        assert (body["token_ids"], body["sampling_params"]["detokenize"]) == (prompt, False)
        assert not any(isinstance(value, str) for key, value in body.items() if key != "model")
        assert (found.prompt, found.response) == (tuple(prompt), tuple(answer))


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize(
    ("asked", "told"),  # by which mode
    [
        ({}, {"raw", "processed"}),
        ({"temperature": 0.7}, {"processed"}),
        ({"temperature": 0.0}, set()),
        ({"top_p": 0.9}, {"raw"}),  # PPO: probabilities among all
        ({"top_p": 0.9, "top_k": 2, "among_kept": True}, {"processed"}),
        ({"temperature": 0.7, "among_kept": True}, {"processed"}),
    ],
)
def test_log_probabilities_are_handed_on_where_they_are_those_that_were_asked_for(mode, asked, told):
    likely = [{8: math.log(0.7), 9: math.log(0.3), 7: -9999.0}] * 3

    def reply(_, body):
        if is_probe(body):
            return 200, completion([4], [0.0 if mode == "processed" else -0.25])
        return 200, completion([8, 8, 9], [math.log(0.7), math.log(0.7), math.log(0.3)], likely=likely)

    with serving(reply) as stub:
        asking = replace(ASKED, **asked)
        if asking.cuts and asking.among_kept and mode == "raw":
            with raises_fault("SF-SERVER", stub.address):
                client(stub).answer([[5]], asking)
            return
        (found,) = client(stub).answer([[5]], asking)
    assert (found.logprobs is not None) == (mode in told)
    assert found.kept == (((8, 9),) * 3 if asking.among_kept and asking.cuts else None)


def test_what_could_be_drawn_has_to_be_told_whole():
    likely = [{8: math.log(0.6), 9: math.log(0.3)}] * 3  # a tenth is missing
    with (
        serving(
            lambda _, body: (200, completion([4], [0.0]) if is_probe(body) else completion([8] * 3, likely=likely))
        ) as stub,
        raises_fault("SF-SERVER", f"{stub.address}{PATH}"),
    ):
        client(stub).answer([[5]], replace(ASKED, top_k=2, among_kept=True))


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
            (form, ("choices", "token_ids", "logprobs", "weight_versions"))
            for form in (
                {"choices": []},
                {"choices": [{"text": "hello"}]},
                "no json",
                {"model": "base", "choices": [{"token_ids": [1], "logprobs": None}]},
                completion([8, STOP], weight_versions=None),
            )
        ),
    ],
)
def test_an_answer_that_is_wrong_ends_the_run_in_one_line(answer, facts):
    with serving(lambda *_: (200, answer)) as stub:
        place = f"{stub.address}{PATH}"
        with raises_fault("SF-SERVER", place, *facts) as raised:
            client(stub).answer([[5]], ASKED)
    assert raised.value.exit_code == 3


def test_a_server_that_fails_or_is_slow_ends_the_run():
    with serving(lambda *_: (500, "engine-died")) as stub:
        with raises_fault("SF-SERVER", f"{stub.address}{PATH}", 500, "engine-died"):
            client(stub).answer([[5]], ASKED)
        assert len(stub.asked) == 1 + 3
    with serving(lambda *_: (200, completion([STOP]))) as stub:
        engine = client(stub, timeout=0.05, tries=1)
        stub.delay = 2.0
        with raises_fault("SF-SERVER", f"{stub.address}{PATH}"):
            engine.answer([[5]], ASKED)
    with answering(lambda *_: (200, {})) as stub, raises_fault("SF-SERVER", f"{stub.address}/v1/models"):
        client(stub)


def drew(name):
    """Drawn by whichever adapter is asked, or by what `name` says."""
    return lambda path, body: (
        200,
        completion([STOP], model=name or body["model"]) if path == PATH else "Success",
    )


def test_the_policy_is_loaded_under_a_new_name_and_the_one_before_dropped(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with serving(drew(None)) as stub:
        engine = client(stub)
        engine.synchronize(tmp_path, "step-1")
        engine.synchronize(tmp_path, "step-2")
        engine.answer([[5]], ASKED)
    paths = [(path, body.get("lora_name", body.get("model"))) for path, body in stub.asked[1:]]
    assert paths == [
        ("/v1/load_lora_adapter", "step-1"),
        ("/v1/load_lora_adapter", "step-2"),
        ("/v1/unload_lora_adapter", "step-1"),
        (PATH, "step-2"),
    ]
    assert stub.asked[1][1]["lora_path"] == str(tmp_path)


@pytest.mark.parametrize("name", ["base", "step-1"])
def test_an_answer_that_another_adapter_drew_is_refused(tmp_path, name):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with serving(drew(name)) as stub:
        engine = client(stub)
        engine.synchronize(tmp_path, "step-2")
        with raises_fault("SF-SERVER", f"{stub.address}{PATH}", name, "step-2"):
            engine.answer([[5]], ASKED)


class WithWeights:
    """A server that loads all weights of a folder; `stays`: it goes on answering with those of that name."""

    def __init__(self, stays=None, forgets=True):
        self.version, self.stays, self.forgets = "default", stays, forgets

    def __call__(self, path, body):
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/reset_prefix_cache":
            return 200, {"success": self.forgets}
        return 200, completion([8, STOP], version=self.stays or self.version) if path == PATH else {}


def test_all_weights_are_loaded_while_nothing_is_answered(tmp_path):
    with serving(WithWeights()) as stub:
        engine = client(stub)
        engine.synchronize(tmp_path, "step-1")
        (found,) = engine.answer([[5]], ASKED)
        paths = [path for path, _ in stub.asked[1:]]
        reload = stub.asked[2][1]
    assert found.response == (8, STOP)
    assert paths == [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        PATH,
    ]
    assert reload == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}


def test_an_answer_by_other_weights_is_refused(tmp_path):
    with serving(WithWeights(stays="step-1")) as stub:
        engine = client(stub)
        engine.synchronize(tmp_path, "step-2")
        with raises_fault("SF-SERVER", f"{stub.address}{PATH}", "step-1", "step-2"):
            engine.answer([[5]], ASKED)
    spans = [{"version": "step-2", "start": 0, "end": 1}, {"version": "step-3", "start": 1, "end": 2}]
    mixed = completion([8, STOP], weight_versions=spans)  # half of it before the weights were loaded
    with serving(lambda *_: (200, mixed)) as stub, raises_fault("SF-SERVER", f"{stub.address}{PATH}", "step-3"):
        client(stub).answer([[5]], ASKED)


def test_a_server_that_remembers_prompts_under_the_old_weights_is_refused_and_goes_on(tmp_path):
    with serving(WithWeights(forgets=False)) as stub, raises_fault("SF-SERVER", f"{stub.address}/reset_prefix_cache"):
        client(stub).synchronize(tmp_path, "step-1")
    assert stub.asked[-1][0] == "/resume"


def test_what_vllm_cannot_serve_is_refused_before_it_is_asked(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    with serving(lambda *_: (404, "not-found")) as stub:
        engine = client(stub)
        with raises_fault("SF-ADAPTER-DORA", f"{tmp_path}/adapter_config.json"):
            engine.synchronize(tmp_path, "a")
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        with raises_fault("SF-SERVER", f"{stub.address}/v1/load_lora_adapter", 404, "not-found"):
            engine.synchronize(tmp_path, "a")
