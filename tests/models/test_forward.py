"""Hidden states: no dense mask where none is needed, and the same numbers on either padding side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.doc_pages import ROOT, table
from helpers.plans import adapter_plan, linear_names
from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.kernels import packed_attention as documents
from surefoot.models import forward
from surefoot.models.adapters import add_adapter
from surefoot.models.forward import hidden_states, output_head

# Two padding sides give the same sums in another order; fp32 keeps 1e-7 per operation.
FP32_RELATIVE = 1e-5
LENGTHS = (9, 17, 5)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


def batch(side: str) -> Batch:
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(0, 300, n), np.ones(n, bool), i) for i, n in enumerate(LENGTHS)]
    return collate(examples, pad_id=0, side=side)  # type: ignore[arg-type]


def real(hidden: torch.Tensor, side: str) -> torch.Tensor:
    """The rows of real tokens, example after example."""
    rows = [row[:n] if side == "right" else row[-n:] for row, n in zip(hidden, LENGTHS, strict=True)]
    return torch.cat(rows)


@pytest.fixture
def seen(monkeypatch) -> list[tuple[bool, bool]]:
    """(mask given, causal flag) of every SDPA call."""
    calls = []
    original = F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        calls.append((attn_mask is not None, is_causal))
        return original(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def test_right_padding_runs_causal_kernels_without_a_mask(model, seen):
    hidden_states(model, batch("right"))
    assert seen == [(False, True)] * 2
    seen.clear()
    hidden_states(model, batch("left"))  # twin: left padding does need one
    assert seen == [(True, False)] * 2


def test_what_the_page_says_of_masks_is_what_attention_gets(model, seen, tmp_path):
    rows = table(ROOT / "docs" / "fast-paths.md", "rows", "mask", "`is_causal`", "because")
    told = {row[0]: ({"none": False, "given": True}[row[1]], {"True": True, "False": False}[row[2]]) for row in rows}
    folder = zoo.mistral(tmp_path / "window", attention_dropout=0.0)
    window = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert window.config.sliding_window in range(min(LENGTHS), max(LENGTHS))
    q = torch.randn(1, 2, sum(LENGTHS), 8)
    ways = (
        lambda: hidden_states(model, batch("right")),
        lambda: documents.sdpa(q, q, q, documents.documents_of(LENGTHS, q.device), 1.0),
        lambda: hidden_states(window, batch("right")),
        lambda: hidden_states(window, collate([Example(np.arange(5, 13), np.ones(8, bool), 0)], pad_id=0)),
        lambda: hidden_states(model, batch("left")),
    )
    for (name, expected), way in zip(told.items(), ways, strict=True):
        seen.clear()
        way()
        assert set(seen) == {expected}, name  # the other rows are each one's twin


def test_both_padding_sides_give_the_same_hidden_states(model, monkeypatch):
    left, right = (real(hidden_states(model, batch(side)), side) for side in ("left", "right"))
    assert (left - right).norm() / right.norm() <= FP32_RELATIVE
    monkeypatch.setattr(forward, "positions_from_mask", lambda mask: (mask.flip(-1).cumsum(-1) - 1).flip(-1))  # twin
    wrong = real(hidden_states(model, batch("left")), "left")
    assert (wrong - right).norm() / right.norm() > FP32_RELATIVE


def test_hidden_states_and_head_are_the_models_own(model):
    data = batch("right")
    assert torch.equal(output_head(model)(hidden_states(model, data)), model(input_ids=data.input_ids).logits)


def test_an_injected_adapter_takes_part(model):
    data = batch("right")
    plain = hidden_states(model, data)
    adapted = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base="base")
    try:
        assert torch.equal(hidden_states(adapted, data), plain)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.1
        assert not torch.equal(hidden_states(adapted, data), plain)
        assert torch.equal(output_head(adapted)(hidden_states(adapted, data)), adapted(input_ids=data.input_ids).logits)
    finally:
        adapted.unload()
