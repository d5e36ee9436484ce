"""The peak is that of this process, and it does not fall."""

import subprocess
import sys

import numpy as np

from surefoot.hardware import peak_memory

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
    program = "from surefoot.hardware import peak_memory; print(peak_memory('cpu'))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < int(out) < BLOCK < len(block)
