"""Freed memory stays, until it is more than was planned, and blocks of a size fill the holes of others."""

import os
import subprocess
import sys

import pytest

from surefoot.system import allocator
from surefoot.system.allocator import NO_THREAD_CACHE, KeptMemory, is_glibc

MIB = 1 << 20


@pytest.fixture
def given_back(monkeypatch):
    """Runs steps of a plan of 100 bytes that leave so many more here than before them; the limit at the end, and which
    steps were followed by giving back, from 0."""

    def run(taken):
        before, found = 1_000, []
        monkeypatch.setattr(allocator, "private_bytes", lambda: before)
        kept = KeptMemory(100)
        for number, size in enumerate(taken):
            monkeypatch.setattr(allocator, "private_bytes", lambda size=size: before + size)
            monkeypatch.setattr(allocator, "_give_back", lambda number=number: found.append(number))
            kept.after_step()
        return kept.limit, found

    return run


def test_only_a_step_above_the_limit_is_followed_by_giving_back(given_back):
    assert given_back([90, 100, 101, 80, 95, 110, 70]) == (100, [2, 5])


def test_a_step_that_takes_more_by_itself_raises_the_limit(given_back):
    """By a share of the plan, however much was here before: the imports alone are more than most plans."""
    assert given_back([150, 140, 143, 145, 146, 120]) == (145, [0, 4])


def test_twin_a_limit_that_stays_would_pay_in_every_second_step(given_back, monkeypatch):
    monkeypatch.setattr(allocator, "_ROOM", -0.4)
    assert len(given_back([150, 140, 143, 145, 146, 120])[1]) > 2


_PROGRAM = """
import sys
from surefoot.system.allocator import KeptMemory, keep_freed_memory, private_bytes
keep_freed_memory()
before, kept = private_bytes(), KeptMemory(int(sys.argv[1]))
blocks = [bytearray(b"1") * 200_000 for _ in range(1_000)]
pins = [bytearray(b"1") * 200_000 for _ in range(1)]  # above them, so that the heap's end stays in use
held = private_bytes()
del blocks
kept.after_step()
print(held - before, private_bytes() - before)
"""


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize(("limit", "stays"), [(50 * MIB, False), (500 * MIB, True)], ids=["above", "below"])
def test_what_is_free_goes_back_to_the_system(limit, stays):
    words = [sys.executable, "-c", _PROGRAM, str(limit)]
    held, left = map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert held > 180 * MIB
    assert (left > held - 20 * MIB) if stays else (left < 20 * MIB)


_HOLES = """
import ctypes
from surefoot.system.allocator import keep_freed_memory
library = ctypes.CDLL(None)
library.sbrk.restype = ctypes.c_void_p
keep_freed_memory()

def block():
    found = ctypes.c_void_p()
    assert library.posix_memalign(ctypes.byref(found), 64, 1 << 20) == 0
    return found

# What a thread keeps is taken, as by a model's forward pass.
small = [library.malloc(size) for size in range(24, 128, 16) for _ in range(50)]
blocks = [block() for _ in range(6)]
for freed in blocks[1:5]:
    library.free(freed)
before = library.sbrk(0)
again = [block() for _ in blocks[1:5]]
print(library.sbrk(0) - before)
"""


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize(
    ("tunables", "least", "most"), [(NO_THREAD_CACHE, 0, 1), ("", 4, 4)], ids=["filled", "twin: a cache"]
)
def test_blocks_fill_the_holes_of_others_without_a_threads_cache(tunables, least, most):
    """Four of six blocks of 1 MiB, side by side, are freed and asked for again: how many of them need new room. Of a
    hole's ends one block may be lost, as what is cut off is looked for besides."""
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True, env=environment)
    assert least <= int(done.stdout) // MIB <= most


_MAPPED = """
import ctypes, mmap
from pathlib import Path
import numpy
from surefoot.system.allocator import mapped_bytes, private_bytes, resident_bytes
array_of = lambda block: numpy.frombuffer(block, numpy.uint8).ctypes.data
file = Path("mapped")
file.write_bytes(bytes(64 << 20))
before = resident_bytes(), private_bytes()
with file.open("rb") as opened:
    mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    read = sum(mapped[at] for at in range(0, len(mapped), 4096))
    print(resident_bytes() - before[0], private_bytes() - before[1])
    start = ctypes.addressof(ctypes.c_char.from_buffer_copy(b"x"))  # no page of a file
    inside = array_of(mapped)
    print(mapped_bytes([(inside, 100), (inside + (60 << 20), 11), (start, 1)]))
"""


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
def test_pages_of_files_are_not_what_a_step_took(tmp_path):
    done = subprocess.run([sys.executable, "-c", _MAPPED], capture_output=True, text=True, check=True, cwd=tmp_path)
    resident, private, mapped = map(int, done.stdout.split())
    assert mapped == 111
    assert resident >= 64 * MIB  # the twin: by this count the data that a run reads would be freed memory
    assert private < 4 * MIB
