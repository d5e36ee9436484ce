"""Forms of attention that end their process, or never end, fail alone; the others are tried all the same."""

import subprocess
import sys
from dataclasses import replace

from helpers.faults import gives
from surefoot.planning.probes import child
from surefoot.planning.probes.child import run_in_child, run_request
from surefoot.planning.probes.sizes import AttentionRequest

REQUEST = AttentionRequest(("flash", "math"), heads=2, kv_heads=1, head_dim=8, length=32, dtype="fp32", device="cpu")
_PROGRAM = """
import os, torch
from surefoot.planning.probes import attention, child

def raising(kind):
    def form(q, k, v):
        raise getattr(torch, kind)("misaligned\\nfor debugging")
    return form

real = attention.form_named
wrong = {
    "flash": lambda q, k, v: os.abort(),
    "mem_efficient": raising("AcceleratorError"),
    "cudnn": raising("OutOfMemoryError"),
}
attention.form_named = lambda name, **named: wrong.get(name) or real(name, **named)
child.main()
"""


def test_what_ends_its_process_has_failed_and_the_rest_is_tried_as_here(any_python):
    """Every call after an AcceleratorError fails as well. Twin: one that raises anything else ends no process."""
    request = replace(REQUEST, forms=("flash", "mem_efficient", "cudnn", "math"))
    flash, efficient, cudnn, math = run_in_child(request, program=[any_python, "-c", _PROGRAM])
    assert flash.form == "flash"
    assert gives(flash.failure, "SIGABRT")
    assert efficient.failure.endswith("exit code 1 (misaligned)")
    assert cudnn.failure.endswith(": misaligned")  # in the child, which went on
    (here,) = run_request(replace(REQUEST, forms=("math",)))
    assert (math.failure, dict(math.errors)) == (here.failure, dict(here.errors))
    assert math.passed
    assert math.seconds > 0


def test_a_form_that_does_not_end_has_failed(monkeypatch):
    def late(words, **given):
        raise subprocess.TimeoutExpired(words, given["timeout"], output=b"begin flash\n")

    monkeypatch.setattr(child.subprocess, "run", late)
    (flash,) = run_in_child(replace(REQUEST, forms=("flash",)), patience=8)
    assert gives(flash.failure, 8)


def test_a_child_that_does_not_start_is_no_forms_fault_and_is_asked_once():
    trials = run_in_child(REQUEST, program=[sys.executable, "-c", "raise SystemExit(7)"])
    assert [gives(one.failure, 7) for one in trials] == [True, True]
