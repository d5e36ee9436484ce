"""Forms of attention that end their process, or never end, fail alone; the others are tried all the same."""

import sys

from surefoot.planning.probes.child import run_in_child, run_request
from surefoot.planning.probes.sizes import AttentionRequest

REQUEST = AttentionRequest(("flash", "math"), heads=2, kv_heads=1, head_dim=8, length=32, dtype="fp32", device="cpu")
_PATCH = """
import os, time
from surefoot.planning.probes import attention, child
real = attention.form_named
def form_named(name, **named):
    if name == "flash":
        return lambda q, k, v: {trouble}
    return real(name, **named)
attention.form_named = form_named
child.main()
"""


def child_with(trouble):
    return [sys.executable, "-c", _PATCH.replace("{trouble}", trouble)]


def test_a_child_finds_what_this_process_finds():
    here, there = run_request(REQUEST), run_in_child(REQUEST)
    assert [(one.form, one.failure, dict(one.errors)) for one in there] == [
        (one.form, one.failure, dict(one.errors)) for one in here
    ]
    assert all(one.seconds > 0 for one in there)


def test_a_form_that_crashes_its_process_has_failed_and_the_rest_is_tried():
    flash, math = run_in_child(REQUEST, program=child_with("os.abort()"))
    assert (flash.form, flash.failure) == ("flash", "ended its process with SIGABRT")
    assert math.form == "math"
    assert math.passed


def test_a_form_after_which_the_gpu_is_of_no_use_has_failed_and_the_rest_is_tried():
    """Every later call of that process fails as well. Twin: one that raises anything else ends no process."""
    raising = "(_ for _ in ()).throw(__import__('torch').{error}('illegal memory access\\nfor debugging'))"
    flash, math = run_in_child(REQUEST, program=child_with(raising.replace("{error}", "AcceleratorError")))
    assert flash.failure == "ended its process with exit code 1 (illegal memory access)"
    assert math.passed
    flash, math = run_in_child(REQUEST, program=child_with(raising.replace("{error}", "OutOfMemoryError")))
    assert flash.failure == "cannot run: illegal memory access"
    assert math.passed


def test_a_form_that_does_not_end_has_failed():
    (flash,) = run_in_child(
        AttentionRequest(("flash",), 2, 1, 8, 32, "fp32", "cpu"), program=child_with("time.sleep(600)"), patience=8
    )
    assert flash.failure == "did not end within 8 seconds"


def test_a_child_that_does_not_start_is_no_forms_fault_and_is_asked_once():
    trials = run_in_child(REQUEST, program=[sys.executable, "-c", "raise SystemExit(7)"])
    assert [one.failure for one in trials] == ["ended its process with exit code 7"] * 2
