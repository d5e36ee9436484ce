"""Repeat the step in which a process of a run died, and report how far it gets.

    python -m surefoot.runs.failures.replay_run

The step may kill this process too, so `replay_apart` runs it as a child and reads its output. It starts at the last
checkpoint before the step, or at the base model, and takes the steps from there like `--resume`; nothing is written.
stdin: {"run", "begun", "moved", "plain", "parent"}. stdout: lines of a keyword and its text:

    starts N         step of the checkpoint, 0 for the base model
    caution TEXT     a difference between this process and the run
    step N           step N begins
    part NAME        part of the last step, see `training.profile.Part`; empty at its end
    enters, leaves, reaches MODULE    see `followed`
    done JSON        the last step succeeded: its report
    raised JSON      an exception, and its module
    fault JSON       an error, as on the command line
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

import torch
from torch import nn

from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import for_rank
from surefoot.families.files import read_json
from surefoot.methods.method import LoadedModels, ignore
from surefoot.report.flight import begin_line
from surefoot.report.observer import SilentObserver, silent_console
from surefoot.runs.custom import NOTHING, Custom, with_named
from surefoot.runs.failures.replay import check_loss, load_for_replay, plain_plan, replay_job, saved
from surefoot.runs.faults import device_faults
from surefoot.runs.identity import check_identity
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun, with_models
from surefoot.runs.rollback import find_checkpoint
from surefoot.runs.run_folder import PLAN, FolderState
from surefoot.system import process
from surefoot.system.errors import Fault, IntegrityError, SurefootError
from surefoot.system.redaction import veiled
from surefoot.training.diagnose import float_tensors, place_of_error
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import run_loop
from surefoot.training.profile import Part, Watch, unwatched
from surefoot.training.report import StepReport
from surefoot.training.state import RunState

Tell = Callable[[str, str], object]
_WORDS = 2000  # characters of an exception's message
_UNCHECKED = "no checkpoint was there yet, so data and base model cannot be held against those of the run"


def rerun_step(
    run: Path,
    begun: Mapping[str, Any],
    tell: Tell,
    *,
    moved: Sequence[str] = (),
    plain: bool = False,
    custom: Custom = NOTHING,
) -> None:
    """Repeat the step in which a run's last process died.

    begun: the step's line in flight.jsonl.
    tell: called with the messages listed in the module's docstring, except faults.
    moved, plain: see `replay`.
    custom: functions that a Python caller passed to the run.

    Raises InputError and IntegrityError like `replay`, EnvironmentFault if the device fails.
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
        check_loss(run, name, custom, "continue it from Python, with the same objective and resume=True")
        existing = FolderState(run, "resume", checkpoint, plan=plain_plan(plan) if plain else plan, rollbacks=rollbacks)
        prepared = prepare(config, existing, silence, custom)
    for caution in check_identity(checkpoint, prepared.identity) if checkpoint else (_UNCHECKED,):
        tell("caution", caution)
    with device_faults("replay", prepared.config, prepared.plan):
        loaded = load_for_replay(prepared)
        _take(with_models(prepared, loaded, ignore), loaded, step, None if plain else begun, ranks, tell)


def _take(
    run: PreparedRun, loaded: LoadedModels, step: int, begun: Mapping[str, Any] | None, ranks: int, tell: Tell
) -> None:
    with ExitStack() as stack:
        job = replay_job(run, loaded, step)

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
        except Exception as error:  # device errors too: this process ends now anyway
            said = veiled(f"{type(error).__name__}: {error}")[:_WORDS]
            tell("raised", json.dumps({"error": said, "place": place_of_error(error, loaded.engine.model)}))


@contextmanager
def followed(model: nn.Module, report: Callable[[str, str], object]) -> Iterator[None]:
    """Context that reports which module a pass is in. No value is read or changed.

    report: called with (event, module name) when a forward pass "enters" or "leaves" a module, and when a backward pass
        "reaches" one, that is, when the gradient of its output is known.
    """

    def enters(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:  # a return value would replace the inputs
            report("enters", name)

        return hook

    def leaves(name: str) -> Callable[..., None]:
        def reached(gradient: torch.Tensor) -> None:
            report("reaches", name)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            report("leaves", name)
            for tensor in float_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(reached)

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enters(name)) for name, module in named]
    handles += [module.register_forward_hook(leaves(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    """Reports the last step."""

    def __init__(self, step: int, tell: Tell):
        super().__init__()
        self._step, self._tell = step, tell

    def step(self, report: StepReport, state: RunState) -> None:
        if report.step == self._step:
            names = ("decision", "non_finite", "held", "loss", "grad_norm")
            self._tell("done", json.dumps({name: getattr(report, name) for name in names}))


def main() -> None:
    """Entry point of the child process."""
    requested = json.loads(sys.stdin.read())
    process.end_with(requested["parent"])
    faulthandler.enable(2)
    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to stderr
    with open(answers, "wb", buffering=0) as out:

        def tell(word: str, text: str) -> None:
            out.write(f"{word} {' '.join(text.split())}\n".encode())

        try:
            rerun_step(
                Path(requested["run"]), requested["begun"], tell, moved=requested["moved"], plain=requested["plain"]
            )
        except SurefootError as error:
            faults = [[fault.where, fault.what, fault.fix] for fault in error.faults]
            tell("fault", json.dumps({"code": error.exit_code, "faults": faults}))
        out.flush()
        os._exit(0)  # skip exit handlers of libraries: a crash in them must not be taken for the step's


if __name__ == "__main__":
    main()
