"""Check that this machine has what a config requests: processes, a GPU for each, optional libraries, a compiler.

The plan relies on these checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from surefoot.config.schema import QUANTIZED, RunConfig
from surefoot.planning.parallel import RanksFacts
from surefoot.system import process
from surefoot.system.errors import EnvironmentFault, Fault, InputError, SurefootError
from surefoot.system.libraries import bitsandbytes_obstacle, compiler_obstacle, torchao_obstacle

if TYPE_CHECKING:
    from surefoot.training.ranks import Ranks


@contextmanager
def raised_together(faults: Sequence[Fault], *, alone: bool = True) -> Iterator[None]:
    """Raise `faults` and those of the block as one InputError, so that the user sees all mistakes at once.

    alone: raise `faults` also if the block has none.
    """
    try:
        yield
    except SurefootError as error:
        if not faults:
            raise
        raise InputError([*faults, *(error.faults if isinstance(error, InputError) else ())]) from None
    if faults and alone:
        raise InputError(faults)


def ranks_facts(config: RunConfig) -> RanksFacts:
    """Return the number of processes that a launcher has started or the config requests."""
    launch = process.find_launch()
    if launch is not None:
        return RanksFacts(launch.world, launch.local_world, config.parallel.nproc is not None)
    count = config.parallel.nproc or 1
    return RanksFacts(count * config.parallel.machines, count, config.parallel.nproc is not None)


def find_ranks(config: RunConfig) -> tuple[Ranks, int | None]:
    """Return this process's rank, and the process id of surefoot's launcher if that started it. Selects the GPU with
    the local rank's number.

    Raises InputError if the config requests another number of processes, EnvironmentFault if this rank has no GPU.
    """
    from surefoot.training.ranks import ALONE, Ranks

    check_launch(config)
    launch = process.find_launch()
    if launch is None:
        return ALONE, None
    process.take_device(launch.local_rank, launch.local_world)
    return Ranks(launch.rank, launch.world, launch.local_rank), launch.parent


def check_launch(config: RunConfig) -> None:
    """Raise InputError if the config requests another number of processes than are running. For callers that run the
    config in this process."""
    launch, nproc, machines = process.find_launch(), config.parallel.nproc, config.parallel.machines
    if nproc is None:
        return
    if launch is None:
        if nproc * machines > 1:
            what = f"{nproc * machines} processes are requested, but only one runs"
            raise _launched("nproc", what, "run `surefoot train` or torchrun, which start processes")
    elif nproc != launch.local_world:
        what = f"{nproc} processes on this machine are requested, but a launcher started {launch.local_world}"
        raise _launched("nproc", what, "leave it out under a launcher")
    elif machines not in (1, found := launch.world // nproc):  # 1: not given, so the launcher's number counts
        what = f"{machines} machines are requested, but a launcher started processes on {found}"
        raise _launched("machines", what, "leave it out under a launcher")


def _launched(key: str, what: str, fix: str) -> InputError:
    return InputError(Fault(f"parallel.{key}", what, fix, code="SF-PARALLEL"))


def check_several(config: RunConfig, ranks: Ranks) -> None:
    """Raise InputError if weights should be sharded but there is only one process."""
    engine = config.parallel.engine
    if ranks.world == 1 and engine in ("fsdp2", "deepspeed"):
        what = f"{engine} shards weights over several processes, but there is only one"
        raise InputError(
            Fault(
                "parallel.engine",
                what,
                "add parallel.nproc, start it with torchrun, or leave it out",
                code="SF-PARALLEL",
            )
        )


_INSTALL = "pip install 'surefoot[quant]'"


def require_libraries(config: RunConfig, kind: str) -> None:
    """Raise EnvironmentFault with a reason for each key that this machine cannot honour. kind: cpu | cuda | mps."""
    faults = []
    if config.optim.name == "adamw_8bit" and (obstacle := bitsandbytes_obstacle(kind)):
        faults.append(
            Fault("optim.name", f"adamw_8bit {obstacle}", f"{_INSTALL}, or use adamw or adafactor", code="SF-PACKAGE")
        )
    if config.precision.base in QUANTIZED and (obstacle := bitsandbytes_obstacle(kind)):
        what, fix = f"{config.precision.base} {obstacle}", f"{_INSTALL}, or keep the base in 16 bits"
        faults.append(Fault("precision.base", what, fix, code="SF-PACKAGE"))
    if config.precision.qat != "off" and (obstacle := torchao_obstacle()):
        what, fix = f"{config.precision.qat} {obstacle}", "pip install 'surefoot[qat]', or leave it out"
        faults.append(Fault("precision.qat", what, fix, code="SF-PACKAGE"))
    if config.compile != "off" and (obstacle := compiler_obstacle(kind)):
        faults.append(
            Fault(
                "compile",
                f"{config.compile} {obstacle}",
                "install one (such as g++), or set compile: off",
                code="SF-PACKAGE",
            )
        )
    if faults:
        raise EnvironmentFault(faults)
