"""Whether attention gives the same gradients each time: what decides it, and what is refused."""

import pytest

from surefoot.planning.deterministic import kernel_of, plan_deterministic, with_deterministic
from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.notes import Notes
from surefoot.planning.plan import NONE
from surefoot.system.hardware import preset

CPU, H100 = preset("cpu"), preset("h100")


def trials(kernel: str, plain: float, ordered: float, failure: str = "") -> list[AttentionTrial]:
    plain_form, ordered_form = with_deterministic([kernel])
    return [AttentionTrial(plain_form, plain, ""), AttentionTrial(ordered_form, 0 if failure else ordered, failure)]


def decide(request="auto", kernel="flash", hardware=H100, measured=(), compiled=False):
    notes = Notes()
    found = plan_deterministic(request, kernel, hardware, measured, compiled, notes)
    return found.value, found.source, [fault.where for fault in notes.faults]


@pytest.mark.parametrize("kernel", ["flash", "mem_efficient", "varlen", "flash_attn_4"])
@pytest.mark.parametrize(("costs", "chosen"), [(1.05, True), (1.3, False)])
def test_it_is_chosen_where_it_costs_little(kernel, costs, chosen):
    assert decide(kernel=kernel, measured=trials(kernel, 1.0, costs)) == (chosen, "measured", [])


def test_nothing_measured_nothing_chosen():
    assert decide() == (False, "default", [])
    assert decide(measured=trials("varlen", 1.0, 1.0)) == (False, "default", [])  # of another kernel


@pytest.mark.parametrize(("hardware", "kernel"), [(CPU, "flash"), (H100, "eager"), (H100, "math"), (H100, NONE)])
def test_some_kernels_always_do(hardware, kernel):
    for request in ("auto", "on", "off"):
        assert decide(request, kernel, hardware)[0] is True


def test_what_was_not_timed_is_not_told_as_timed():
    untimed = [AttentionTrial(form, 0.0, "", untimed="no room") for form in with_deterministic(["flash"])]
    assert decide(measured=untimed) == (False, "default", [])
    found = plan_deterministic("on", "flash", H100, untimed, False, Notes())
    assert (found.value, "milliseconds" in found.reason) == (True, False)


def test_a_request_decides():
    dear = trials("flash", 1.0, 3.0)
    assert decide("on", measured=dear) == (True, "user", [])
    assert decide("off", measured=trials("flash", 1.0, 1.0)) == (False, "user", [])


@pytest.mark.parametrize(
    ("kernel", "measured", "compiled"),
    [
        ("cudnn", (), False),
        ("flash_attention_2", (), False),
        ("flash", (), True),
        ("flash", trials("flash", 1.0, 1.0, "gives another gradient of q each time"), False),
    ],
)
def test_what_cannot_be_is_refused_if_it_was_asked_for_and_left_out_if_not(kernel, measured, compiled):
    assert decide("on", kernel, measured=measured, compiled=compiled)[::2] == (False, ["attention.deterministic"])
    assert decide("auto", kernel, measured=measured, compiled=compiled)[::2] == (False, [])


def test_forms_of_kernels_that_can_are_measured_twice():
    forms = with_deterministic(["cudnn", "flash", "eager"])
    assert len(forms) == 4
    assert [kernel_of(form) for form in forms] == ["cudnn", "flash", "flash", "eager"]
