"""What `grpo.ahead` keeps in host memory: the weights that drew, and answers that wait."""

import dataclasses
import json
import math
import tracemalloc

import pytest

from helpers.faults import raises_fault
from helpers.vllm_answers import completion
from planning import test_batch
from planning.test_batch import decide, tokenizer
from surefoot.models.generate import Decoding
from surefoot.models.vllm import VllmRollouts
from surefoot.report.tables.plan import memory_rows
from surefoot.system.hardware import GIB, preset
from surefoot.system.posting import Server

__all__ = ["decide", "tokenizer"]
TINY = test_batch.TINY
ALL, EMBEDDING = 8_030_261_248, 128_256 * 4096  # numbers of Llama-3.1-8B
# A prompt and its answer of 512 tokens: 36 bytes for each id, 32 for a log-probability of each of 256 drawn tokens.
ANSWER = 36 * 512 + 32 * 256


SHARE = 0.1  # of an answer's bytes: the heads of its tuples


def grpo(decide, hardware="a40", offload="optimizer", **grpo):
    request = {"adapter": None, "data": {"max_length": 512, "train": "d.jsonl"}, "parallel": {"offload": offload}}
    section = {"engine": "vllm", "vllm_url": "http://127.0.0.1:9", "max_new_tokens": 256, "group": 8, **grpo}
    return decide(stage="grpo", hardware=hardware, batch={"size": 64}, grpo=section, **request)


@pytest.mark.parametrize("rollouts", [1, 2])
def test_host_memory_has_the_weights_that_draw_and_the_answers(decide, rollouts):
    """With masters in host memory the device has the decoder's linear weights in bf16, and so has the copy."""
    none, one = (grpo(decide, ahead=k, rollout_batches=rollouts).memory for k in (0, 1))
    linear = 32 * 218_103_808
    copy = 2 * linear + 4 * (ALL - linear) + 4 * EMBEDDING  # and one more tensor while they are exchanged
    assert one.host_ahead == copy + rollouts * 64 * ANSWER
    assert one.host - none.host == one.host_ahead
    assert (one.total, one.ahead, none.host_ahead) == (none.total, 0, 0)
    assert grpo(decide, ahead=3, rollout_batches=rollouts).memory.host_ahead == copy + 3 * rollouts * 64 * ANSWER
    shown = {words: size for _, size, words in memory_rows(grpo(decide, ahead=1))}
    assert any("grpo.ahead" in words for words in shown)
    assert not any("grpo.ahead" in words for _, _, words in memory_rows(grpo(decide, ahead=0)))  # twin


def test_the_embedded_engine_keeps_no_weights(decide):
    found = grpo(decide, ahead=1, engine="embedded", vllm_url=None, top_k=5).memory
    assert found.host_ahead == 64 * (ANSWER + 256 * (48 + 5 * 36))


def test_a_cpu_has_one_memory(decide):
    none, one = (
        grpo(lambda **how: decide(TINY, **how), hardware="cpu", offload="none", ahead=k).memory for k in (0, 1)
    )
    assert one.total - none.total == one.ahead > 64 * ANSWER
    assert (one.host, one.host_ahead) == (0, 0)


def test_a_host_too_small_for_it_is_refused(decide, monkeypatch):
    small, enough = (dataclasses.replace(preset("b200"), host=size * GIB) for size in (20, 200))
    monkeypatch.setattr(test_batch, "preset", lambda name: small)
    with raises_fault("SF-MEMORY", "grpo.ahead", "20.0"):
        grpo(decide, offload="none", ahead=1)
    monkeypatch.setattr(test_batch, "preset", lambda name: enough)
    assert grpo(decide, offload="none", ahead=1).memory.host == 4 * (ALL + EMBEDDING) + 64 * ANSWER  # twin


@pytest.mark.parametrize("cut", [0, 5])
def test_an_answer_takes_what_is_forecast(cut):
    """As Python has it after an answer of the server was read."""
    likely = [{300 + place: -math.log(5) for place in range(cut)} for _ in range(256)] if cut else None
    said = json.dumps(completion([1000 + n for n in range(256)], [-0.5 - n for n in range(256)], likely=likely))
    client = VllmRollouts(Server("http://127.0.0.1:9"), "base")
    decoding = Decoding(256, frozenset(), 0, 1.0, top_k=cut, among_kept=True)

    def size(count: int) -> int:
        tracemalloc.start()
        answers = [client._rollout([1000 + n for n in range(256)], json.loads(said), decoding) for _ in range(count)]
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return len(answers) and size

    assert (size(24) - size(8)) / 16 == pytest.approx(ANSWER + (256 * (48 + 36 * cut) if cut else 0), rel=SHARE)
