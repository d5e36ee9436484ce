"""This process and what it was started with: environment variables, which are read and set here alone, and the
launcher that started it, if any.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from surefoot.system.allocator import NO_THREAD_CACHE, Holes, is_glibc, keep_freed_memory
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.variables import LAUNCHED_THREADS, VARIABLES

# What other tools read that a command does not show: `NNODES=2 llamafactory-cli train`, or what a launcher sets.
_LAUNCH_TEXT = """
ACCELERATE_DYNAMO_BACKEND ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ALLOW_EXTRA_ARGS CUDA_VISIBLE_DEVICES
FORCE_TORCHRUN MASTER_ADDR MASTER_PORT MAX_NNODES MIN_NNODES NNODES NODE_RANK NPROC_PER_NODE USE_MCA USE_MODELSCOPE_HUB
USE_OPENMIND_HUB USE_RAY WANDB_MODE WANDB_PROJECT WORLD_SIZE
"""
LAUNCH_NAMES = tuple(_LAUNCH_TEXT.split())
# glibc reads them when a program starts. LD_PRELOAD may bring an allocator of its own.
_TUNABLES = "GLIBC_TUNABLES"
_ALLOCATOR_NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", _TUNABLES, "LD_PRELOAD")
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
# oneDNN keeps a program for each shape of a product that it has seen, and torch's bridge to it keeps another one:
# 1,024 each, of 0.5 to 0.7 MiB. In training every micro-batch has shapes of its own, and few come again soon. Both read
# their limit at the first product. Too few would be made anew in each layer: a layer's products are some 40, those of
# the documents of a micro-batch up to 6 each.
_PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
_NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def read_environment() -> dict[str, str]:
    """The variables of `surefoot.system.variables` that are set, by name. The number of threads that surefoot's own
    launcher has set stands under `LAUNCHED_THREADS`: it is no wish of the user."""
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if LAUNCHED_THREADS in os.environ and found.get("OMP_NUM_THREADS") == os.environ[LAUNCHED_THREADS]:
        found[LAUNCHED_THREADS] = found.pop("OMP_NUM_THREADS")
    return found


def cpu_limit() -> str:
    """oneDNN's name of the newest instruction set that it may use; "" if the environment sets no limit."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def environment_without(names: Collection[str]) -> dict[str, str]:
    """This process's environment without some variables, for a child."""
    return {name: value for name, value in os.environ.items() if name not in names}


def launch_environment() -> dict[str, str]:
    """The set variables that a translated command's tool would read, by name."""
    return {name: os.environ[name] for name in LAUNCH_NAMES if name in os.environ}


@dataclass(frozen=True)
class Launch:
    """A process's place among the ranks that a launcher started.

    rank: of world, from 0.
    local_rank: of local_world on this machine.
    parent: process id of surefoot's launcher or torchrun (also accelerate's); if it ends, this process ends too. None
        under other launchers.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    parent: int | None


LAUNCHER = "SUREFOOT_LAUNCHER"  # set by surefoot's own launcher, to its process id


_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, whose ranks are its children


def find_launch() -> Launch | None:
    """Return None without a launcher. Raises EnvironmentFault if a launcher's variables are inconsistent.

    torchrun, accelerate and deepspeed all set the variables that torch.distributed reads.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ.get(name, "").strip() for name in (*names, "MASTER_ADDR", "MASTER_PORT", LAUNCHER)}
    if given["WORLD_SIZE"] in ("", "0", "1"):
        return None
    fix = "start it with `parallel.nproc`, torchrun, accelerate launch or deepspeed, or unset WORLD_SIZE"
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not given[name]]:
        what = f"is {given['WORLD_SIZE']}, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        raise _inconsistent("WORLD_SIZE", what, fix)
    given |= {name: given[name] or usual for name, usual in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))}
    for name in (*names, LAUNCHER):
        if given[name] and not given[name].isdecimal():
            raise _inconsistent(name, f"is {given[name]!r}, not a number", fix)
    _port(given["MASTER_PORT"])
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise _inconsistent("RANK", f"is {given['RANK']}, and WORLD_SIZE is {given['WORLD_SIZE']}", fix)
    # A rank whose launcher has ended would wait for the others forever and keep its GPU.
    of_torchrun = os.getppid() if os.environ.get(_OF_TORCHRUN) else None
    parent = int(given[LAUNCHER]) if given[LAUNCHER] else of_torchrun
    return Launch(*(int(given[name]) for name in names), parent=parent)


def _inconsistent(name: str, what: str, fix: str) -> EnvironmentFault:
    """name: the variable."""
    return EnvironmentFault(Fault(name, what, fix, code="SF-PARALLEL"))


@dataclass(frozen=True)
class Machines:
    """The machines of a run, each of which starts as many ranks.

    index: this machine's, from 0.
    address, port: where machine 0 listens.
    """

    count: int
    index: int
    address: str
    port: int


