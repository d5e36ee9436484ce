"""Optional libraries are tried before they are promised, and imported without noise or downloads."""

import subprocess
import sys

import pytest
import torch

from surefoot import libraries as module
from surefoot.libraries import bitsandbytes_obstacle, compiler_obstacle, import_bitsandbytes, is_installed

FETCHES = """
import pathlib
def get_kernel(*_, **__):
    pathlib.Path("fetched").write_text("")
    raise RuntimeError("no network")
"""

_OURS = "from surefoot.libraries import import_bitsandbytes; import_bitsandbytes()"


def _forget():
    bitsandbytes_obstacle.cache_clear()
    compiler_obstacle.cache_clear()


@pytest.fixture(autouse=True)
def _ask_again():
    """Before: another file's test in this process may have asked. After: what a broken library said is not kept."""
    _forget()
    yield
    _forget()


def test_bitsandbytes_works_here():
    assert is_installed("bitsandbytes")
    assert bitsandbytes_obstacle("cpu") == ""


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(module, "is_installed", lambda name: False)
    assert bitsandbytes_obstacle("cpu") == "needs bitsandbytes, which is not installed"


def test_a_native_library_that_does_not_load_is_named(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Native code method attempted to call:\n lib.cquantize()")

    monkeypatch.setattr(import_bitsandbytes().functional, "quantize_4bit", broken)
    said = bitsandbytes_obstacle("cpu")
    assert said.endswith("does not work on this cpu: Native code method attempted to call: lib.cquantize()")


def test_wrong_numbers_are_noticed(monkeypatch):
    functional = import_bitsandbytes().functional
    monkeypatch.setattr(functional, "dequantize_4bit", lambda packed, state: torch.zeros(64, 64))
    assert "does not give back" in bitsandbytes_obstacle("cpu")


def test_a_missing_compiler_is_one_line():
    import torch._inductor.config as inductor

    assert compiler_obstacle("cpu") == ""  # what this leaves behind does not answer for it
    compiler_obstacle.cache_clear()
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        said = compiler_obstacle("cpu")
    assert said.startswith("needs a compiler that works, and torch says: InvalidCxxCompiler")
    assert "\n" not in said


@pytest.mark.parametrize(("line", "fetches"), [(_OURS, False), ("import bitsandbytes", True)])
def test_bitsandbytes_comes_without_noise_and_without_a_look_at_the_hub(tmp_path, line, fetches):
    """The second line is the twin: what it does alone, on CPUs with AVX512-BF16."""
    if fetches and not import_bitsandbytes().functional.has_avx512bf16():
        pytest.skip("bitsandbytes looks for kernels on CPUs with AVX512-BF16 only")
    (tmp_path / "kernels.py").write_text(FETCHES)
    done = subprocess.run([sys.executable, "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "fetched").exists() == fetches
    assert ("kernels-community" in done.stdout + done.stderr) == fetches
