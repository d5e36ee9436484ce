"""Test a compiled model before step 1 against the eager model, on the run's own examples.

Two micro-batches run forward and backward in both. Compiled code may differ by rounding, within the limits of
`differences`; if it differs by more, the run ends with an error that names the key. Times are shown so that nobody
compiles in vain, but decide nothing: the config decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from surefoot.methods.method import LoadedModels
from surefoot.models.fast.packing import reason_of
from surefoot.models.modes import eager_mode, without_randomness
from surefoot.runs.parity.differences import Pass, differences
from surefoot.runs.parity.fast_paths import STAYS, describe_difference, judged
from surefoot.runs.parity.passes import compared_batches, nonzero_matrices, one_pass
from surefoot.runs.prepared import PreparedRun
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.failure import is_of_the_environment

_OFF = "set compile: off"


def try_compiled(
    run: PreparedRun, loaded: LoadedModels, say: Callable[[str], None], warn: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the compiled model with the eager one. Collective: every rank must call it.

    say, warn: print a line.

    Returns the record: differences, limits, seconds of both and of compilation.
    Raises EnvironmentFault if compilation fails, or if the compiled model of a new run computes something else.
    """
    plan, engine = loaded.plan, loaded.engine
    step = run.timetable.next_step(loaded.state.step)
    batches = compared_batches(run.task, engine, step)

    def timed() -> tuple[Pass, float]:
        started = time.perf_counter()
        found = one_pass(loaded, run.task, batches, step)
        return found, time.perf_counter() - started

    with without_randomness(engine.model), nonzero_matrices(engine.parameters.values()):
        with eager_mode(engine.model):
            timed()  # the first pass includes one-time set-up of matmul kernels
            eager, eager_seconds = timed()
        try:
            first_seconds = timed()[1]
            compiled, seconds = timed()
        except RuntimeError as fault:
            if is_of_the_environment(fault):
                raise
            what = f"{plan.compile.value} fails on this model: {reason_of(fault)}"
            raise EnvironmentFault(Fault("compile", what, _OFF, code="SF-FAST-PATH")) from None
    record = judged(differences(engine, eager, compiled), plan, resumed=run.resumed)
    if record["outside"]:
        what = f"{plan.compile.value} {describe_difference(record, 'the model as it is written')}"
        if not run.resumed:
            raise EnvironmentFault(Fault("compile", what, f"{_OFF}, and please report it", code="SF-FAST-PATH"))
        warn(f"compile: {what}; {STAYS}")
    gain, compiling = eager_seconds / seconds, max(first_seconds - seconds, 0.0)
    line = f"compile: {plan.compile.value} took {compiling:.0f} s to compile and makes a pass {gain:.2f} times as fast"
    if gain > 1:
        say(line)
    else:
        warn(f"{line}; {_OFF} in another run")
    return record | {"compiling": compiling, "seconds": seconds, "eager_seconds": eager_seconds}
