"""Padded rows unless a form of attention passed its check and brings a gain; every refusal has its name."""

import re
from dataclasses import replace

import pytest

from helpers.architectures import LLAMA
from helpers.faults import gives
from helpers.model_layouts import model_facts, run_config
from surefoot.planning.measurements import AttentionTrial, LengthFacts, longest_document
from surefoot.planning.notes import Notes
from surefoot.planning.packing import may_share, open_forms, plan_packing
from surefoot.system.hardware import preset

FAST = (AttentionTrial("matmul", 0.01, ""), AttentionTrial("sdpa", 0.03, ""), AttentionTrial("padded", 0.02, ""))
SLOW = (AttentionTrial("matmul", 0.05, ""), AttentionTrial("sdpa", 0.03, ""), AttentionTrial("padded", 0.02, ""))
WRONG = (AttentionTrial("matmul", 0.0, "the output is off"), AttentionTrial("padded", 0.02, ""))


@pytest.fixture
def facts(tmp_path):
    return model_facts(tmp_path, LLAMA)


def plan(facts, trials=(), *, packing="auto", padding=0.2, notes=None, longest=300, **keys):
    notes = notes or Notes()
    found = plan_packing(
        run_config(data={"train": "d.json", "packing": packing}, **keys),
        facts,
        preset("cpu"),
        compute="fp32",
        longest=longest,
        lengths=LengthFacts(longest=longest, typical=200, mean=100.0, mix=(50, 100, 200), padding=padding),
        trials=trials,
        notes=notes,
    )
    return found.value, found.source, found.reason, [fault.where for fault in notes.faults]


def test_what_was_measured_decides(facts):
    value, source, reason, _ = plan(facts, FAST)
    assert (value, source) == ("matmul", "measured")
    assert gives(reason, "20%")
    assert re.findall(r"(matmul|sdpa|padded) (\d+)", reason) == [("matmul", "10"), ("sdpa", "30"), ("padded", "20")]


def test_the_default_is_left_for_a_gain_alone(facts):
    for trials, padding, value in [
        (FAST, 0.0, "matmul"),  # nothing to save, but attention itself is twice as fast
        (SLOW, 0.4, "plain"),  # attention alone would cost more than it saves
        ((AttentionTrial("sdpa", 0.015, ""), FAST[2]), 0.01, "plain"),  # a lead that could turn round
        ((AttentionTrial("sdpa", 0.015, ""), FAST[2]), 0.06, "sdpa"),  # padding is counted, not timed
        (WRONG, 0.4, "plain"),
        ((), 0.4, "plain"),
    ]:
        assert plan(facts, trials, padding=padding)[0] == value


def test_what_is_right_and_could_not_be_timed_is_no_fault_and_no_reason(facts):
    """As where other programs hold a GPU's memory; the twin is a form that is wrong."""
    untimed = (AttentionTrial("sdpa", 0.0, "", untimed="OOM"), FAST[2])
    assert plan(facts, untimed)[:2] == ("plain", "default")
    assert plan(facts, untimed, packing="on")[::3] == ("sdpa", [])
    wrong = (AttentionTrial("matmul", 0.0, "wrong"), *untimed)
    assert plan(facts, wrong, packing="on")[0] == "sdpa"
    assert plan(facts, WRONG, packing="on")[3] == ["data.packing"]
    unlike = (FAST[0], AttentionTrial("padded", 0.0, "", untimed="OOM"))
    assert gives(plan(facts, unlike)[2], "OOM")


def test_the_users_word_stands(facts):
    assert plan(facts, FAST, packing="off")[:2] == ("plain", "user")
    assert plan(facts, SLOW, packing="on")[:2] == ("sdpa", "user")
    assert plan(facts, packing="on")[:2] == ("sdpa", "user")
    assert plan(facts, WRONG, packing="on")[3] == ["data.packing"]


def test_obstacles(facts):
    for change, keys, why in [
        ({}, {"stage": "ppo", "ppo": {"reward": "score.py:score"}}, "ppo"),
        ({}, {"compile": "default"}, "torch.compile"),
        ({}, {"attention": "eager"}, "eager"),
        ({"attention_dropout": 0.1}, {}, "attention_dropout"),
        ({"window": 200}, {}, "200"),
        ({"without_sdpa": "caps"}, {}, "caps"),
    ]:
        model = replace(facts, **change)
        value, _, reason, faults = plan(model, FAST, **keys)
        assert value == "plain"
        assert gives(reason, why)
        assert not faults
        assert plan(model, FAST, packing="on", **keys)[3] == ["data.packing"]


