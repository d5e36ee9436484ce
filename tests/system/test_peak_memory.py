"""The peak is that of this process, and it does not fall."""

import subprocess
import sys

import numpy as np
import torch

from surefoot.system.hardware import forget_peak, peak_memory

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
