"""Facts about the machine, as plain values. The only reader of device facts.

`detect` examines this machine (and imports torch), `preset` describes another one, `describe` returns what a run writes
to environment.json. Facts that change from minute to minute (free memory) are kept apart from constant ones, because a
plan must be reproducible.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.system import process
from surefoot.system.allocator import Holes
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import GIB, nearest_word

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy")
# Packages with an attention kernel for rows of several documents: name of the form in the plan -> module with
# `flash_attn_varlen_func`. Their distributions are named alike.
ATTENTION_PACKAGES = {
    "flash_attn_2": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}
_KERNELS = ("flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel")
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "bf16",
    "sve",
)
# oneDNN's instruction limits with which it emulates 16-bit products, whatever the processor supports.
_EMULATING = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


@dataclass(frozen=True)
class Hardware:
    """One accelerator (or the CPU) as the plan sees it.

    memory: bytes that one process can use.
    free: bytes currently unused, None if not measured.
    flash_attention_2: whether the package is installed, None if unknown.
    packages: keys of `ATTENTION_PACKAGES` that are installed.
    liger: whether liger-kernel is installed, None if unknown.
    """

    name: str
    kind: Literal["cpu", "cuda", "mps"]
    memory: int
    capability: tuple[int, int] | None  # CUDA compute capability
    bf16: bool  # computed in hardware (not merely accepted)
    fp16: bool
    tf32: bool
    cores: int  # CPU threads of this process
    preset: bool  # True: described, not present; nothing can be measured
    free: int | None = None
    flash_attention_2: bool | None = None
    host: int | None = None  # bytes of host memory beside an accelerator's own; None: unknown, or a CPU
    host_free: int | None = None  # bytes of it currently unused
    packages: tuple[str, ...] = ()
    liger: bool | None = None
    holes: Holes = "none"  # CPU: fragmentation by the C library, see `surefoot.system.allocator`


def _nvidia(name: str, memory: float, capability: tuple[int, int], cores: int) -> Hardware:
    """memory: GiB that torch reports as total, which is less than the nominal size."""
    ampere = capability >= (8, 0)
    return Hardware(
        name=name,
        kind="cuda",
        memory=int(memory * GIB),
        capability=capability,
        bf16=ampere,
        fp16=capability >= (7, 0),
        tf32=ampere,
        cores=cores,
        preset=True,
    )


_A100 = _nvidia("NVIDIA A100-SXM4-80GB", 79.2, (8, 0), 16)
# Memory as torch's out-of-memory messages in public issues report it; the lowest figure where cards differ.
_PRESETS: dict[str, Hardware] = {
    "b200": _nvidia("NVIDIA B200", 178.3, (10, 0), 16),
    "h200": _nvidia("NVIDIA H200", 139.8, (9, 0), 16),
    "h100": _nvidia("NVIDIA H100 80GB HBM3", 79.1, (9, 0), 16),
    "a100": _A100,
    "a100-80": _A100,
    "a100-40": _nvidia("NVIDIA A100-SXM4-40GB", 39.3, (8, 0), 16),
    "mi300x": replace(_nvidia("AMD Instinct MI300X", 191.9, (9, 4), 16), tf32=False),
    "l40s": _nvidia("NVIDIA L40S", 44.3, (8, 9), 16),
    "a6000": _nvidia("NVIDIA RTX A6000", 47.4, (8, 6), 16),
    "a40": _nvidia("NVIDIA A40", 44.3, (8, 6), 16),
    "rtx5090": _nvidia("NVIDIA GeForce RTX 5090", 31.3, (12, 0), 8),
    "rtx4090": _nvidia("NVIDIA GeForce RTX 4090", 23.5, (8, 9), 8),
    "rtx3090": _nvidia("NVIDIA GeForce RTX 3090", 23.5, (8, 6), 8),
    "l4": _nvidia("NVIDIA L4", 22.0, (8, 9), 8),
    "a10": _nvidia("NVIDIA A10", 22.0, (8, 6), 8),
    "v100-32": _nvidia("Tesla V100-SXM2-32GB", 31.7, (7, 0), 8),
    "v100": _nvidia("Tesla V100-SXM2-16GB", 15.7, (7, 0), 8),
    "t4": _nvidia("Tesla T4", 14.5, (7, 5), 8),
    # A laptop without instructions for 16-bit products, where bf16 can be hundreds of times slower than fp32.
    "cpu": Hardware("CPU, 8 threads, 16 GiB", "cpu", 16 * GIB, None, False, False, False, 8, preset=True),
}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", re.IGNORECASE)


def preset(name: str) -> Hardware:
    """The machine that `--hardware` describes: a name such as "h100" in any case, or the memory of a GPU such as
    "48GiB", which then computes bf16. Raises InputError that suggests a name like it, or lists all."""
    if found := _PRESETS.get(name.lower()):
        return found
    if found := _MEMORY.fullmatch(name):
        size = float(found[1]) * (1 if found[2].lower() == "gib" else 1e9 / GIB)
        return _nvidia(f"a GPU of {name}", size, (8, 0), 16)
    near = nearest_word(name, _PRESETS)
    fix = f"did you mean {near}?" if near else f"known: {', '.join(_PRESETS)}, or a GPU's memory such as 48GiB"
    raise InputError(Fault("--hardware", f"unknown machine {name!r}", fix, code="SF-USE-FLAG"))


def detect() -> Hardware:
    """Describe this machine: this process's CUDA device (the first by default), else the CPU."""
    import torch

    packages, threads = _attention_packages(), torch.get_num_threads()
    flash = "flash_attn_2" in packages
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        total, unused = host_memory()
        properties = torch.cuda.get_device_properties(device)
        found = _nvidia(properties.name, 0, (properties.major, properties.minor), threads)
        return replace(
            found,
            memory=properties.total_memory,
            host=total,
            host_free=unused,
            preset=False,
            free=torch.cuda.mem_get_info(device)[0],
            flash_attention_2=flash,
            packages=packages,
            liger=importlib.util.find_spec("liger_kernel") is not None,
        )
    return _host(threads, flash)


