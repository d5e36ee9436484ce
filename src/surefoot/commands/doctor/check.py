"""The first steps of a run, taken and judged, and nothing else: what people look at before they let it run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from surefoot.commands.doctor.findings import Finding
from surefoot.commands.doctor.steps import number_lines, take
from surefoot.config.schema import ParallelConfig, RunConfig
from surefoot.report.library_messages import captured_libraries
from surefoot.report.observer import silent_console
from surefoot.report.wording import number
from surefoot.runs.trial import ready
from surefoot.training.report import StepReport


def check_steps(config: RunConfig, steps: int, say: Callable[[str], None]) -> tuple[Finding, ...]:
    """Losses, gradients and whether learning lowers the loss, after so many steps in this process; the weights are
    thrown away. say: hears each step. Raises SurefootError as the run would."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    with silent_console() as silence, captured_libraries(silence), ready(alone, steps) as one:
        taken = take(one, steps, lambda report: say(" · ".join(_words(report, steps))))
        return tuple(number_lines(taken, one.plan.precision.compute.value, falls=not config.method.rollouts))


def _words(report: StepReport, steps: int) -> Iterator[str]:
    yield f"step {report.step}/{steps}"
    yield f"loss {number(report.loss)}"
    yield f"grad {number(report.grad_norm, 3)}"
    yield f"lr {report.lr:.3g}"
    yield f"{report.seconds:.2f} s"
    if report.decision != "stepped":
        yield report.decision.replace("_", " ")