def find_machines(count: int) -> Machines:
    """Return the place of this machine among `count`. Raises EnvironmentFault if the environment does not tell it."""
    given = {name: os.environ.get(name, "").strip() for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    fix = f"start it on each with NODE_RANK=0 to {count - 1}, and MASTER_ADDR=the name of machine 0"
    for name in ("NODE_RANK", "MASTER_ADDR"):
        if not given[name]:
            raise _inconsistent(name, f"is not set, and parallel.machines is {count}", fix)
    index, port = given["NODE_RANK"], given["MASTER_PORT"] or _USUAL_PORT
    if not index.isdecimal() or int(index) >= count:
        raise _inconsistent("NODE_RANK", f"is {index}, and parallel.machines is {count}", fix)
    return Machines(count, int(index), given["MASTER_ADDR"], _port(port))


_USUAL_PORT = "29500"  # torchrun's


def _port(given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) < 2**16:
        raise _inconsistent("MASTER_PORT", f"is {given}", f"name a free port, such as {_USUAL_PORT}")
    return int(given)


def rank_environment(local_rank: int, local_world: int, machines: Machines, threads: int) -> dict[str, str]:
    """This process's environment for a child that is one of `local_world` on this machine. threads: for each of them,
    where nobody said otherwise."""
    own = {
        "RANK": machines.index * local_world + local_rank,
        "WORLD_SIZE": machines.count * local_world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "MASTER_ADDR": machines.address,
        "MASTER_PORT": machines.port,
        LAUNCHER: os.getpid(),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        own |= {"OMP_NUM_THREADS": threads, LAUNCHED_THREADS: threads}
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def quiet_sockets() -> None:
    """Silence torch's C++ socket warnings about ranks that end; call it before importing torch. Keeps the user's
    setting."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux). Elsewhere the watchdog of a run with several
    ranks checks the parent."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def held_interruptions() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM act at the end of the block, for calls into C++ whose bindings lose an exception: pybind11
    drops the one that a signal's handler raises while it converts an argument, and reports a TypeError."""
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield
        return
    held: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def take_device(local_rank: int, local_world: int) -> None:
    """Use the GPU with this local rank. Without effect on a machine without GPUs; raises EnvironmentFault if there are
    too few."""
    import torch

    if not torch.cuda.is_available():
        return
    if (count := torch.cuda.device_count()) < local_world:
        what = f"{local_world} processes on this machine, and {count} GPU{'s' if count > 1 else ''}"
        raise EnvironmentFault(Fault("parallel.nproc", what, "start one process for each GPU", code="SF-PARALLEL"))
    torch.cuda.set_device(local_rank)


def refuse_telemetry() -> None:
    """Switch the telemetry of tracking libraries off, before they are imported. Keeps the user's settings."""
    for name, value in _NO_TELEMETRY.items():
        os.environ.setdefault(name, value)


def mlflow_store() -> str | None:
    """MLflow's tracking URI from the environment."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def allow_mlflow_files() -> None:
    """Allow MLflow's file store in this process, unless the environment has a setting."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


@dataclass(frozen=True)
class TerminalWishes:
    """Terminal settings from the environment. dumb: the terminal does not support escape codes."""

    no_color: bool
    force_color: bool
    dumb: bool


def terminal_wishes() -> TerminalWishes:
    """NO_COLOR and FORCE_COLOR count when they are set and not empty (no-color.org, force-color.org)."""
    return TerminalWishes(
        no_color=bool(os.environ.get("NO_COLOR")),
        force_color=bool(os.environ.get("FORCE_COLOR")),
        dumb=os.environ.get("TERM", "").lower() in {"dumb", "unknown"},
    )


@contextmanager
def without_collecting() -> Iterator[None]:
    """Context for large imports: what they make lives as long as the process, and the garbage collector would walk over
    it again and again, for a fifth of the time of the imports. It does not look at it afterwards either."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def settle_allocator(kind: str) -> str:
    """Configure the C library's allocator for training on this kind of device, unless the environment does. Returns a
    description of the change, or ""."""
    if kind != "cpu" or _has_own_allocator():
        return ""
    done = keep_freed_memory()
    return f"{done}; threads keep no small blocks" if done and holes() == "few" else done


def holes() -> Holes:
    """Memory fragmentation of training in this process, see `surefoot.system.allocator`."""
    if not is_glibc():
        return "none"
    return "few" if os.environ.get(_TUNABLES) == NO_THREAD_CACHE and not _has_own_allocator() else "many"


def restart_without_thread_cache() -> None:
    """Replace this process by itself with GLIBC_TUNABLES set so that glibc keeps no cache of freed memory per thread;
    it reads the variable only when a program starts.

    Does nothing if that has happened, if the environment configures the allocator, beside a GPU (which has memory of
    its own), under a debugger, and where the same command line would not start the same program: one read from stdin,
    or a child of `multiprocessing`."""
    again = is_glibc() and not _has_own_allocator() and not os.environ.get(_TUNABLES)
    if not again or any(map(os.path.exists, _GPU_FILES)) or sys.gettrace() or not os.path.isfile(sys.argv[0]):
        return
    from multiprocessing import parent_process  # a hundredth of a second, which other commands need not pay

    if parent_process() is not None:
        return
    os.environ[_TUNABLES] = NO_THREAD_CACHE
    # exec and not a child: process id, terminal and signals stay those that the user and launchers know.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _has_own_allocator() -> bool:
    """Whether the user's environment configures the allocator."""
    given = {name: os.environ[name] for name in _ALLOCATOR_NAMES if os.environ.get(name)}
    return bool(given) and given != {_TUNABLES: NO_THREAD_CACHE}


def bound_product_caches(kind: str) -> None:
    """Limit oneDNN's caches of matrix product kernels, unless the environment does. Works only before the first product
    of this process."""
    if kind != "cpu":
        return
    for name, value in _PRODUCT_CACHES.items():
        if name.replace("ONEDNN_", "DNNL_") not in os.environ:  # its older name, which it still reads
            os.environ.setdefault(name, value)


def cache_folder() -> Path:
    """Folder for tokenized data in the user's cache folder. Not created here."""
    if sys.platform == "win32":
        parent = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        parent = Path.home() / "Library" / "Caches"
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "surefoot"