def test_a_window_as_long_as_every_document_is_none(facts):
    assert plan(replace(facts, window=301), FAST)[0] == "matmul"


def test_kernels_that_were_named_take_each_document(facts):
    forms = open_forms(run_config(attention={"math": "off"}), facts, preset("cpu"), "fp32", 300)
    assert forms == ("sdpa",)
    assert open_forms(run_config(), facts, preset("h100"), "bf16", 300) == ("varlen",)


def trial(form, seconds, failure=""):
    return AttentionTrial(form, 0.0 if failure else seconds, failure)


def on_a_gpu_with(facts, *trials, packages=("flash_attn_2", "flash_attn_3"), packing="on"):
    """The form and its reason."""
    found = plan_packing(
        run_config(data={"train": "d.json", "packing": packing}),
        facts,
        replace(preset("h100"), packages=packages),
        compute="bf16",
        longest=300,
        lengths=LengthFacts(longest=300, typical=200, mean=100.0, mix=(50, 100), padding=0.3),
        trials=[*trials, trial("padded", 2e-3)],
        notes=Notes(),
    )
    return found.value, found.reason


def test_packages_that_are_installed_are_tried_after_torchs_kernel(facts):
    machine = replace(preset("h100"), packages=("flash_attn_3", "flash_attn_2"))
    assert open_forms(run_config(), facts, machine, "bf16", 300) == ("varlen", "flash_attn_2", "flash_attn_3")
    assert open_forms(run_config(), facts, machine, "fp32", 300) == ("sdpa",)


@pytest.mark.parametrize("packing", ["on", "auto"])
def test_a_package_is_taken_only_if_it_is_right_and_clearly_faster(facts, packing):
    usual, slow, fast = trial("varlen", 1e-3), trial("flash_attn_2", 0.9e-3), trial("flash_attn_3", 0.5e-3)
    wrong = trial("flash_attn_3", 0.5e-3, "wrong")
    assert on_a_gpu_with(facts, usual, slow, fast, packing=packing)[0] == "flash_attn_3"
    assert on_a_gpu_with(facts, usual, slow, packing=packing)[0] == "varlen"  # little faster: not another plan
    value, reason = on_a_gpu_with(facts, usual, slow, wrong, packing=packing)
    assert value == "varlen"
    assert "flash_attn_3: wrong" in reason


def test_a_package_stands_in_where_torchs_kernel_fails(facts):
    failed = trial("varlen", 1e-3, "ended its process with SIGSEGV")
    assert on_a_gpu_with(facts, failed, trial("flash_attn_2", 3e-3))[0] == "flash_attn_2"


def test_trials_of_a_package_that_is_gone_do_not_count(facts):
    fast = trial("flash_attn_3", 0.5e-3)
    assert on_a_gpu_with(facts, trial("varlen", 1e-3), fast, packages=())[0] == "varlen"


def test_of_packing_and_prompts_computed_once_fewer_tokens_win(facts):
    def decided(shares, shared, stage="reward"):
        found = plan_packing(
            run_config(stage=stage, data={"train": "d.json"}),
            facts,
            preset("cpu"),
            compute="fp32",
            longest=300,
            lengths=LengthFacts(longest=300, typical=200, mean=100.0, mix=(50, 100), padding=0.3, shared=shared),
            trials=FAST,
            notes=Notes(),
            shares=shares,
        )
        return found.value, found.reason

    assert decided(True, 0.9)[0] == "matmul"
    value, reason = decided(True, 0.6)
    assert value == "plain"
    assert [gives(reason, share) for share in ("60%", "70%")] == [True, True]  # of the tokens of padded rows
    assert decided(False, 0.6)[0] == "matmul"


def test_what_is_evaluated_must_fit_the_window_as_well(facts):
    lengths = LengthFacts(longest=300, typical=200, evaluated=500)
    assert (longest_document(2048, lengths), longest_document(400, lengths), longest_document(64, None)) == (
        500,
        400,
        64,
    )


def test_where_prompts_may_be_computed_once(facts):
    for keys, shares in [
        ({}, True),
        ({"gradient_checkpointing": "on"}, False),
        ({"parallel": {"engine": "fsdp2"}}, False),
        ({"parallel": {"engine": "deepspeed", "zero_stage": 2}}, True),
        ({"parallel": {"engine": "deepspeed", "zero_stage": 3}}, False),
        ({"adapter": {"kind": "lora", "dropout": 0.1}}, False),
        ({"stage": "dpo"}, False),
    ]:
        assert may_share(run_config(**({"stage": "reward"} | keys)), facts, "cpu") is shares
        assert not may_share(run_config(stage="reward"), facts, "cuda")
