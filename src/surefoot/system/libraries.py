"""Optional libraries and tools: whether they work on this machine, told by trying them, and imports without noise.

An `…_obstacle` says why something cannot be used, as the end of a sentence, and is empty where it can. The plan asks
before it promises; heavy imports happen only when somebody asks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from surefoot.system.errors import Fault, InputError

_LONGEST = 160  # characters of a library's own message


def is_installed(name: str) -> bool:
    """Whether a package could be imported; nothing is."""
    return importlib.util.find_spec(name) is not None


def import_bitsandbytes() -> Any:
    """The module. It is imported without its warnings, without its look for kernels on the hub, and without torch's
    compiler, which it asks for in its first lines: that comes when it is needed.

    On CPUs with AVX512-BF16 it downloads and runs a kernel at import where the `kernels` package is installed. What it
    would be used for, generation from repacked weights, is switched off here (see `surefoot.models.precision`).
    """
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    with _silent("bitsandbytes"), _hidden("kernels"), _compiled_when_called():
        return importlib.import_module("bitsandbytes")


def require_deepspeed() -> None:
    """Raises InputError where it is not installed; imports nothing."""
    if not is_installed("deepspeed"):
        fix = "pip install 'surefoot[deepspeed]', or parallel.engine=fsdp2, which shares the same out"
        raise InputError(Fault("parallel.engine", "deepspeed is not installed", fix, code="SF-PACKAGE"))


def import_deepspeed(kind: str) -> Any:
    """The module, set to the kind of device that the run is on. kind: cpu | cuda. Nothing is compiled by that. Raises
    InputError where it is not installed."""
    require_deepspeed()
    with _silent("DeepSpeed"):
        deepspeed = importlib.import_module("deepspeed")
        if kind == "cpu":  # it would take a GPU that is there and not asked for
            from deepspeed.accelerator import set_accelerator
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and gloo serves
    return deepspeed


@functools.cache
def bitsandbytes_obstacle(kind: str) -> str:
    """kind: cpu | cuda | mps. Quantises a matrix and takes a step with 8-bit moments on that device."""
    if not is_installed("bitsandbytes"):
        return "needs bitsandbytes, which is not installed"
    try:
        _try_bitsandbytes(import_bitsandbytes(), kind)
    except Exception as error:  # a native library that does not load fails in its own ways
        version = importlib.metadata.version("bitsandbytes")
        return f"needs bitsandbytes, and version {version} does not work on this {kind}: {_one_line(error)}"
    return ""


def import_torchao() -> Any:
    """torchao.quantization, without what it says of kernels that this machine cannot load."""
    with _silent(""), _silent("torch.utils._pytree"), _silent("torchao"):
        importlib.import_module("torchao.quantization.qat")
        return importlib.import_module("torchao.quantization")


@functools.cache
def torchao_obstacle() -> str:
    """Rounds a layer as training does, converts it, and compares the two."""
    if not is_installed("torchao"):
        return "needs torchao, which is not installed"
    try:
        _try_torchao(import_torchao())
    except Exception as error:  # its own layers raise what they like
        version = importlib.metadata.version("torchao")
        return f"needs torchao, and version {version} does not work here: {_one_line(error)}"
    return ""


def _try_torchao(library: Any) -> None:
    import torch

    layer, x = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)), torch.linspace(-1, 1, 128).reshape(2, 64)
    int4 = torch.int4  # pyright: ignore[reportAttributeAccessIssue]
    config = library.IntxWeightOnlyConfig(weight_dtype=int4, granularity=library.PerGroup(32))
    library.quantize_(layer, library.qat.QATConfig(config, step="prepare"))
    rounded = layer(x)
    library.quantize_(layer, library.qat.QATConfig(config, step="convert"))
    if not torch.equal(rounded, layer(x)) or not rounded.requires_grad:
        raise RuntimeError("a converted layer computes something else than it did in training")


@functools.cache
def compiler_obstacle(kind: str) -> str:
    """Compiles a function of one line for that device; a few seconds the first time.

    What torch keeps of earlier compilations, in memory and on disk, would answer for a compiler that is gone.
    """
    import torch
    import torch._inductor.config as inductor

    def one_line(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    unseen = types.FunctionType(one_line.__code__.replace(), one_line.__globals__)
    try:
        with _silent("torch"), inductor.patch(force_disable_caches=True):
            torch.compile(unseen)(torch.ones(8, device=kind))
    except Exception as error:  # torch wraps what the compiler, or its absence, raised
        return f"needs a compiler that works, and torch says: {_one_line(error)}"
    return ""


def _try_bitsandbytes(library: Any, kind: str) -> None:
    import torch

    matrix = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 64, device=kind).reshape(64, 64))
    packed, state = library.functional.quantize_4bit(matrix.data, quant_type="nf4", compress_statistics=True)
    if not torch.allclose(library.functional.dequantize_4bit(packed, state), matrix.data, atol=0.2):
        raise RuntimeError("it does not give back the matrix that it quantised")
    codes, scale, _ = library.functional.int8_vectorwise_quant(matrix.data.half())
    if not torch.allclose(codes * scale[:, None] / 127, matrix.data, atol=0.01):
        raise RuntimeError("it does not give back the matrix that it quantised to 8 bits")
    matrix.grad = torch.ones_like(matrix)
    library.optim.AdamW8bit([matrix], lr=1e-3).step()
    if not torch.isfinite(matrix).all():
        raise RuntimeError("a step with 8-bit moments is not finite")


@contextmanager
def _silent(logger: str) -> Iterator[None]:
    """No Python warnings and no log records of this library inside; the former settings afterwards."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextmanager
def left_alone(name: str) -> Iterator[None]:
    """A package that nobody has imported passes for not installed inside. For libraries that import one wherever they
    find it, needed or not, which can take seconds."""
    if name in sys.modules:
        yield
        return
    with _hidden(name):
        yield


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """What is given to torch.compile inside is compiled at its first call: to set the compiler up takes a second of
    processor time."""
    import torch

    compile_now = torch.compile

    def later(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
        if function is None:
            return compile_now(**settings)
        made = functools.cache(lambda: compile_now(function, **settings))
        return lambda *given, **named: made()(*given, **named)

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = compile_now


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """An import of this package inside fails as if it were not installed."""
    former = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]  # what Python documents for blocking an import
    try:
        yield
    finally:
        del sys.modules[name]
        if former is not None:
            sys.modules[name] = former


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split()) or type(error).__name__
    return textwrap.shorten(text, _LONGEST, placeholder=" …")
