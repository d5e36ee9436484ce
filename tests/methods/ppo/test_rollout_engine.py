"""What writes the answers of a PPO run, and what is said before its first step: servers, dropout."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import surefoot
from helpers.faults import gives, raises_fault
from helpers.http_stub import answering
from helpers.tiny_models import tiny_llama
from helpers.vllm_answers import completion
from methods.grpo.test_alongside import drawing
from surefoot.methods.ppo import start
from surefoot.system import posting
from surefoot.system.errors import EnvironmentFault


def config_of(folder: Path, **changes) -> dict:
    tiny_llama(folder / "base")
    rows = [{"prompt": f"Say number {n}."} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "stage": "ppo",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(folder / "prompts.jsonl"), "max_length": 64},
        "ppo": {"max_new_tokens": 4},
        "batch": {"size": 4},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "duration": "2 steps",
        "output": str(folder / "run"),
        **changes,
    }


def run(config: dict) -> str:
    said = io.StringIO()
    surefoot.train(config, reward=lambda prompts, responses: [len(text) / 9 for text in responses], stream=said)
    return said.getvalue()


def test_a_server_is_told_of_the_weights_before_each_rollout(tmp_path):
    weights: list[bytes] = []

    def reply(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}]}
        if path == "/v1/load_lora_adapter":
            weights.append((Path(body["lora_path"]) / "adapter_model.safetensors").read_bytes())
        if path != "/inference/v1/generate":
            return 200, "Success"
        ids = [40 + body["sampling_params"]["seed"] % 9, 50, 51, 52]
        return 200, completion(ids, [-5.0] * 4, model=body["model"])

    with answering(reply) as stub:
        ppo = {"max_new_tokens": 4, "engine": "vllm", "vllm_url": stub.address, "temperature": 0.9}
        run(config_of(tmp_path, ppo=ppo))
    names = [body["lora_name"] for path, body in stub.asked if path == "/v1/load_lora_adapter"]
    asked = [body["model"] for path, body in stub.asked if path == "/inference/v1/generate" and body["model"] != "base"]
    assert len(set(names)) == 2
    assert asked == [names[0]] * 4 + [names[1]] * 4
    assert weights[0] != weights[1]  # the policy had learned in between
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "run").glob(".policy-*"))


@pytest.mark.parametrize("looks", [True, False])
def test_a_server_that_computes_with_old_weights_ends_the_run(tmp_path, monkeypatch, looks):
    """It tells the base's log-probabilities under every name. The twin does not compare after the first rollout."""
    config = config_of(tmp_path)
    if not looks:
        monkeypatch.setattr(start, "check_server", lambda *given: None)
    with drawing(tmp_path) as (address, _), raises_fault("SF-PLAN-BROKEN", "ppo") if looks else nullcontext():
        config["ppo"] |= {"engine": "vllm", "vllm_url": address}
        run(config)
    rows = (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()
    assert len(rows) == (1 if looks else 2)


def test_a_run_with_its_own_engine_asks_no_server(tmp_path):
    with answering(lambda *_: (200, {})) as stub:
        run(config_of(tmp_path))
    assert stub.asked == []


def test_a_server_that_is_not_there_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(posting, "Server", partial(posting.Server, pause=0.0))
    ppo = {"max_new_tokens": 4, "engine": "vllm", "vllm_url": "http://127.0.0.1:9"}
    with pytest.raises(EnvironmentFault) as error:
        run(config_of(tmp_path, ppo=ppo))
    (fault,) = error.value.faults
    assert (error.value.exit_code, fault.code) == (3, "SF-SERVER")
    assert "\n" not in str(fault)
    assert (tmp_path / "run" / "trainer_log.jsonl").read_text() == ""


def test_a_server_takes_no_dora(tmp_path):
    ppo = {"max_new_tokens": 4, "engine": "vllm", "vllm_url": "http://127.0.0.1:9"}
    with raises_fault("SF-CONFIG-CONFLICT", "ppo.engine"):
        run(config_of(tmp_path, adapter={"kind": "dora", "rank": 4}, ppo=ppo))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_of_the_policy_is_a_caution(tmp_path, share):
    said = run(config_of(tmp_path, adapter={"kind": "lora", "rank": 4, "dropout": share}, duration="1 steps"))
    cautions = [line for line in said.splitlines() if line.startswith("caution: ") and gives(line, "dropout")]
    assert [gives(line, 0.1) for line in cautions] == [True] * (share > 0)
