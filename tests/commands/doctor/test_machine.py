"""Lines on the machine, from plain values, and versions that are known to go wrong."""

import importlib.metadata
import re
import sys
from dataclasses import replace

import pytest
import torch

from helpers.faults import gives
from surefoot.commands.doctor import machine
from surefoot.commands.doctor.machine import (
    disk_line,
    environment_lines,
    installed_version,
    kernel_lines,
    library_findings,
    minimums,
    numbers,
    packed_lines,
    product_lines,
    thread_lines,
    with_cost,
)
from surefoot.planning.disk import DiskForecast
from surefoot.planning.environment import acts_below, environment_without_plan
from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.probes.matmul import rates_without
from surefoot.system import hardware
from surefoot.system.variables import VARIABLES


def only(lines):
    (line,) = lines
    return line.code, line.verdict


def test_a_variable_that_acts_below_the_config_one_that_is_no_more_than_a_choice_and_one_that_nothing_reads():
    environment = {"DNNL_MAX_CPU_ISA": "AVX2", "HF_HUB_OFFLINE": "1", "SDPA_BACKEND": "math"}
    lines = environment_lines(environment_without_plan(environment, "cpu", 2))
    assert [(line.code, line.verdict, line.where) for line in lines] == [
        ("ENV-OVERRIDE", "caution", "DNNL_MAX_CPU_ISA"),
        ("ENV-OVERRIDE", "ok", "HF_HUB_OFFLINE"),
        ("ENV-UNREAD", "caution", "SDPA_BACKEND"),
    ]
    assert only(environment_lines(())) == ("ENV-OVERRIDE", "ok")


@pytest.mark.parametrize(
    ("value", "verdict", "fix"),
    [("2", "ok", ""), ("16", "caution", "unset OMP_NUM_THREADS"), ("abc", "caution", "unset OMP_NUM_THREADS")],
)
def test_threads_that_were_asked_for_and_are_not_there_are_a_caution(value, verdict, fix):
    (line,) = environment_lines(environment_without_plan({"OMP_NUM_THREADS": value}, "cpu", 2))
    assert (line.verdict, line.fix.partition(":")[0]) == (verdict, fix)


