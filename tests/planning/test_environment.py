"""Which variables act on a run, whether what is said to be read really is, and how many threads compute."""

import dataclasses
import importlib.util
import mmap
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.environment import environment_findings, plan_threads, requested_threads
from surefoot.planning.resolve import resolve
from surefoot.system.hardware import preset
from surefoot.system.process import read_environment
from surefoot.system.variables import VARIABLES

# What reads a name: Python sources of these packages, or compiled code. Names that only CUDA builds hold cannot be
# looked up in a CPU build; oneDNN puts its names together from "ONEDNN_" or "DNNL_" and the rest.
PACKAGES = ("torch", "transformers", "accelerate", "huggingface_hub", "peft")
ONLY_IN_CUDA_BUILDS = {"CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TORCH_CUDNN_SDPA_DEPRIORITIZED"}
COMPOSED = re.compile("^(ONEDNN|DNNL)_")


def names_in_sources():
    found = set()
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent
        for path in root.rglob("*.py"):
            found.update(re.findall(rb"[\"']([A-Z][A-Z0-9_]{5,})[\"']", path.read_bytes()))
    return {name.decode() for name in found}


def names_in_libraries(names):
    """Those of `names` that torch's compiled code holds as a whole string."""
    root = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    tails = {name: COMPOSED.sub("", name).encode() for name in names}
    pattern = re.compile(b"\0(" + b"|".join(sorted(set(tails.values()))) + b")(?=\0)")
    found = set()
    for library in ("libtorch_cpu.so", "libc10.so"):
        with (root / library).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found.update(pattern.findall(content))
    return {name for name, tail in tails.items() if tail in found}


@cache
def names_that_are_read():
    names = VARIABLES.keys() - ONLY_IN_CUDA_BUILDS
    in_sources = names & names_in_sources()
    return in_sources | names_in_libraries(names - in_sources)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into torch's Linux libraries")
def test_the_installed_libraries_read_exactly_what_is_said():
    assert names_that_are_read() == {name for name in VARIABLES.keys() - ONLY_IN_CUDA_BUILDS if VARIABLES[name].reader}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into torch's Linux libraries")
@pytest.mark.parametrize(("name", "reader"), [("SDPA_BACKEND", "torch"), ("ATEN_CPU_CAPABILITY", "")])
def test_a_wrong_claim_would_be_noticed(monkeypatch, name, reader):
    monkeypatch.setitem(VARIABLES, name, dataclasses.replace(VARIABLES[name], reader=reader))
    with pytest.raises(AssertionError):
        test_the_installed_libraries_read_exactly_what_is_said()


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small = LLAMA31_8B | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model, tokenizer = model_facts(folder, small), read_tokenizer_facts(llama3_tokenizer(folder))
    config = run_config(batch={"size": 8, "micro": 2}, precision="bf16")
    plans = {
        device: resolve(config, model, tokenizer, preset(machine), measurements=None, environment={})
        for device, machine in (("cpu", "cpu"), ("cuda", "h100"))
    }

    def findings(environment, device="cpu"):
        return {finding.name: finding for finding in environment_findings(environment, plans[device])}

    return findings


def test_seed_002s_names_are_reported_as_read_by_nobody(findings):
    found = findings({"SDPA_BACKEND": "flash", "PYTORCH_SDP_KERNEL": "mem_efficient"})
    assert {finding.verdict for finding in found.values()} == {"ignored"}
    assert all(gives(found["SDPA_BACKEND"].effect, one) for one in ("sdpa", "flash", "math"))  # what runs instead


