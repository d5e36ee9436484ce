"""Forms of attention that end their process, or never end, fail alone; the others are tried all the same."""

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
import torch

from helpers.faults import gives
from surefoot.planning.probes import child
from surefoot.planning.probes.child import ATTENTION, one_child, run_in_child, run_request, start_child
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
    with one_child([any_python, "-c", _PROGRAM]):
        flash, efficient, cudnn, math = run_in_child(request)
    assert flash.form == "flash"
    assert gives(flash.failure, "SIGABRT")
    assert efficient.failure.endswith("exit code 1 (misaligned)")
    assert cudnn.failure.endswith(": misaligned")  # in the child, which went on
    (here,) = run_request(replace(REQUEST, forms=("math",)))
    assert (math.failure, dict(math.errors)) == (here.failure, dict(here.errors))
    assert math.passed
    assert math.seconds > 0


def test_a_form_that_does_not_end_has_failed(monkeypatch, tmp_path):
    begun = tmp_path / "begun"

    class Late(threading.Thread):
        """A timer whose time is over once the form has begun."""

        def __init__(self, seconds, function):
            super().__init__(daemon=True)
            self._end = function

        def run(self):
            while not begun.exists():
                time.sleep(0.01)
            self._end()

        def cancel(self):
            pass

    monkeypatch.setattr(child.threading, "Timer", Late)
    program = f"print('begin flash', flush=True); open({str(begun)!r}, 'w'); input(); input()"
    with one_child([sys.executable, "-c", program]):
        (flash,) = run_in_child(replace(REQUEST, forms=("flash",)), patience=8)
    assert gives(flash.failure, 8)


def test_a_child_that_does_not_start_is_no_forms_fault_and_is_asked_once():
    with one_child([sys.executable, "-c", "raise SystemExit(7)"]):
        trials = run_in_child(REQUEST)
    assert [gives(one.failure, 7) for one in trials] == [True, True]


_COUNTED = """
import os
open({started!r}, "a").write("started ")
from surefoot.planning.probes import attention, child
real = attention.form_named
attention.form_named = lambda name, **named: (lambda *given: os.abort()) if name == "flash" else real(name, **named)
child.main()
"""


@pytest.mark.parametrize(("forms", "started"), [(("math",), 1), (("flash", "math"), 2)], ids=["right", "one crashes"])
def test_probes_share_a_child_until_a_part_crashes_it(tmp_path, forked_python, forms, started):
    count = tmp_path / "started"
    program = [forked_python, "-c", _COUNTED.format(started=str(count))]
    with one_child(program):
        start_child()
        for of_forms in (forms, ("math",), ("math",)):
            *_, last = run_in_child(replace(REQUEST, forms=of_forms), ATTENTION)
            assert last.passed
    assert len(count.read_text().split()) == started


def test_twin_without_the_context_each_probe_has_a_child_of_its_own(monkeypatch):
    began = []

    class Counted(child._Children):
        def ask(self, request, probe, patience):
            began.append(self)
            return run_request(request, probe), None, ""

    monkeypatch.setattr(child, "_Children", Counted)
    start_child()  # without effect here
    for _ in range(2):
        run_in_child(replace(REQUEST, forms=("math",)))
    with one_child():
        for _ in range(2):
            run_in_child(replace(REQUEST, forms=("math",)))
    assert len(dict.fromkeys(began)) == 3


def answers(monkeypatch, capsys, free) -> bool:
    """Whether a child answers if this is what freeing its memory does, and nothing asks again."""
    asked = json.dumps({"probe": ATTENTION.place, "request": asdict(replace(REQUEST, forms=("math",)))})
    monkeypatch.setattr(sys, "stdin", [asked])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", free)
    with suppress(SystemExit):
        child.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "begin math"
    return lines[-1].startswith("trials")


def test_an_error_that_a_kernel_has_left_behind_ends_its_own_request(monkeypatch, capsys):
    """The parts of the next one would all have failed: none of them had begun."""

    def raising():
        raise torch.AcceleratorError("illegal memory access")

    assert not answers(monkeypatch, capsys, raising)


def test_twin_without_an_error_there_is_an_answer(monkeypatch, capsys):
    assert answers(monkeypatch, capsys, lambda: None)