def test_a_variable_is_not_to_be_set_and_unset_at_once():
    found = environment_without_plan({"OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "abc"}, "cpu", 2)
    threads = thread_lines(2, 2, {1: 2.0, 2: 0.5})
    fixes = {line.where: line.fix for line in environment_lines(found, advised=threads)}
    assert fixes["OMP_NUM_THREADS"] == threads[0].fix == "set OMP_NUM_THREADS=1"
    assert fixes["MKL_NUM_THREADS"].startswith("unset")
    assert environment_lines(found, advised=thread_lines(2, 2, {})) == environment_lines(found)  # the twin: no advice


def test_what_acts_below_is_known_and_read():
    below = [name for name in VARIABLES if acts_below(name, compiled=False)]
    assert len(below) == 11
    assert all(VARIABLES[name].verdict == "used" for name in below)


def test_variables_of_the_compiler_matter_where_it_is_on():
    found = environment_without_plan({"TORCHDYNAMO_DISABLE": "1"}, "cpu", 2)
    assert only(environment_lines(found, compiled=True)) == ("ENV-OVERRIDE", "caution")
    assert only(environment_lines(found, compiled=False)) == ("ENV-OVERRIDE", "ok")


def test_what_variables_cost_is_measured_without_them_and_only_where_there_are_any():
    asked = []

    def there(names):
        asked.append(tuple(names))
        return {"bf16": 8e11}

    lines = environment_lines(environment_without_plan({"ONEDNN_MAX_CPU_ISA": "AVX2", "SDPA_BACKEND": "x"}, "cpu", 2))
    costly, other = with_cost(lines, {"bf16": 4e9}, there)
    assert (costly.gain, other.gain) == (200.0, None)
    assert asked == [("ONEDNN_MAX_CPU_ISA",)]
    with_cost(environment_lines(()), {"bf16": 4e9}, there)
    assert len(asked) == 1  # no child is started for nothing


def test_a_child_does_without_the_variables(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    program = [
        sys.executable,
        "-c",
        "import json, os; print(json.dumps({'fp32': len([n for n in os.environ if n == 'ATEN_CPU_CAPABILITY'])}))",
    ]
    assert rates_without(["ATEN_CPU_CAPABILITY"], (8, 8), ["fp32"], "cpu", program=program) == {"fp32": 0}
    assert rates_without([], (8, 8), ["fp32"], "cpu", program=program) == {"fp32": 1}


def test_a_child_that_does_not_answer_says_nothing():
    for code in ("raise SystemExit(3)", "print('no json')", ""):
        assert rates_without([], (8, 8), ["fp32"], "cpu", program=[sys.executable, "-c", code]) == {}


def test_the_child_measures():
    assert rates_without([], (32, 32), ["fp32"], "cpu").keys() == {"fp32"}


@pytest.mark.parametrize(
    ("threads", "cores", "rates", "verdict", "gain"),
    [
        (2, 2, {1: 1.0, 2: 1.9}, "ok", None),
        (2, 2, {}, "ok", None),
        (8, 2, {}, "caution", None),  # more than there are cores
        (8, 2, {1: 1.0, 2: 1.9, 8: 0.5}, "caution", 3.8),
        (8, 8, {1: 1.0, 2: 2.0, 8: 0.5}, "caution", 4.0),  # a container that may use two of eight
        (8, 8, {4: 1.1, 8: 1.0}, "ok", None),  # no clear gain
        (1, 8, {1: 1.0, 8: 6.0}, "ok", None),  # fewer than could be is a choice
    ],
)
def test_threads(threads, cores, rates, verdict, gain):
    (line,) = thread_lines(threads, cores, rates)
    assert (line.code, line.verdict, line.gain) == ("THREADS", verdict, gain)


def test_fewer_threads_than_cores_are_told_with_what_more_would_do():
    (line,) = thread_lines(1, 2, {1: 9.0, 2: 0.9})
    assert re.findall(r"[\d.]+", line.value) == ["1", "2", "2", "0.1"]
    (line,) = thread_lines(2, 2, {1: 1.0, 2: 1.9})
    assert re.findall(r"[\d.]+", line.value) == ["2", "2"]


def test_sixteen_bits_that_are_slower_than_fp32():
    slow = {"fp32": 2e11, "bf16": 5e8}
    (line,) = product_lines(slow, "bf16")
    assert (line.code, line.verdict, line.gain) == ("GEMM-SLOW", "caution", 400)
    assert only(product_lines(slow, "fp32")) == ("GEMM-SLOW", "ok")
    assert only(product_lines({"fp32": 2e11, "bf16": 2e12}, "bf16")) == ("GEMM-SLOW", "ok")
    assert product_lines({}, None) == []


def test_a_kernel_that_is_wrong_is_a_fault_where_the_run_uses_it():
    trials = [AttentionTrial("flash", 0.01, "", {"output": 1e-4}), AttentionTrial("cudnn", 0.0, "infinite")]
    assert [(line.where, line.verdict) for line in kernel_lines(trials, ["cudnn"], "bf16")] == [
        ("flash", "ok"),
        ("cudnn", "fault"),
    ]
    used, unused = kernel_lines(trials, ["flash"], "bf16")
    assert {used.verdict, unused.verdict} == {"ok"}
    assert all(gives(used.value, limit) for limit in (0.0001, 0.062))
    assert gives(unused.value, "infinite")
    assert gives(kernel_lines(trials, ["flash"], "fp32")[0].value, 0.001)


def test_a_kernel_that_is_right_and_had_no_room_is_no_fault():
    trials = [AttentionTrial("math", 0.0, "", {"output": 1e-4}, untimed="full")]
    assert only(kernel_lines(trials, ["math"], "bf16")) == ("ATTN-KERNEL", "ok")
    assert gives(kernel_lines(trials, ["math"], "bf16")[0].value, "full")


def test_tf32_is_told_beside_the_types_where_there_is_any():
    (line,) = product_lines({"fp32": 5e13, "bf16": 8e14}, "bf16", 4e14)
    assert re.findall(r"(?<= )\d+(?= )", line.value) == ["50", "800", "400"]
    assert "TF32" in line.value
    assert "TF32" not in product_lines({"fp32": 5e13}, None)[0].value


def test_the_only_form_of_a_model_is_told_and_no_fault():
    """As eager is for soft-capped logits: there is nothing to switch to, and the far logits lie beyond the cap."""
    trials = [AttentionTrial("eager", 0.0, "off: 0.12")]
    assert only(kernel_lines(trials, ["eager"], "bf16")) == ("ATTN-KERNEL", "caution")  # as in the plan of `train`
    (line,) = kernel_lines(trials, ["eager"], "bf16", only=True)
    assert line.verdict == "ok"
    assert gives(line.value, 0.12)


@pytest.mark.parametrize(("free", "verdict"), [(99, "fault"), (449, "caution"), (450, "ok")])
def test_disk(tmp_path, monkeypatch, free, verdict):
    """Three checkpoints of 100 bytes are kept while the fourth is written, and a model of 50."""
    asked = []
    monkeypatch.setattr(hardware, "free_disk", lambda place: asked.append(place) or free)
    line = disk_line(tmp_path / "not" / "there", DiskForecast(100, 4, 50))
    assert (line.code, line.verdict) == ("DISK", verdict)
    assert asked == [tmp_path]
    assert disk_line(tmp_path, None).verdict == "ok"


@pytest.mark.parametrize("obstacle", ["", "it cannot be reached"])
def test_the_hub_is_asked_unless_the_run_reads_nothing_from_it(monkeypatch, obstacle):
    asked = []
    monkeypatch.setattr(machine, "hub_obstacle", lambda: asked.append(1) or obstacle)
    verdict = "caution" if obstacle else "ok"
    assert machine.hub_line().verdict == verdict
    line = machine.hub_line(["org/base", "org/data"])
    assert (line.verdict, line.where, len(asked)) == (verdict, "org/base, org/data", 2)
    assert (machine.hub_line([]).verdict, len(asked)) == ("ok", 2)


def test_the_form_of_packed_rows_is_told_where_it_was_measured():
    trials = [
        AttentionTrial("sdpa", 0.02, "", {"output": 1e-4}),
        AttentionTrial("matmul", 0.01, "", {"output": 2e-4}),
        AttentionTrial("padded", 0.03, ""),
    ]
    (line,) = packed_lines(trials, "matmul", "bf16")
    assert (line.code, line.verdict) == ("ATTN-KERNEL", "ok")
    assert gives(line.where, "matmul")
    assert line.value.startswith("10.00 ms")
    assert packed_lines(trials, "plain", "bf16") == []
    assert packed_lines((), "matmul", "bf16") == []


def test_a_form_of_packed_rows_that_is_wrong_is_a_fault():
    (line,) = packed_lines([AttentionTrial("sdpa", 0.0, "the output is off by 0.3")], "sdpa", "bf16")
    assert (line.verdict, line.exit_code) == ("fault", 3)
    assert gives(line.fix, "data.packing")


CPU = hardware.preset("cpu")
GOOD = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "jinja2": "3.1.6"}


def found(versions, machine=CPU, accelerators=0):
    lines = library_findings(machine, accelerators, versions.get)
    return [(line.where, line.verdict) for line in lines if line.verdict != "ok"]


def test_good_versions():
    assert found(GOOD) == []
    assert [line.code for line in library_findings(CPU, 0, GOOD.get)] == ["LIB-KNOWN-BAD", "LIB-BUILD"]


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ({"jinja2": "3.1.5"}, [("jinja2", "fault"), ("jinja2", "fault")]),  # a row of the table, and below the minimum
        ({"deepspeed": "0.15.0"}, [("deepspeed", "fault")]),
        ({"deepspeed": "0.15.1"}, []),
        ({"litellm": "1.82.8"}, [("litellm", "fault")]),
        ({"litellm": "1.82.9"}, []),
        ({"litellm": "1.82.6"}, []),
        ({"peft": "0.20.0"}, [("peft", "fault")]),
    ],
)
def test_rows_and_minimums(versions, wanted):
    assert found(GOOD | versions) == wanted