def test_what_accelerate_launch_sets_is_beaten_by_the_config(findings):
    found = findings({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"})
    assert {finding.verdict for finding in found.values()} == {"overridden"}
    assert found["ACCELERATE_MIXED_PRECISION"].effect.endswith("bf16")
    assert "4 micro-batches" in found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"].effect


def test_what_concerns_another_device_is_ignored(findings):
    tf32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert findings(tf32)["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"].verdict == "ignored"
    assert findings(tf32, "cuda")["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"].verdict == "overridden"
    assert findings({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"].verdict == "used"


@pytest.mark.parametrize(
    ("value", "verdict", "numbers"),
    [
        ("8", "used", ["8"]),  # as many as the plan has
        ("16", "overridden", ["16", "8"]),  # asked and used
        ("abc", "ignored", ["8"]),
        ("0", "ignored", ["8"]),
    ],
)
def test_threads_that_are_not_those_that_were_asked_for_are_told(findings, value, verdict, numbers):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        finding = findings({name: value})[name]
        assert (finding.verdict, re.findall(r"\d+", finding.effect)) == (verdict, numbers)


def test_unknown_names_and_secrets_are_left_alone(findings, monkeypatch):
    for name, value in {"HF_TOKEN": "secret", "HOME": "/somewhere", "OMP_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)
    seen = read_environment()
    assert "HF_TOKEN" not in seen
    assert "HOME" not in seen
    assert seen["OMP_NUM_THREADS"] == "2"
    assert not findings({"HF_TOKEN": "secret"})


def test_every_effect_can_be_written(findings):
    everything = dict.fromkeys(VARIABLES, "1")
    for device in ("cpu", "cuda"):
        for finding in findings(everything, device).values():
            assert "{" not in finding.effect
            assert finding.effect


NARROW = LLAMA31_8B | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
WIDE = LLAMA31_8B
LAPTOP = replace(preset("cpu"), cores=8)


@pytest.mark.parametrize(
    ("config", "machine", "environment", "threads", "source"),
    [
        (NARROW, LAPTOP, {}, 1, "default"),
        (WIDE, LAPTOP, {}, 8, "hardware"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "8"}, 8, "user"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "8,1"}, 8, "user"),  # OpenMP's list, by level
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"}, 8, "user"),
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "16"}, 8, "hardware"),  # more than there are
        (NARROW, LAPTOP, {"OMP_NUM_THREADS": "abc"}, 1, "default"),  # asks for nothing
        (WIDE, LAPTOP, {"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "-1"}, 8, "hardware"),
        (NARROW, LAPTOP, {"SUREFOOT_THREADS": "8"}, 8, "hardware"),  # of surefoot's launcher, not the user's
        (NARROW, preset("h100"), {}, preset("h100").cores, "hardware"),
    ],
)
def test_threads(tmp_path, config, machine, environment, threads, source):
    choice = plan_threads(model_facts(tmp_path, config), machine, environment)
    assert (choice.value, choice.source) == (threads, source)


@pytest.mark.parametrize(
    ("config", "rates", "environment", "threads", "source"),
    [
        (WIDE, {1: 10.0, 2: 20.0, 4: 30.0, 8: 12.0}, {}, 4, "measured"),  # a container that may use four of eight
        (WIDE, {1: 10.0, 2: 20.0, 4: 30.0, 8: 29.0}, {}, 8, "hardware"),  # no clear gain
        (WIDE, {1: 10.0, 4: 30.0, 8: 12.0}, {"OMP_NUM_THREADS": "8"}, 8, "user"),
        (WIDE, {1: 10.0, 4: 30.0, 8: 12.0}, {"OMP_NUM_THREADS": "abc"}, 4, "measured"),
        (NARROW, {4: 30.0, 8: 12.0}, {}, 1, "default"),
        (WIDE, {}, {}, 8, "hardware"),
    ],
)
def test_fewer_threads_are_taken_for_a_clear_gain_alone(tmp_path, config, rates, environment, threads, source):
    choice = plan_threads(model_facts(tmp_path, config), LAPTOP, environment, rates)
    assert (choice.value, choice.source) == (threads, source)


@pytest.mark.parametrize(
    ("value", "count"),
    [("2", 2), (" +2 ", 2), ("2,4", 2)]
    + [(value, None) for value in ("", "0", "-1", "abc", "2x", "2,x", "2.0", "٢", "9" * 5000)],
)
def test_what_openmp_takes_for_a_number_of_threads(value, count):
    assert requested_threads(value) == count
