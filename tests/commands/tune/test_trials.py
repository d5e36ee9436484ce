"""Which numbers let a setting through.
What settings are held against: the run's own model, as plainly as the memory allows.
"""

from dataclasses import replace

import pytest

from helpers.faults import gives, raises_fault
from helpers.plans import run_plan
from surefoot.commands.tune.trials import LOSS_GATE, NORM_GATE, Numbers, choose_reference, failure
from surefoot.planning.plan import Choice

WANTED = Numbers((2.0, 1.9, 1.8), (3.0, 2.9, 2.8))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_within_the_gate_passes_and_beyond_it_does_not(compute):
    losses, norms = (2.0 * (1 + LOSS_GATE[compute] / 2), 1.9, 1.8), (3.0 * (1 - NORM_GATE[compute] / 2), 0.0, 0.0)
    assert failure(Numbers(losses, norms, compute), WANTED) == ""
    loss = Numbers((2.0, 1.9 * (1 + 2 * LOSS_GATE[compute]), 1.8), WANTED.grad_norms, compute)
    assert gives(failure(loss, WANTED), "loss")
    assert gives(failure(loss, WANTED), 2)
    norm = Numbers(WANTED.losses, (3.0 * (1 + 2 * NORM_GATE[compute]), 2.9, 2.8), compute)
    assert gives(failure(norm, WANTED), "norm")
    assert gives(failure(norm, WANTED), 1)


def test_the_coarser_type_of_both_has_the_say():
    off = Numbers((2.0 * (1 + LOSS_GATE["bf16"] / 2), 1.9, 1.8), WANTED.grad_norms)
    assert failure(off, WANTED)
    assert failure(off, replace(WANTED, compute="bf16")) == ""


def test_later_steps_are_not_compared():
    assert failure(Numbers((2.0, 1.9, 9.0), (3.0, 9.0, 9.0)), WANTED) == ""


def test_what_is_not_finite_does_not_pass_unless_the_plain_path_is_not_either():
    broken = Numbers((None, 1.9, 1.8), WANTED.grad_norms)
    assert gives(failure(broken, WANTED), 1)
    assert failure(broken, broken) == ""


def plan(compute="bf16", base="bf16"):
    made = run_plan(trainable=1, parameters=2)
    chosen = {"compute": Choice(compute, "", "user"), "base": Choice(base, "", "user")}
    return replace(made, precision=replace(made.precision, **chosen))


def anything(config):
    return ""


def only_16_bits(config):
    return "not enough memory: 90 GB of 80 GB" if config["precision"]["compute"] == "fp32" else ""


def test_fp32_and_nothing_fused_where_it_fits():
    found = choose_reference({"precision": "bf16", "data": {"packing": "on"}}, plan(), anything)
    assert found.compute == "fp32"
    assert found.config["precision"] == {"compute": "fp32"}
    assert found.config["data"]["packing"] == "off"
    assert set(found.config["kernels"].values()) == {"plain"}


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantized_base_stays_one(base):
    found = choose_reference({"precision": {"base": base, "compute": "bf16"}}, plan(base=base), anything)
    assert found.config["precision"] == {"compute": "fp32", "base": base}


@pytest.mark.parametrize(("qat", "group", "said"), [("int4", 64, 64), ("int8", None, None), ("nvfp4", 16, None)])
def test_what_is_rounded_stays_rounded(qat, group, said):
    rounding = replace(plan().precision, qat=Choice(qat, "", "user"), qat_group=group)
    found = choose_reference({}, replace(plan(), precision=rounding), anything)
    expected = {"compute": "fp32", "qat": qat, "qat_group_size": said}
    assert found.config["precision"] == {key: value for key, value in expected.items() if value is not None}


def test_what_fits_in_16_bits_only_is_compared_in_16_bits():
    found = choose_reference({}, plan(), only_16_bits)
    assert (found.compute, found.config["precision"]["compute"]) == ("bf16", "bf16")


def test_what_fits_in_no_type_is_one_line_with_the_reason():
    with raises_fault("SF-TUNE", "tune", "fp32", remedy=["data.max_length"]):
        choose_reference({}, plan(compute="fp32"), only_16_bits)
