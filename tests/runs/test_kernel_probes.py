"""Kernels are tried where they can do no harm, and what is wrong only now is not believed for ever."""

from dataclasses import replace

import pytest
import torch

from helpers.faults import gives
from helpers.tiers import representatives
from surefoot.kernels import packed_attention as documents
from surefoot.kernels import pointwise
from surefoot.planning.measurements import MEMORY_TAKEN, PADDED, AttentionTrial, PointwiseSizes
from surefoot.planning.probes import child
from surefoot.planning.probes.child import one_child, run_in_child, run_request
from surefoot.planning.probes.documents import DocumentsRequest
from surefoot.planning.probes.kept import Kept
from surefoot.planning.probes.pointwise import PointwiseRequest
from surefoot.planning.probes.sizes import AttentionRequest
from surefoot.runs.kernel_probes import DOCUMENTS, POINTWISE
from surefoot.runs.measured import measured_attention, measured_documents, measured_pointwise

OF_DOCUMENTS = DocumentsRequest(("matmul", "sdpa", PADDED), (64, 40, 30), 4, 2, 16, "fp32", "cpu")
OF_SDPA = replace(OF_DOCUMENTS, forms=("sdpa", PADDED))
OF_POINTWISE = PointwiseRequest(("norm", "rotary"), PointwiseSizes(64, 4, 16), "fp32", "cpu")
OF_ATTENTION = AttentionRequest(("math",), 2, 1, 8, 32, "fp32", "cuda")
_PATCH = """
import os
from surefoot.kernels import packed_attention as documents
from surefoot.planning.probes import child
documents.FORMS["matmul"] = lambda *given: {trouble}
child.main()
"""


def named(trials):
    return [(getattr(one, "form", "") or one.part, one.failure, dict(one.errors)) for one in trials]


@pytest.mark.parametrize("started", representatives(["forked", "typed"], "forked"))
def test_a_child_finds_what_this_process_finds(started, forked_python):
    program = (forked_python, "-m", child.__name__) if started == "forked" else ()
    with one_child(program):
        for given, probe in ((OF_DOCUMENTS, DOCUMENTS), (OF_POINTWISE, POINTWISE)):
            there = run_in_child(given, probe)
            assert named(there) == named(run_request(given, probe))
            assert not any(one.failure for one in there)


@pytest.mark.parametrize(("trouble", "told"), [("os.abort()", ("SIGABRT",)), ("1 / 0", (1, "ZeroDivisionError"))])
def test_a_kernel_that_crashes_its_process_has_failed_and_the_rest_is_tried(trouble, told, forked_python):
    with one_child([forked_python, "-c", _PATCH.replace("{trouble}", trouble)]):
        found = {one.form: one.failure for one in run_in_child(OF_DOCUMENTS, DOCUMENTS)}
    assert all(gives(found["matmul"], value) for value in told)
    assert found == {"matmul": found["matmul"], "sdpa": "", PADDED: ""}


@pytest.mark.parametrize(("device", "way"), [("cuda", "child"), ("cpu", "here")])
def test_on_a_gpu_every_probe_of_kernels_has_a_process_of_its_own(tmp_path, monkeypatch, device, way):
    asked = []
    for name, said in (("run_in_child", "child"), ("run_request", "here")):
        monkeypatch.setattr(child, name, lambda request, probe, said=said: asked.append((said, probe)) or ())
    kept = Kept(tmp_path, {})
    measured_attention(AttentionRequest(("math",), 2, 1, 8, 32, "fp32", device), kept)
    measured_documents(replace(OF_SDPA, device=device), kept)
    measured_pointwise(OF_POINTWISE.parts, OF_POINTWISE.sizes, "fp32", device, kept)
    assert asked == [(way, child.ATTENTION), (way, DOCUMENTS), (way, POINTWISE)]


def asked_of(what, kept):
    if what == "documents":
        return measured_documents(OF_SDPA, kept)[0]
    return measured_pointwise(OF_POINTWISE.parts, OF_POINTWISE.sizes, "fp32", "cpu", kept)[0]


@pytest.mark.parametrize(
    ("error", "stays"),
    [(torch.OutOfMemoryError("CUDA out of memory"), False), (RuntimeError("no such operator"), True)],
    ids=["passing", "lasting"],
)
@pytest.mark.parametrize("what", ["documents", "pointwise"])
def test_a_fault_that_may_pass_is_looked_for_again_and_another_is_not(tmp_path, monkeypatch, what, error, stays):
    def fails(*given, **how):
        raise error

    kept = Kept(tmp_path, {})
    with monkeypatch.context() as patch:
        patch.setitem(documents.FORMS, "sdpa", fails)
        patch.setattr(pointwise, "rms_norm", fails)
        assert str(error) in asked_of(what, kept).failure
    assert bool(asked_of(what, kept).failure) is stays


def test_memory_that_ends_in_the_timing_is_told_and_says_nothing_of_the_numbers(tmp_path, monkeypatch):
    right, fails = documents.sdpa, torch.OutOfMemoryError("full")

    def sdpa(q, k, v, found, scale):
        if len(found.lengths) > 4:  # of the timed row; both checks have fewer
            raise fails
        return right(q, k, v, found, scale)

    monkeypatch.setitem(documents.FORMS, "sdpa", sdpa)
    failed, padded = measured_documents(OF_SDPA, Kept(tmp_path, {}))
    assert failed.failure == ""
    assert gives(failed.untimed, "full")
    assert failed.seconds == 0
    assert not failed.passed
    assert failed.errors  # it was right
    assert padded.seconds > 0


def test_twin_no_fault_of_attention_is_kept_that_may_pass(tmp_path, monkeypatch):
    tried = []

    def run(request, probe):
        tried.append(request)
        return (probe.failed("math", "did not end within 120 seconds"),)

    monkeypatch.setattr(child, "run_in_child", run)
    kept = Kept(tmp_path, {})
    for _ in range(2):
        measured_attention(OF_ATTENTION, kept)
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("timed", "asked"),
    [(f"at 4 of 32 heads, {MEMORY_TAKEN}", 2), ("at 4 of 32 heads", 1)],
    ids=["held", "as small as that"],
)
def test_what_was_timed_in_part_because_others_held_the_memory_is_timed_again(tmp_path, monkeypatch, timed, asked):
    tried = []

    def run(request, probe):
        tried.append(request)
        return (AttentionTrial("math", 1.0, "", timed=timed),)

    monkeypatch.setattr(child, "run_in_child", run)
    kept = Kept(tmp_path, {})
    for _ in range(2):
        measured_attention(OF_ATTENTION, kept)
    assert len(tried) == asked
