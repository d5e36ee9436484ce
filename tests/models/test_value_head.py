"""A value head on every family: the scores of transformers' own classes, whatever the padding and the neighbors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from helpers.architectures import OPT, TINY, build
from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.models import forward
from surefoot.models.adapters import add_adapter
from surefoot.models.decoder import decoder_matrices
from surefoot.models.forward import causal_model, language_models
from surefoot.models.value_head import (
    VALUE_HEAD_FILE,
    ScoredModel,
    ValueHead,
    load_value_head,
    save_value_head,
    value_width,
)

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
OPT_350M = OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
CONFIGS = {**TINY, "opt projected": OPT_350M}
LENGTHS = (21, 5, 13)


def language_model(config) -> nn.Module:
    torch.manual_seed(0)
    eager = config["model_type"] in ("gemma2", "gemma3_text")
    model = build(config, device="cpu", attn_implementation="eager" if eager else "sdpa").eval()
    for parameter in model.parameters():  # away from zeros and ones, so that a part left out would be seen
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def drawn_head(width: int) -> ValueHead:
    head = ValueHead(width)
    torch.manual_seed(1)
    nn.init.normal_(head.summary.weight)
    return head


@pytest.fixture(params=CONFIGS)
def scored(request) -> ScoredModel:
    model = language_model(CONFIGS[request.param])
    return ScoredModel(model, drawn_head(value_width(model)))


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    return [Example(rng.integers(3, 60, n), np.ones(n, bool), i) for i, n in enumerate(LENGTHS)]


@torch.no_grad()
def last_values(model: ScoredModel, batch: Batch) -> torch.Tensor:
    """At the last real token of every row."""
    values, mask = model.values(batch), batch.attention_mask
    at = [length - 1 if mask is None else -1 for length in batch.lengths]
    return values[torch.arange(len(at)), torch.tensor(at)]


@torch.no_grad()
def test_the_score_is_that_of_the_sequence_classifier(scored):
    inner = causal_model(scored)
    inner.config.num_labels = 1
    theirs = AutoModelForSequenceClassification.from_config(inner.config)
    if not hasattr(theirs, "score"):
        pytest.skip("transformers has no such class for the family")
    decoder = {k: v for k, v in inner.state_dict().items() if not k.startswith("lm_head.")}
    theirs.load_state_dict(decoder | {"score.weight": scored.v_head.summary.weight})
    theirs.eval()
    found = last_values(scored, collate(examples(), 0))
    wanted = [float(theirs(input_ids=torch.from_numpy(one.ids)[None]).logits) for one in examples()]
    assert torch.isfinite(found).all()
    assert found.tolist() == pytest.approx(wanted, rel=FP32_RELATIVE, abs=FP32_RELATIVE)


def test_a_score_depends_on_no_padding_and_no_other_row(scored, monkeypatch):
    together = last_values(scored, collate(examples(), 0))
    others = [
        last_values(scored, collate(examples(), 7)),  # another id for padding
        last_values(scored, collate(examples(), 0, "left")),
        torch.cat([last_values(scored, collate([one], 0)) for one in examples()]),
    ]
    for other in others:
        assert torch.allclose(other, together, rtol=FP32_RELATIVE, atol=FP32_RELATIVE)
    monkeypatch.setattr(forward, "positions_from_mask", lambda mask: (mask.flip(-1).cumsum(-1) - 1).flip(-1))  # twin
    wrong = last_values(scored, collate(examples(), 0, "left"))
    assert not torch.allclose(wrong, together, rtol=FP32_RELATIVE, atol=FP32_RELATIVE)


def test_values_are_fp32_under_autocast_and_their_product_too():
    model = language_model(TINY["llama"])
    scored = ScoredModel(model, drawn_head(value_width(model)))
    with torch.autocast("cpu", torch.bfloat16):
        values = scored.values(collate(examples(), 0))
        hidden = forward.hidden_states(scored, collate(examples(), 0))
    assert values.dtype == torch.float32
    assert torch.equal(values, scored.v_head(hidden))  # computed outside autocast here
    rounded = hidden.bfloat16() @ scored.v_head.summary.weight.bfloat16().T  # twin: what autocast would do
    assert not torch.equal(values, rounded.squeeze(-1).float())


def test_the_width_is_what_leaves_the_decoder():
    assert value_width(language_model(OPT_350M)) == 16
    assert value_width(language_model(TINY["llama"])) == 32


def test_one_language_model_is_found_whatever_is_around_it():
    model = language_model(TINY["llama"])
    adapted = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base="base")
    assert causal_model(nn.ModuleDict({"module": ScoredModel(adapted, ValueHead(32))})) is model
    with pytest.raises(ValueError, match="unpack"):
        causal_model(ValueHead(32))


def test_matrices_of_all_language_models_are_found_and_a_shared_one_once():
    first, second = language_model(TINY["llama"]), language_model(OPT_350M)
    several = nn.ModuleDict({"actor": first, "critic": ScoredModel(second, ValueHead(16)), "again": first})
    assert language_models(several) == [first, second]
    own = {f"actor.{name}" for name in decoder_matrices(first)}
    assert decoder_matrices(several) == own | {f"critic.backbone.{name}" for name in decoder_matrices(second)}


def test_a_saved_head_comes_back_bit_for_bit(tmp_path):
    head, other = drawn_head(8), ValueHead(8)
    save_value_head(head, tmp_path)
    load_value_head(other, tmp_path)
    assert torch.equal(head.summary.weight, other.summary.weight)
    before = (tmp_path / VALUE_HEAD_FILE).read_bytes()
    save_value_head(other, tmp_path)
    assert (tmp_path / VALUE_HEAD_FILE).read_bytes() == before


def test_a_head_of_another_model_or_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises_fault("SF-MODEL-KIND", tmp_path, "value_head.safetensors", "score.weight"):
        load_value_head(ValueHead(8), tmp_path)
    save_value_head(drawn_head(16), tmp_path)
    with raises_fault("SF-MODEL-KEYS", tmp_path, [1, 16]):
        load_value_head(ValueHead(8), tmp_path)
    head = drawn_head(8)
    head.summary.weight.data[0, 3] = float("nan")
    save_value_head(head, tmp_path)
    with raises_fault("SF-MODEL-NUMBERS", tmp_path):
        load_value_head(ValueHead(8), tmp_path)
