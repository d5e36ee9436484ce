"""Take a step again in which a process of a run died, and say how far it comes.

    python -m surefoot.runs.failures.replay_run

The step may end this process as it ended that one, so `replay_apart` runs it as a child and listens. It begins at the
last checkpoint before the step, or at the base model, and takes the steps from there as `--resume` does; nothing is
written. stdin: {"run", "begun", "moved", "plain", "parent"}. stdout: lines of a word and its text:

    starts N         the step of the checkpoint, 0 for the base model
    caution TEXT     in what this process differs from the run
    step N           it is begun
    part NAME        of the last step: see `training.profile.Part`; empty at its end
    enters, leaves, reaches MODULE    see `training.followed`
    done JSON        the last step went through: what came of it
    raised JSON      an exception, and the module
    fault JSON       a refusal, as the command line words it
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import for_rank
from surefoot.families.files import read_json
from surefoot.methods.method import LoadedModels, ignore
from surefoot.report.flight import begin_line
from surefoot.report.observer import SilentObserver, silent_console
from surefoot.runs.custom import NOTHING, Custom, with_named
from surefoot.runs.failures.replay import check_loss, job_again, plain_plan, saved, set_up_again
from surefoot.runs.faults import device_faults
from surefoot.runs.identity import check_identity
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun, with_models
from surefoot.runs.rollback import find_checkpoint
from surefoot.runs.run_folder import PLAN, FolderState
from surefoot.system import process
from surefoot.system.errors import Fault, IntegrityError, SurefootError
from surefoot.system.redaction import veiled
from surefoot.training.diagnose import place_of_error
from surefoot.training.followed import followed
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import run_loop
from surefoot.training.profile import Part, Watch, unwatched
from surefoot.training.report import StepReport
from surefoot.training.state import RunState

Tell = Callable[[str, str], object]
_WORDS = 2000  # letters of an exception's message
_UNCHECKED = "no checkpoint was there yet, so data and base model cannot be held against those of the run"


def take_again(
    run: Path,
    begun: Mapping[str, Any],
    tell: Tell,
    *,
    moved: Sequence[str] = (),
    plain: bool = False,
    custom: Custom = NOTHING,
) -> None:
    """Take the step in which a run's last process died.

    begun: the line of flight.jsonl.
    tell: called with what the head of this module lists, but faults.
    moved, plain: see `replay`.
    custom: what a Python caller brought to the run.

    Raises InputError and IntegrityError as `replay` does, EnvironmentFault where the device fails.
    """
    config, plan = saved(run, moved)
    custom = with_named(config, custom)
    checkpoint, _, rollbacks = find_checkpoint(run)
    step = begun["begins"]
    start = checkpoint.step if checkpoint else 0
    if start >= step:
        what = f"checkpoint-{start} is not from before step {step}, which flight.jsonl has as the last one"
        raise IntegrityError(Fault(str(run), what, "replay it with the checkpoints that the run had", code="SF-REPLAY"))
    tell("starts", str(start))
    ranks = plan.parallel.ranks.value
    with silent_console() as silence:
        name = read_json(run / PLAN).get("verified", {}).get("objective")
        check_loss(run, name, custom, "go on with it from Python, with the same objective and resume=True")
        existing = FolderState(run, "resume", checkpoint, plan=plain_plan(plan) if plain else plan, rollbacks=rollbacks)
        prepared = prepare(config, existing, silence, custom)
    for caution in check_identity(checkpoint, prepared.identity) if checkpoint else (_UNCHECKED,):
        tell("caution", caution)
    with device_faults("replay", prepared.config, prepared.plan):
        loaded = set_up_again(prepared)
        _take(with_models(prepared, loaded, ignore), loaded, step, None if plain else begun, ranks, tell)


def _take(
    run: PreparedRun, loaded: LoadedModels, step: int, begun: Mapping[str, Any] | None, ranks: int, tell: Tell
) -> None:
    with ExitStack() as stack:
        job = job_again(run, loaded, step)

        def batches(number: int) -> Sequence[Weighted]:
            tell("step", str(number))
            micro_batches = job.batches(number)
            if number == step:
                if begun is not None:
                    _check_examples(run.folder, begun, list(for_rank(micro_batches, 0, ranks)))
                stack.enter_context(followed(loaded.engine.model, tell))
            return micro_batches

        last = _Last(step, tell)
        try:
            run_loop(
                replace(job, batches=batches, watch=_reported_parts(step, tell)), loaded.state, last, StopRequest()
            )
        except SurefootError:
            raise
        except Exception as error:  # of a device too: it is this process's own, which ends now
            said = veiled(f"{type(error).__name__}: {error}")[:_WORDS]
            tell("raised", json.dumps({"error": said, "place": place_of_error(error, loaded.engine.model)}))


def _check_examples(run: Path, begun: Mapping[str, Any], own: Sequence[Weighted]) -> None:
    now = begin_line(begun["begins"], [one.examples for one in own], begun["seed"])
    if any(now.get(name) != begun.get(name) for name in ("sizes", "examples", "more_examples")):
        what = f"step {begun['begins']} would learn from other examples than the run had, which flight.jsonl lists"
        raise IntegrityError(
            Fault(str(run), what, "replay it with the data and the version of surefoot of the run", code="SF-REPLAY")
        )


def _reported_parts(step: int, tell: Tell) -> Callable[[int], Watch]:
    @contextmanager
    def reported(part: Part) -> Iterator[None]:
        tell("part", part)
        yield
        tell("part", "")

    return lambda number: reported if number == step else unwatched


class _Last(SilentObserver):
    """Tells of the last step."""

    def __init__(self, step: int, tell: Tell):
        super().__init__()
        self._step, self._tell = step, tell

    def step(self, report: StepReport, state: RunState) -> None:
        if report.step == self._step:
            names = ("decision", "non_finite", "held", "loss", "grad_norm")
            self._tell("done", json.dumps({name: getattr(report, name) for name in names}))


def main() -> None:
    """The child."""
    requested = json.loads(sys.stdin.read())
    process.end_with(requested["parent"])
    faulthandler.enable(2)
    answers = os.dup(1)
    os.dup2(2, 1)  # for what libraries print
    with open(answers, "wb", buffering=0) as out:

        def tell(word: str, text: str) -> None:
            out.write(f"{word} {' '.join(text.split())}\n".encode())

        try:
            take_again(
                Path(requested["run"]), requested["begun"], tell, moved=requested["moved"], plain=requested["plain"]
            )
        except SurefootError as error:
            faults = [[fault.where, fault.what, fault.fix] for fault in error.faults]
            tell("fault", json.dumps({"code": error.exit_code, "faults": faults}))
        out.flush()
        os._exit(0)  # what libraries do at the end, and how that ends, is nobody's answer


if __name__ == "__main__":
    main()
