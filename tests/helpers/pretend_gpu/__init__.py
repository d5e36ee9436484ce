"""A simulated CUDA device, to run code for GPUs on machines without one.

    PYTHONPATH=tests python -m helpers.pretend_gpu surefoot train run.yaml
    make rehearsal                               # tests/rehearsal, and the tests that need a GPU

torch's CPU build knows the device type "cuda" but has no kernels for it. A small extension (pretend_gpu.cpp) registers
what is missing: memory, a fallback that runs the CPU kernel of every operator, FlashAttention and the memory-efficient
kernel under their CUDA names, generators, events. So code that checks `device.type == "cuda"` takes the same branch as
on a GPU, and these errors of GPU code are raised:

- operators on tensors of two devices, except scalars and indices;
- reading uninitialized memory, which contains NaN;
- reading the result of a non-blocking copy before waiting for it: copies from and to pinned memory happen as late as a
  GPU may do them.

It counts the places where the host waits for the device, and allocated bytes, in blocks like those of CUDA's allocator.
It has one stream, no NCCL and no Triton. Speed and numerics are those of the CPU kernels, not of a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "pretend_gpu.cpp"
BUILT = HERE.parents[2] / "build" / "pretend_gpu"


def obstacle() -> str:
    """Return why the device cannot be built here; empty if it can."""
    if torch.version.cuda:
        return "this torch has CUDA of its own"
    if not shutil.which("g++") or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "it takes g++ and Python's headers"
    return ""


def library() -> Path:
    """Return the extension; compiles it (15 seconds) unless this source was compiled with this torch before."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    found = BUILT / f"{key}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest ask at once
        if not found.exists():
            _compile(found)
    return found


def _compile(target: Path) -> None:
    home = Path(torch.__file__).parent
    includes = (home / "include", home / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    unfinished = target.with_suffix(".unfinished")
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=pretend_gpu_device"]
    command += [f"-I{folder}" for folder in includes] + [str(SOURCE), "-o", str(unfinished)]
    command += [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    subprocess.run(command, check=True)
    unfinished.rename(target)


def environment() -> dict[str, str]:
    """Return the environment with which a process and its children see one GPU."""
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PRETEND_GPU_LIBRARY": str(library()), "PYTHONPATH": os.pathsep.join(paths)}


def is_here() -> bool:
    """Whether this process runs on the simulated GPU."""
    return "PRETEND_GPU_LIBRARY" in os.environ and torch.cuda.is_available()
