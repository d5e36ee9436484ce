"""Presets, this machine, its environment; and what is never written down about it. The peak is that of this process,
and it does not fall."""

import getpass
import json
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.stand_in_kernels import install
from surefoot.system import hardware
from surefoot.system.errors import InputError
from surefoot.system.hardware import GIB, describe, detect, forget_peak, peak_memory, preset, versions


def test_presets_are_described_and_not_present():
    for name in ("h100", "h200", "a100", "rtx4090", "cpu"):
        assert preset(name).preset
        assert preset(name).memory > 8 * GIB
    assert preset("h200").memory > preset("h100").memory
    assert preset("cpu").capability is None


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("h10", ["h100"]),
        ("RTX409", ["rtx4090"]),
        ("mainframe", ["b200", "h200", "h100"]),  # all of them
        ("mi300", ["mi300x"]),
    ],
)
def test_an_unknown_preset_suggests_the_nearest(name, fix):
    with pytest.raises(InputError) as caught:
        preset(name)
    assert re.findall(r"\w*\d\w*", caught.value.faults[0].fix)[: len(fix)] == fix


@pytest.mark.parametrize("name", ["T4", "t4", "A100-80", "CPU"])
def test_the_case_of_a_name_does_not_matter(name):
    assert preset(name) == preset(name.lower())


@pytest.mark.parametrize(("name", "gib"), [("48GiB", 48.0), ("48 GB", 48e9 / GIB), ("7.5gib", 7.5)])
def test_a_gpu_may_be_described_by_its_memory(name, gib):
    found = preset(name)
    assert (found.kind, found.bf16, found.preset) == ("cuda", True, True)
    assert found.memory == int(gib * GIB)


def test_older_gpus_compute_no_bf16():
    for name in ("t4", "v100", "v100-32"):
        assert (preset(name).bf16, preset(name).tf32, preset(name).fp16) == (False, False, True)
    assert preset("a40").bf16


def test_this_machine():
    found = detect()
    assert not found.preset
    assert found.memory > 0
    assert found.cores >= 1
    assert 0 < found.free <= found.memory
    assert found.name


@pytest.mark.parametrize(
    ("variable", "limit", "fast"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", False),
        ("DNNL_MAX_CPU_ISA", "avx512_core", False),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", True),  # twin: a limit that leaves bf16
        ("ONEDNN_MAX_CPU_ISA", "", True),
    ],
)
def test_16_bits_that_a_limit_of_instructions_has_emulated_are_not_fast(monkeypatch, variable, limit, fast):
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"amx_bf16", "avx512_bf16", "amx_fp16"})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv(variable, limit)
    assert (detect().bf16, detect().fp16) == (fast, fast)


class TestContainerLimit:
    def limits(self, tmp_path, membership, files):
        root = tmp_path / "cgroup"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        own = tmp_path / "membership"
        own.write_text(membership)
        return sorted(hardware._cgroup_limits(own, root))

    def test_version_2_counts_the_groups_above(self, tmp_path):
        files = {"a/b/memory.max": "max\n", "a/memory.max": "1000\n"}
        assert self.limits(tmp_path, "0::/a/b\n", files) == [1000]

    def test_version_1(self, tmp_path):
        files = {"memory/docker/memory.limit_in_bytes": "2000", "memory/memory.limit_in_bytes": "9223372036854771712"}
        membership = "5:cpu:/docker\n4:memory:/docker\n"
        assert self.limits(tmp_path, membership, files) == [2000, 9223372036854771712]

    def test_a_group_that_is_not_mounted_falls_back_to_the_root(self, tmp_path):
        assert self.limits(tmp_path, "0::/elsewhere/x\n", {"memory.max": "3000"}) == [3000]

    def test_no_groups_at_all(self, tmp_path):
        assert hardware._cgroup_limits(tmp_path / "nothing", tmp_path) == []

    def test_the_limit_bounds_total_and_free(self, monkeypatch):
        monkeypatch.setattr(hardware, "_cgroup_limits", lambda membership, root: [10 * 2**20])
        assert hardware.host_memory() == (10 * 2**20, 10 * 2**20)


def test_versions_come_without_imports():
    found = versions()
    assert found["python"] == platform.python_version()
    assert {"torch", "transformers", "peft", "surefoot"} <= set(found)


def test_the_description_names_neither_host_nor_user_nor_folder(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = json.dumps(describe())
    found = json.loads(text)
    assert found["environment"]["OMP_NUM_THREADS"] == "2"
    assert found["versions"]["torch"]
    assert found["cpu"]
    private = [socket.gethostname(), str(Path.home()), str(Path.cwd()), "hf_secret", f"/{getpass.getuser()}"]
    assert not [word for word in private if word in text]


@pytest.mark.parametrize(
    "forms", [(), ("flash_attn_2",), ("flash_attn_3",), ("flash_attn_4",), ("flash_attn_2", "flash_attn_4")]
)
def test_packages_with_kernels_are_found_and_not_imported(tmp_path, monkeypatch, forms):
    """flash-attn-4 lies in flash-attn's folder, with flash-attn or without."""
    for form in forms:
        install(form, tmp_path, "cannot be imported")
    monkeypatch.syspath_prepend(tmp_path)
    assert hardware._attention_packages() == forms
    assert hardware.detect().flash_attention_2 is ("flash_attn_2" in forms)


BLOCK = 200_000_000  # bytes


def test_the_peak_stays_after_memory_is_given_back():
    before = peak_memory("cpu")
    np.ones(BLOCK, dtype=np.uint8).sum()
    after = peak_memory("cpu")
    assert after >= before
    assert after > BLOCK
    assert peak_memory("cpu") >= after


def test_a_new_process_starts_from_its_own():
    block = np.ones(2 * BLOCK, dtype=np.uint8)
    program = "from surefoot.system.hardware import peak_memory; print(peak_memory('cpu'))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < int(out) < BLOCK < len(block)


def test_on_a_gpu_the_peak_can_begin_anew_and_on_a_cpu_it_is_the_systems(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("anew"))
    forget_peak("cpu")
    assert done == []
    forget_peak("cuda")
    assert done == ["empty", "anew"]  # what torch keeps is no longer there when the peak begins
