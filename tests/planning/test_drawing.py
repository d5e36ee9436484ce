"""How many answers are drawn at once, and the memory that they take."""

import pytest
import torch

from helpers.tiny_models import tiny_llama
from planning.test_batch import decide, tokenizer
from surefoot.models.generate import Decoding, draw_steps
from surefoot.models.kv_cache import PreallocatedLayer
from surefoot.models.load import load_model
from surefoot.planning import drawing
from surefoot.planning.memory import fits, usable
from surefoot.report.tables.plan import memory_rows
from surefoot.system.messages import GIB

__all__ = ["decide", "tokenizer"]
LORA = {"kind": "lora", "rank": 16}
# Keys and values of Llama-3.1-8B: 32 layers, 8 heads of 128, twice, in bf16.
TOKEN = 32 * 8 * 128 * 2 * 2


def grpo(decide, *, micro=4, size=64, again="on", length=2048, answer=512, **request):
    section = {"group": 8, "max_new_tokens": answer, "rewards": ["numeric"], **request.pop("grpo", {})}
    data = {"max_length": length, "train": "d.jsonl", **request.pop("data", {})}
    how = {"adapter": LORA, "batch": {"size": size, "micro": micro}, "gradient_checkpointing": again, "data": data}
    return decide(stage="grpo", grpo=section, precision="bf16", **how | request).memory


def test_where_layers_are_computed_again_drawing_takes_more_than_an_update(decide):
    """Eight times the rows of a micro-batch: their keys and values alone are 12 GiB, where an update keeps 4."""
    found = grpo(decide)
    assert found.drawn == 32
    update = found.total - found.drawing
    keys_and_values = 1.5 * 32 * 2048 * TOKEN
    assert found.drawing > keys_and_values - found.activations - found.gradients - found.logits
    assert (
        1.0 < (found.drawing + found.gradients + found.activations + found.logits - found.apart) / keys_and_values < 1.3
    )
    assert any(name == "rollouts" for name, _, _ in memory_rows_of(found))
    once = grpo(decide, again="off")
    assert (once.drawn, once.drawing) == (32, 0)
    assert once.total > found.total > update
    assert not any(name == "rollouts" for name, _, _ in memory_rows_of(once))


def memory_rows_of(memory):
    from types import SimpleNamespace

    parallel = SimpleNamespace(ranks=SimpleNamespace(value=1))
    return list(memory_rows(SimpleNamespace(memory=memory, parallel=parallel)))


def test_fewer_are_drawn_at_once_where_memory_ends(decide, monkeypatch):
    whole = grpo(decide)
    small = grpo(decide, memory=26)
    assert 1 < small.drawn < whole.drawn
    assert fits(small)
    assert whole.total > usable(26 * GIB)
    monkeypatch.setattr(drawing, "usable", lambda available: 1 << 60)  # twin: without a limit it would not fit
    assert not fits(grpo(decide, memory=26))


def test_no_more_than_there_are_are_drawn(decide):
    assert grpo(decide, size=16).drawn == 16
    assert grpo(decide, size=16, grpo={"rollout_batches": 2}).drawn == 32
    assert grpo(decide, size=16, data={"eval": "e.jsonl"}).drawn == 32  # an evaluation may have more prompts


@pytest.mark.parametrize(
    "other", [{"stage": "sft"}, {"grpo": {"engine": "vllm", "vllm_url": "http://127.0.0.1:9"}}], ids=["sft", "server"]
)
def test_what_draws_nothing_here_takes_nothing_for_it(decide, other):
    if "stage" in other:
        found = decide(adapter=LORA, batch={"size": 64, "micro": 4}, gradient_checkpointing="on").memory
    else:
        found = grpo(decide, **other)
    assert (found.drawn, found.drawing) == (0, 0)


def test_keys_and_values_take_at_most_half_more_than_their_tokens(tmp_path, monkeypatch):
    """As the cache itself holds them, from prompts of several lengths on."""
    model = load_model(
        tiny_llama(tmp_path), dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu")
    )
    kept, real = {}, PreallocatedLayer.update

    def update(self, *given, **named):
        found = real(self, *given, **named)
        kept[id(self)] = sum(one.nbytes for one in self._room)
        return found

    monkeypatch.setattr(PreallocatedLayer, "update", update)
    config = model.config
    of_token = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    for prompt, answer in ((100, 8), (100, 120), (200, 150)):
        kept.clear()
        decoding = Decoding(max_new_tokens=answer, stop_ids=(), pad_id=0, temperature=1.0, seed=0)
        for _ in draw_steps(model, [[5] * prompt, [6] * prompt], decoding):
            pass
        tokens = 2 * (prompt + answer)
        assert tokens * of_token <= sum(kept.values()) <= drawing._ROOM * tokens * of_token
