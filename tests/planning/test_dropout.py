"""Which dropout a model trains with: asked for, config.json's, or none where a method compares scores."""

from __future__ import annotations

import pytest

from helpers.architectures import GPT2
from helpers.model_layouts import model_facts, run_config
from surefoot.families.model_facts import ModelFacts
from surefoot.planning import dropout
from surefoot.planning.dropout import as_trained, plan_dropout

COMPARING = ("reward", "dpo", "kto", "ppo")


@pytest.fixture
def gpt2(tmp_path) -> ModelFacts:
    return model_facts(tmp_path, GPT2)


def asked(stage, share=None):
    return run_config(stage=stage, model={"path": "unused", "dropout": share})


def drops(model: ModelFacts) -> bool:
    return bool(model.dropouts) or model.attention_dropout > 0


@pytest.mark.parametrize("stage", ["sft", "pretrain", *COMPARING])
def test_without_a_word_a_stage_that_compares_has_none(gpt2, stage):
    assert drops(as_trained(gpt2, asked(stage))) == (stage not in COMPARING)
    choice = plan_dropout(asked(stage))
    assert choice.value == (0.0 if stage in COMPARING else "own")
    assert ("model.dropout: own" in choice.reason) == (stage in COMPARING)


@pytest.mark.parametrize("stage", ["sft", *COMPARING])
def test_own_is_what_config_json_says(gpt2, stage):
    assert as_trained(gpt2, asked(stage, "own")) == gpt2
    assert (plan_dropout(asked(stage, "own")).source, plan_dropout(asked(stage, 0.3)).value) == ("user", 0.3)
    assert as_trained(gpt2, asked(stage, 0.3)).attention_dropout == 0.3


def test_twin_a_stage_that_forgets_to_compare_drops_out(gpt2, monkeypatch):
    monkeypatch.setattr(dropout, "_STILL", {})
    with pytest.raises(AssertionError):
        test_without_a_word_a_stage_that_compares_has_none(gpt2, "dpo")
