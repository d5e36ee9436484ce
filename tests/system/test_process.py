"""The environment that this process reads, and the launcher that started it."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest

from surefoot.system import process
from surefoot.system.allocator import NO_THREAD_CACHE, is_glibc
from surefoot.system.process import read_environment
from surefoot.system.variables import VARIABLES


def test_only_names_that_matter_are_read(monkeypatch):
    monkeypatch.setenv("SDPA_BACKEND", "flash")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = read_environment()
    assert seen["SDPA_BACKEND"] == "flash"
    assert set(seen) <= set(VARIABLES)
    assert not [name for name in VARIABLES if "TOKEN" in name or "KEY" in name or "DIR" in name]


@pytest.mark.parametrize(
    ("told", "parent"),
    [
        ({process.LAUNCHER: "77"}, 77),
        ({"TORCHELASTIC_RUN_ID": "none"}, os.getppid()),  # torchrun's ranks are its children
        ({process.LAUNCHER: "77", "TORCHELASTIC_RUN_ID": "none"}, 77),
        ({}, None),  # started by hand: whoever did may leave
    ],
    ids=["surefoot", "torchrun", "surefoot under torchrun", "by hand"],
)
def test_a_rank_knows_the_launcher_that_it_ends_with(monkeypatch, told, parent):
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name in (process.LAUNCHER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**rank, **told}.items():
        monkeypatch.setenv(name, value)
    launch = process.find_launch()
    assert launch is not None
    assert launch.parent == parent


_PROGRAM = """
import json, os, sys
from surefoot.system import process
process.restart_without_thread_cache()
print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), process.holes()]))
"""


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize(
    ("told", "tunables", "holes"),
    [
        ({}, NO_THREAD_CACHE, "few"),
        ({"GLIBC_TUNABLES": NO_THREAD_CACHE}, NO_THREAD_CACHE, "few"),  # began again already, or by its parent
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}, "glibc.malloc.tcache_count=3", "many"),
        ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, None, "many"),
        ({"MALLOC_MMAP_THRESHOLD_": "1048576", "GLIBC_TUNABLES": NO_THREAD_CACHE}, NO_THREAD_CACHE, "many"),
    ],
    ids=["alone", "done", "twin: other tunables", "twin: another threshold", "both"],
)
def test_a_program_begins_again_without_the_cache_of_a_thread(tmp_path, monkeypatch, told, tunables, holes):
    """Same process, same words; and not where the user settles the allocator."""
    if any(map(os.path.exists, process._GPU_FILES)):
        pytest.skip("beside a GPU none does")
    for name in process._ALLOCATOR_NAMES:
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    words = [sys.executable, "-W", "ignore", str(program), "a b", "--c=ü"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **told})
    said, _ = child.communicate()
    assert child.returncode == 0
    assert json.loads(said) == [child.pid, ["a b", "--c=ü"], tunables, holes]


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("program", ["-", "-c", "no file"])
def test_what_cannot_be_read_again_goes_on(monkeypatch, program):
    started = []
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    for name in process._ALLOCATOR_NAMES:
        monkeypatch.delenv(name, raising=False)
    process.restart_without_thread_cache()
    assert not started
    assert process.holes() == "many"


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("parent", [object(), None], ids=["a child", "twin: a program"])
def test_a_child_of_multiprocessing_goes_on(monkeypatch, parent):
    """The words that it was started with are its parent's."""
    started = []
    monkeypatch.setattr(sys, "argv", [__file__])
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(process, "_GPU_FILES", ())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    for name in process._ALLOCATOR_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    process.restart_without_thread_cache()
    assert bool(started) == (parent is None)
