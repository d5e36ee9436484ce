"""Optional libraries and tools: whether they work on this machine, found out by trying; and quiet imports.

An `…_obstacle` function says why something cannot be used, as the end of a sentence, or returns "". The plan calls it
before it relies on the library; heavy imports happen only on demand.
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

from surefoot.system.errors import EnvironmentFault, Fault, InputError

_LONGEST = 160  # characters of a library's own message


def is_installed(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def torchvision_fault(error: BaseException) -> EnvironmentFault | None:
    """Return what an error means that a torchvision for another torch caused: transformers imports it everywhere, and
    then no module of transformers can be imported."""
    cause: BaseException | None = error
    while cause is not None and "torchvision::" not in str(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torchvision", "torch")]
    what = f"{versions[0]} was built for another torch than {versions[1]}: {_one_line(cause)}"
    fix = "install it from the same place as torch, or remove it: pip uninstall torchvision"
    return EnvironmentFault(Fault("torchvision", what, fix, code="SF-PACKAGE"))


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
    """Raises InputError if deepspeed is not installed; imports nothing."""
    if not is_installed("deepspeed"):
        fix = "pip install 'surefoot[deepspeed]', or set parallel.engine=fsdp2, which shards the same"
        raise InputError(Fault("parallel.engine", "deepspeed is not installed", fix, code="SF-PACKAGE"))


def import_deepspeed(kind: str) -> Any:
    """Import DeepSpeed for this kind of device. kind: cpu | cuda. Compiles nothing. Raises InputError if it is not
    installed."""
    require_deepspeed()
    with _silent("DeepSpeed"), _hidden("mlflow"), _compiled_when_called():  # its autotuner looks for it
        deepspeed = importlib.import_module("deepspeed")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # every engine does, and it would compile
        if kind == "cpu":  # it would use a GPU although none was requested
            from deepspeed.accelerator import set_accelerator
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and gloo is enough
    return deepspeed


@functools.cache
def bitsandbytes_obstacle(kind: str) -> str:
    """Quantize a matrix and take a step with 8-bit moments to test it. kind: cpu | cuda | mps."""
    if not is_installed("bitsandbytes"):
        return "needs bitsandbytes, which is not installed"
    try:
        _try_bitsandbytes(import_bitsandbytes(), kind)
    except Exception as error:  # a native library may fail with any exception
        version = importlib.metadata.version("bitsandbytes")
        return f"needs bitsandbytes, and version {version} does not work on this {kind}: {_one_line(error)}"
    return ""


def import_torchao() -> Any:
    """Import torchao.quantization without its warnings."""
    with _silent("torchao"):
        importlib.import_module("torchao.quantization.qat")
        return importlib.import_module("torchao.quantization")


@functools.cache
def torchao_obstacle() -> str:
    """Round a layer as in training, convert it, and compare the two."""
    if not is_installed("torchao"):
        return "needs torchao, which is not installed"
    try:
        _try_torchao(import_torchao())
    except Exception as error:  # its layers may raise anything
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
        raise RuntimeError("a converted layer computes other values than in training")


@functools.cache
def compiler_obstacle(kind: str) -> str:
    """Compile a one-line function for that device; takes a few seconds the first time.

    torch's caches of earlier compilations are bypassed, because they would hide a missing compiler.
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
        return f"needs a working compiler, but torch says: {_one_line(error)}"
    return ""


def _try_bitsandbytes(library: Any, kind: str) -> None:
    import torch

    matrix = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 64, device=kind).reshape(64, 64))
    packed, state = library.functional.quantize_4bit(matrix.data, quant_type="nf4", compress_statistics=True)
    if not torch.allclose(library.functional.dequantize_4bit(packed, state), matrix.data, atol=0.2):
        raise RuntimeError("dequantizing does not return the quantized matrix")
    codes, scale, _ = library.functional.int8_vectorwise_quant(matrix.data.half())
    if not torch.allclose(codes * scale[:, None] / 127, matrix.data, atol=0.01):
        raise RuntimeError("dequantizing does not return the matrix quantized to 8 bits")
    matrix.grad = torch.ones_like(matrix)
    library.optim.AdamW8bit([matrix], lr=1e-3).step()
    if not torch.isfinite(matrix).all():
        raise RuntimeError("a step with 8-bit moments is not finite")


@contextmanager
def _silent(logger: str) -> Iterator[None]:
    """Silence Python warnings and this library's log records inside the block."""
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
    """Make a package that is not imported yet look uninstalled inside the block, for libraries that import it whether
    needed or not, which can take seconds."""
    if name in sys.modules:
        yield
        return
    with _hidden(name):
        yield


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Delay torch.compile inside the block to the first call, because setting up the compiler takes a second."""
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
    """Make imports of this package inside the block fail as if it were not installed."""
    former = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]  # what Python documents for blocking an import
    try:
        yield
    finally:
        del sys.modules[name]
        if former is not None:
            sys.modules[name] = former


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split()) or type(error).__name__
    return textwrap.shorten(text, _LONGEST, placeholder=" …")