def _attention_packages() -> tuple[str, ...]:
    """Those of `ATTENTION_PACKAGES` that are installed. Imports none of them: that could fail or start the GPU."""
    found = []
    for name, module in ATTENTION_PACKAGES.items():
        package, _, inner = module.partition(".")
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        # flash-attn-4 alone makes "flash_attn" a namespace package, which has no origin, with "cute" in it.
        folders = [Path(folder) / inner for folder in spec.submodule_search_locations or ()]
        if any((folder / "__init__.py").is_file() for folder in folders) if inner else spec.origin is not None:
            found.append(name)
    return tuple(found)


def glance() -> Hardware:
    """Describe this machine without torch, only for early refusals: with a GPU everything counts as possible and memory
    as unlimited."""
    if accelerators():
        return replace(_PRESETS["h200"], memory=sys.maxsize)
    return _host(usable_cores(), "flash_attn_2" in _attention_packages())


def _host(threads: int, flash: bool) -> Hardware:
    """The CPU."""
    total, free = host_memory()
    flags = _cpu_flags()
    emulated = process.cpu_limit() in _EMULATING
    return Hardware(
        name=_cpu_model(),
        kind="cpu",
        memory=total,
        capability=None,
        bf16=bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}) and not emulated,
        fp16="amx_fp16" in flags and not emulated,  # avx512_fp16 was measured at the speed of fp32
        tf32=False,
        cores=threads,
        preset=False,
        free=free,
        flash_attention_2=flash,
        holes=process.holes(),
    )


def host_memory() -> tuple[int, int]:
    """(total, free) in bytes, both within the limit of a container."""
    import psutil

    memory = psutil.virtual_memory()
    # The kernel kills the process at the container's limit, not at the machine's memory.
    total = min([memory.total, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    return total, min(total, memory.available)


def _cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Memory limits of this process's control group and its parents, for cgroup v1 and v2; "max" means no limit."""
    limits = []
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        base = root / controllers
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if file.is_file() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
            if folder == base:
                break
    return limits


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    """Instruction sets that matter here; "flags" on x86, "Features" on ARM."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split()) & set(_CPU_FLAGS)


def accelerators() -> int:
    """Count NVIDIA devices without torch: the number of processes that launchers use by default."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of everything that can change a result, including Python and surefoot. Imports none of it;
    cached, because reading the metadata takes milliseconds and a run calls this some twenty times."""
    found = {"python": platform.python_version()}
    for library in ("surefoot", *_LIBRARIES, *_KERNELS):
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The machine for environment.json: enough to explain differences, without names of the host or its user."""
    import torch

    hardware = detect()
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "cpu": _cpu_model(),
        "cpu_flags": sorted(_cpu_flags()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "device": {"kind": hardware.kind, "name": hardware.name, "memory": hardware.memory},
        "versions": versions(),
        "environment": process.read_environment(),
        "byte_order": sys.byteorder,
    }
    if hardware.kind == "cuda":
        facts["device"] |= {
            "capability": list(hardware.capability or ()),
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(),
        }
    return facts


def _driver_version() -> str:
    """Version of NVIDIA's kernel driver; empty if unknown."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.is_file() else None
    return found[0] if found else ""


def peak_memory(kind: str) -> int:
    """Peak memory of this process in bytes: allocated on the GPU for "cuda", else resident."""
    if kind == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would include the parent's memory before it started this program
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) * 1024
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak(kind: str) -> None:
    """Reset `peak_memory` and free torch's GPU cache. Without effect on a CPU, where the system counts from the start
    of the process."""
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def process_seconds() -> float:
    """Wall-clock seconds since this process started; 0 if the clock was set back meanwhile."""
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def free_disk(folder: Path) -> int:
    """Bytes that this user can still write on the disk of an existing folder."""
    return shutil.disk_usage(folder).free
