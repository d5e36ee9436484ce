"""What the plan warns of, by family and by what the run does.

Which dropout a model trains with: asked for, config.json's, or none where a method compares scores.
"""

from dataclasses import replace

import pytest

from helpers.architectures import GEMMA2, GPT2, LLAMA, OPT, PHI3
from helpers.faults import gives
from helpers.model_layouts import model_facts, run_config, small_tokenizer
from surefoot.config import schema
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.planning.notes import Notes, as_trained, plan_dropout, plan_hazards
from surefoot.planning.tokenizer import plan_tokenizer

LONGROPE = PHI3 | {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}}


def test_each_hazard_is_said_where_it_applies(tmp_path):
    for config, compute, longest, said in [
        (LLAMA, "fp16", 128, []),
        (GPT2, "fp32", 128, ["resid_pdrop 0.1, embd_pdrop 0.1, attention dropout 0.1"]),
        (GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "fp32", 128, []),
        (OPT | {"dropout": 0.0}, "fp32", 128, ["BOS and EOS at once"]),
        (GEMMA2, "fp16", 128, ["65 504"]),
        (GEMMA2, "bf16", 128, []),
        (LONGROPE, "bf16", 65, ["more than 64 tokens use another rotary table"]),
        (LONGROPE, "bf16", 64, []),
    ]:
        notes = Notes()
        plan_hazards(model_facts(tmp_path, config), compute, longest, notes)
        assert len(notes.cautions) == len(said)
        for caution, part in zip(notes.cautions, said, strict=True):
            assert part in caution


def tokens(folder, config, *, specials=("<s>", "<pad>", "</s>"), **request):
    notes = Notes()
    roles = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "</s>"}
    files = small_tokenizer(folder / "t", specials=list(specials), roles=roles)
    return plan_tokenizer(run_config(**request), model_facts(folder / "m", config), files, notes), notes


def test_a_forbidden_pad_of_the_tokenizer_is_replaced_with_the_reason(tmp_path):
    plan, notes = tokens(tmp_path, OPT)
    assert plan.pad_token.value == "<pad>"
    (caution,) = notes.cautions
    assert ("'</s>'" in caution, "'<pad>'" in caution) == (True, True)  # the forbidden one and the one that is used
    assert tokens(tmp_path, LLAMA)[0].pad_token.value == "</s>"  # twin: another family may


def test_a_forbidden_pad_that_is_all_there_is_stays_and_no_other_is_named(tmp_path):
    """As surefoot itself writes it where no token is free: EOS, masked by position."""
    plan, notes = tokens(tmp_path, OPT | {"vocab_size": 12}, specials=("<s>", "</s>"))
    assert plan.pad_token.value == "</s>"
    assert not notes.cautions


def test_a_forbidden_pad_by_hand_is_refused(tmp_path):
    _, notes = tokens(tmp_path, OPT, tokenizer={"pad": "</s>"})
    assert [fault.where for fault in notes.faults] == ["tokenizer.pad"]


def test_phi3_follows_its_tokenizer(tmp_path):
    plan, _ = tokens(tmp_path, PHI3)
    assert plan.bos.value is False
    assert gives(plan.bos.reason, "phi3")


COMPARING = ("reward", "dpo", "kto", "ppo")


@pytest.fixture
def gpt2(tmp_path) -> ModelFacts:
    return model_facts(tmp_path, GPT2)


def asked(stage, share=None):
    return run_config(stage=stage, model={"path": "unused", "dropout": share})


def drops(model: ModelFacts) -> bool:
    return bool(model.dropouts) or model.attention_dropout > 0


def check_without_a_word_a_stage_that_compares_has_none(gpt2, stage):
    assert drops(as_trained(gpt2, asked(stage))) == (stage not in COMPARING)
    choice = plan_dropout(asked(stage))
    assert choice.value == (0.0 if stage in COMPARING else "own")
    assert gives(choice.reason, "model.dropout") == (stage in COMPARING)


def test_without_a_word_a_stage_that_compares_has_none(gpt2):
    for stage in ["sft", "pretrain", *COMPARING]:
        check_without_a_word_a_stage_that_compares_has_none(gpt2, stage)


def test_own_is_what_config_json_says(gpt2):
    for stage in ["sft", *COMPARING]:
        assert as_trained(gpt2, asked(stage, "own")) == gpt2
        assert (plan_dropout(asked(stage, "own")).source, plan_dropout(asked(stage, 0.3)).value) == ("user", 0.3)
        assert as_trained(gpt2, asked(stage, 0.3)).attention_dropout == 0.3


def test_twin_a_stage_that_forgets_to_compare_drops_out(gpt2, monkeypatch):
    forgetful = {name: replace(method, compared="") for name, method in METHODS.items()}
    monkeypatch.setattr(schema, "METHODS", forgetful)
    with pytest.raises(AssertionError):
        check_without_a_word_a_stage_that_compares_has_none(gpt2, "dpo")
