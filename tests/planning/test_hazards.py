"""What the plan warns of, by family and by what the run does."""

import pytest

from helpers.architectures import GEMMA2, GPT2, LLAMA, OPT, PHI3
from helpers.model_layouts import model_facts, run_config, small_tokenizer
from surefoot.planning.hazards import plan_hazards
from surefoot.planning.notes import Notes
from surefoot.planning.tokenizer import plan_tokenizer

LONGROPE = PHI3 | {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}}


@pytest.mark.parametrize(
    ("config", "compute", "longest", "said"),
    [
        (LLAMA, "fp16", 128, []),
        (GPT2, "fp32", 128, ["resid_pdrop 0.1, embd_pdrop 0.1, attention dropout 0.1"]),
        (GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "fp32", 128, []),
        (OPT | {"dropout": 0.0}, "fp32", 128, ["BOS and EOS at once"]),
        (GEMMA2, "fp16", 128, ["65 504"]),
        (GEMMA2, "bf16", 128, []),
        (LONGROPE, "bf16", 65, ["more than 64 tokens use another rotary table"]),
        (LONGROPE, "bf16", 64, []),
    ],
)
def test_each_hazard_is_said_where_it_applies(tmp_path, config, compute, longest, said):
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
    assert "begins and ends every text" in caution
    assert "'<pad>'" in caution  # the one that is used, by name
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
    assert "phi3 models differ; its tokenizer does not begin a text with it" in plan.bos.reason