def test_minimums_are_those_of_the_package():
    assert minimums()["transformers"] == "5.23"
    assert "pyarrow" not in minimums()  # of an extra


def test_without_being_installed_there_are_none(monkeypatch):
    """As with PYTHONPATH=src on a machine that brings its own packages."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert minimums() == {}


def test_what_is_compiled_for_another_torch(monkeypatch):
    requires = {"torchvision": ["numpy", "torch==2.12.1"], "surefoot": []}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires[name])
    assert found(GOOD | {"torchvision": "0.27.0"}) == [("torchvision", "caution")]
    requires["torchvision"] = ["numpy", "torch (==2.13.0)"]
    assert found(GOOD | {"torchvision": "0.28.0"}) == []


def test_flash_attn_that_cannot_be_imported(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(machine.importlib, "import_module", broken)
    assert found(GOOD | {"flash-attn": "2.8"}) == [("flash-attn", "caution")]
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: None)
    assert found(GOOD | {"flash-attn": "2.8"}) == []


@pytest.mark.parametrize(
    ("built", "accelerators", "verdict"), [(False, 2, "caution"), (True, 2, "caution"), (False, 0, "ok")]
)
def test_builds(monkeypatch, built, accelerators, verdict):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    assert only(library_findings(CPU, accelerators, GOOD.get)[-1:]) == ("LIB-BUILD", verdict)


def test_on_a_gpu_packages_of_kernels_are_listed():
    versions = GOOD | {"liger-kernel": "0.8.5"}
    lines = [one for one in library_findings(hardware.preset("h100"), 1, versions.get) if one.code == "LIB-KERNELS"]
    assert [(line.verdict, gives(line.value, "0.8.5")) for line in lines] == [("ok", True)]
    here, _, missing = lines[0].value.partition(";")
    assert "liger-kernel" in here
    assert all(name in missing for name in ("flash-attn-3", "bitsandbytes", "torchao"))
    assert "liger-kernel" not in missing


@pytest.mark.parametrize("flash", [True, False])
def test_a_wheel_without_flash_attention(monkeypatch, flash):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    gpu = replace(hardware.preset("h100"), preset=False)
    assert found(GOOD, gpu, 1) == ([] if flash else [("torch", "caution")])


def test_numbers():
    found = [numbers(text) for text in ("2.13.0+cpu", "5.23.0.dev0", "x")]
    assert found == [(2, 13, 0), (5, 23, 0), ()]
    assert installed_version("torch")
    assert installed_version("no-such-library") is None
