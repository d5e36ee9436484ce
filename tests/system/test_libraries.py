"""Optional libraries are tried before they are promised, and imported without noise or downloads."""

import functools
import subprocess
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.faults import gives
from helpers.tiers import representatives
from surefoot.models import save
from surefoot.system import libraries as module
from surefoot.system.libraries import bitsandbytes_obstacle, compiler_obstacle, import_bitsandbytes, is_installed

FETCHES = """
import pathlib
def get_kernel(*_, **__):
    pathlib.Path("fetched").write_text("")
    raise RuntimeError("no network")
"""

# Each line in a fork of a process that has torch alone: whether a compiler came with it, and whether it asked the hub.
_EACH = """
import os, sys, torch
for line in sys.argv[1:]:
    if os.fork() == 0:
        exec(line)
        print("torch._inductor.compile_fx" in sys.modules, os.path.exists("fetched"))
        break
    assert os.wait()[1] == 0
    print("<next>", flush=True)
"""
_OURS = "from surefoot.system.libraries import import_bitsandbytes; import_bitsandbytes()"


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
    assert gives(bitsandbytes_obstacle("cpu"), "bitsandbytes")


def test_a_native_library_that_does_not_load_is_named(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no symbol\n lib.cquantize()")

    monkeypatch.setattr(import_bitsandbytes().functional, "quantize_4bit", broken)
    said = bitsandbytes_obstacle("cpu")
    assert said.endswith("cpu: no symbol lib.cquantize()")


def test_wrong_numbers_are_noticed(monkeypatch):
    functional = import_bitsandbytes().functional
    monkeypatch.setattr(functional, "dequantize_4bit", lambda packed, state: torch.zeros(64, 64))
    assert bitsandbytes_obstacle("cpu")


@pytest.mark.parametrize("backend", representatives(["eager", "inductor"], "eager"))
def test_a_missing_compiler_is_one_line(monkeypatch, backend):
    """eager: after a compilation that takes no compiler, which would take most of this file's time."""
    import torch._inductor.config as inductor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        assert compiler_obstacle("cpu") == ""  # what this leaves behind does not answer for it
    compiler_obstacle.cache_clear()
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        said = compiler_obstacle("cpu")
    assert gives(said, "InvalidCxxCompiler")
    assert "\n" not in said


@pytest.mark.slow
def test_bitsandbytes_comes_without_noise_and_compiler_and_look_at_the_hub(tmp_path):
    """The second line is the twin: what it does alone; it looks for kernels on CPUs with AVX512-BF16."""
    program = [sys.executable, "-c", _EACH, _OURS, "import bitsandbytes"]
    (tmp_path / "kernels.py").write_text(FETCHES)
    done = subprocess.run(
        program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    ours, alone = done.stdout.split("<next>\n")[:2]
    fetches = bool(import_bitsandbytes().functional.has_avx512bf16())
    for said, compiles, looks in ((ours, False, False), (alone, True, fetches)):
        assert said.splitlines()[-1] == f"{compiles} {looks}"
        assert ("kernels-community" in said) == looks


# In a fork of a process that has imported DeepSpeed by our function; then what its engine would import anew.
_ENGINE = """
import importlib, sys
muon = [name for name in sys.modules if name.startswith("deepspeed.runtime.zero.muon")]
print(len(muon), "torch._inductor.compile_fx" in sys.modules)
for name in muon:
    del sys.modules[name]
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
print("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_deepspeed_comes_without_compiler(forked_python):
    """The last line is the twin: what its engine imports, alone."""
    said = subprocess.run([forked_python, "-c", _ENGINE], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["3 False", "True"]


def test_what_is_compiled_later_is_compiled_once_and_with_its_settings(monkeypatch):
    asked = []

    def compile_now(function, **settings):
        asked.append(settings)
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with module._compiled_when_called():
        double = torch.compile(lambda x: 2 * x, dynamic=False)
    assert (torch.compile, asked) == (compile_now, [])
    assert (double(2), double(x=3), asked) == (4, 6, [{"dynamic": False}])


def test_what_is_left_alone_passes_for_missing_unless_it_is_there_already():
    with module.left_alone("deepspeed_of_nobody"):
        assert not is_installed("deepspeed_of_nobody")
    assert "deepspeed_of_nobody" not in sys.modules
    with module.left_alone("torch"):
        assert is_installed("torch")


class _Asked:
    """Finds no module; remembers whether anybody asked for deepspeed."""

    def __init__(self):
        self.asked = False

    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            self.asked = True
            raise ImportError("deepspeed is not to be imported")


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
@pytest.mark.parametrize("left", [save.left_alone, nullcontext], ids=["ours", "twin"])
def test_a_model_is_saved_without_deepspeed(tmp_path, monkeypatch, left):
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    finder = _Asked()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(save, "left_alone", left)
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with suppress(ImportError):
        save.save_full(LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1)), tmp_path)
    assert finder.asked == (left is nullcontext)
    assert finder.asked or list(tmp_path.glob("*.safetensors"))
