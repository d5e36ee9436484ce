"""`surefoot replay FOLDER`: run again what is recorded, and say whether the same number is found at the same module.

What the run needed is needed again: the base model and the data, by the paths of its config or where they have been
moved to; both are compared with what the run had. The batch itself and the weights that trained come from the folder.
Where the weights were too large to be kept, or are not all that is needed, the last checkpoint before the step is
taken, and the steps from there are taken again.

    the step                  its forward and backward passes, of the batches of then
    the making of batches     as the run makes them; a rollout from the checkpoint on
    what the stage carries    the step itself and what it leaves, from the checkpoint on
    an evaluation             the pass of the batch of then; all of the evaluation where it was at none, as while
                              answers were written

Several processes: the step of the rank that wrote the folder is run, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.config.load import load_config
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import read_yaml
from surefoot.data.batching.subsets import in_padded_rows
from surefoot.families.files import read_json
from surefoot.methods.method import LoadedModels, ignore
from surefoot.models.modes import inference_mode
from surefoot.planning.plan import PLAIN, Choice, KernelsPlan, RunPlan, plan_from_json
from surefoot.report.observer import SilentObserver, silent_console
from surefoot.runs.custom import NOTHING, Custom, with_named
from surefoot.runs.evaluating import make_evaluate
from surefoot.runs.faults import device_faults
from surefoot.runs.identity import check_identity
from surefoot.runs.job import make_job
from surefoot.runs.load_models import load_models
from surefoot.runs.parity.fast_paths import planned_paths
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun, with_models
from surefoot.runs.run_folder import CONFIG, PLAN, FolderState
from surefoot.system.errors import Fault, InputError, IntegrityError, SurefootError
from surefoot.training.activity import Activity
from surefoot.training.checkpoint import Checkpoint, list_checkpoints, read_state, verify_checkpoint
from surefoot.training.diagnose import Finding, find_origin, place_of_error
from surefoot.training.evaluation import one_pass
from surefoot.training.failure import CurrentBatch, Failure, SavedFailure, is_device_error, read_failure
from surefoot.training.guard import is_on_the_way
from surefoot.training.interrupt import StopRequest
from surefoot.training.loop import Job, run_loop
from surefoot.training.state import RunState

_PLACES = ("model", "data.train", "data.eval", "ppo.reward", "ppo.critic", "reward.init")
_PLAIN: Choice[Any] = Choice(PLAIN, "a replay by the plain path", "user")


@dataclass(frozen=True)
class Replayed:
    """What a replay saw beside what was recorded.

    then: as recorded.
    now: what was seen, None where an exception was raised.
    error: the exception, as type and message.
    place: the module that raised it.
    plain: whether it ran by the plain fp32 path.
    cautions: in what this process differs from the run.
    start: step of the checkpoint from which the steps before it were taken again, 0 for the base model; None where none
        were.
    reached: whether these steps went through.
    """

    then: Failure
    now: Finding | None
    error: str
    place: str
    plain: bool
    cautions: tuple[str, ...]
    start: int | None = None
    reached: bool = True

    @property
    def same_place(self) -> bool:
        """The same kind of value at the same module, or the same exception there."""
        if self.then.kind == "crash":
            kind, of_then = (error.partition(":")[0] for error in (self.error, self.then.error))
            return self.reached and kind != "" and (kind, self.place) == (of_then, self.then.place)
        then, now = (finding.origin if finding else None for finding in (self.then.finding, self.now))
        if then is None or now is None:
            return then is now and self.now is not None
        if (then.way, then.micro_batch) != (now.way, now.micro_batch):
            return False
        if then.made_in is None:  # an older record, in which what comes before a module is its output
            return _within(now.module, then.module) if self.plain else now.module == then.module
        if self.plain:
            return _within(now.maker, then.maker)
        return (then.phase, then.module, then.made_in) == (now.phase, now.module, now.made_in)

    @property
    def same_bits(self) -> bool:
        """Every loss up to it, and the value itself, are the same bits."""
        if not self.same_place or self.then.kind == "crash":
            return False
        bits = []
        for finding in (self.then.finding, self.now):
            assert finding is not None, "what is not the same place was told apart above"
            bits.append(([loss.hex() for loss in finding.losses], finding.origin and finding.origin.tensor))
        return bits[0] == bits[1]


def replay(folder: Path, *, moved: Sequence[str] = (), plain: bool = False, custom: Custom = NOTHING) -> Replayed:
    """Run again what a failure folder records.

    folder: `failure-STEP` of a run.
    moved: overrides of the config that say where base and data lie now.
    plain: in fp32 throughout, with attention written out and no kernel of surefoot's own, to tell whether a kernel or
        the model is to blame.
    custom: what a Python caller brought to the run.

    Raises InputError for a folder that records no failure, IntegrityError for a damaged one, and where data or base
    model are not those of the run, EnvironmentFault where the device fails.
    """
    kept = read_failure(folder)
    config, plan = saved(folder, moved)
    custom = with_named(config, custom)
    if plain:
        plan = plain_plan(plan)
    checkpoint = _checkpoint(folder, kept)
    found = FolderState(Path(config.output), "resume", checkpoint, plan=plan, rollbacks=kept.failure.rollbacks)
    with silent_console() as silence:
        name = read_json(folder / "MANIFEST.json").get("identity", {}).get("objective")
        check_loss(folder, name, custom, "replay it from Python, with the same objective")
        run = prepare(config, found, silence, custom)
    cautions = check_identity(Checkpoint(folder, kept.failure.step), run.identity)
    with device_faults("replay", run.config, run.plan):
        return _from_checkpoint(kept, run, folder, custom, plain, tuple(cautions))


def _from_checkpoint(
    kept: SavedFailure, run: PreparedRun, folder: Path, custom: Custom, plain: bool, cautions: tuple[str, ...]
) -> Replayed:
    loaded = set_up_again(run)
    if kept.weights is not None:
        _load(loaded, kept.weights, folder)
    run = with_models(run, loaded, ignore)
    failure, model, reached = kept.failure, loaded.engine.model, False
    start = (run.existing.checkpoint.step if run.existing.checkpoint else 0) if _goes_on(kept) else None
    try:
        if _goes_on(kept):
            loaded = replace(loaded, state=_go_on(run, loaded, loaded.state, failure.steps_before))
        reached = True
        finding = _again(kept, run, loaded, custom, plain)
    except SurefootError:
        raise
    except Exception as error:  # whatever a recorded crash was; a device that fails is not recorded
        if is_device_error(error):
            raise
        said = f"{type(error).__name__}: {error}"
        return Replayed(failure, None, said, place_of_error(error, model), plain, cautions, start, reached)
    return Replayed(failure, finding, "", "", plain, cautions, start)


def set_up_again(run: PreparedRun) -> LoadedModels:
    """From the run's checkpoint, with all paths of its plan, which were held against the plain model when it began."""
    loaded = load_models(run.config, run.plan, run.base, run.existing.checkpoint)
    for path in planned_paths(run.plan):
        path.install(loaded.engine.model)
    return loaded


def plain_plan(plan: RunPlan) -> RunPlan:
    """The same step in fp32, attention written out, without surefoot's own kernels and without compilation. A base that
    is quantised stays so: these are its weights."""
    fp32, off = replace(_PLAIN, value="fp32"), replace(_PLAIN, value=False)
    base = plan.precision.base if plan.precision.packed else fp32
    eager = replace(_PLAIN, value="eager")
    return replace(
        plan,
        precision=replace(plan.precision, compute=fp32, base=base, scaler=off, tf32=off),
        attention=replace(plan.attention, implementation=eager, kernels=replace(_PLAIN, value=()), expected=eager),
        compile=replace(_PLAIN, value="off"),
        kernels=KernelsPlan(),
    )


def _again(kept: SavedFailure, run: PreparedRun, loaded: LoadedModels, custom: Custom, plain: bool) -> Finding:
    """What is found in a step; of all else that nothing was raised."""
    failure, engine, task = kept.failure, loaded.engine, run.task
    pad = loaded.plan.tokenizer.pad_id
    # The plain path takes padded rows alone.
    batches = [in_padded_rows(batch, pad) if plain else batch for batch in kept.batches]
    match failure.phase:
        case "step":
            return find_origin(
                engine,
                task.objective,
                batches,
                step=failure.step,
                weight=max(failure.weight, 1),
                numbers=failure.numbers,
                scale=None if plain else failure.scale,
                settings=replace(loaded.settings, seed=failure.seed),
                look=failure.kind != "crash",
            )
        case "batches":
            task.batches(failure.step)
        case "memory":
            _go_on(run, loaded, loaded.state, failure.step)
        case "evaluation" if batches:
            with inference_mode(loaded.model):
                for batch in batches:
                    one_pass(loaded.model, task.objective, batch, settings=loaded.settings, device=engine.device)
        case "evaluation":
            observer, stop = SilentObserver(), StopRequest()
            evaluate = make_evaluate(run, loaded, custom.all_metrics, observer, stop, Activity(), CurrentBatch())
            evaluate(failure.step)
    return Finding(None, ())


def saved(folder: Path, moved: Sequence[str]) -> tuple[RunConfig, RunPlan]:
    """Config and plan of the run, for one process."""
    for text in moved:
        if not text.partition("=")[0].strip().startswith(_PLACES):
            what = "a replay computes the step as it was; only where things lie now can be told"
            raise InputError(
                Fault(f"override {text}", what, f"leave it out, or set one of {', '.join(_PLACES)}", code="SF-REPLAY")
            )
    try:
        RunConfig.model_validate(read_yaml(folder / CONFIG).data)
        plan = plan_from_json(read_json(folder / PLAN).get("plan"))
    except (InputError, ValueError) as error:
        what = f"config or plan cannot be read: {' '.join(str(error).split())[:300]}"
        raise IntegrityError(
            Fault(str(folder), what, "replay it with the version of surefoot that wrote it", code="SF-REPLAY")
        ) from None
    try:
        config = load_config(folder / CONFIG, moved).config
    except InputError as error:
        fix = f"or say where it lies now, as in `surefoot replay {folder} model.path=…`"
        raise InputError([replace(one, fix=f"{one.fix}; {fix}" if one.fix else fix) for one in error.faults]) from None
    alone = config.parallel.model_copy(update={"nproc": None, "engine": "auto"})
    return config.model_copy(update={"parallel": alone}), plan


def check_loss(folder: Path, name: str | None, custom: Custom, fix: str) -> None:
    """A loss that a Python caller brought is not in the folder, because no code is.

    name: of the loss that the run had, None for the stage's own.

    Raises InputError where that is not the loss at hand.
    """
    own = "the loss of its stage"
    if name != custom.objective_name:
        what = f"the step was computed with {name or own}, not {custom.objective_name or own}"
        raise InputError(Fault(str(folder), what, fix, code="SF-OWN-FUNCTION"))


def _checkpoint(folder: Path, kept: SavedFailure) -> Checkpoint | None:
    """Where to begin, where the steps before it are taken again; None for the base model."""
    if not _goes_on(kept):
        return None
    for one in list_checkpoints(folder.resolve().parent):
        if one.step > kept.failure.steps_before or verify_checkpoint(one.folder):
            continue
        if is_on_the_way(one.step, read_state(one).rollbacks, kept.failure.rollbacks):
            return one
    return None


def _goes_on(kept: SavedFailure) -> bool:
    """Whether the steps before it are taken again."""
    return kept.failure.needs == "run" or (kept.failure.needs == "weights" and kept.weights is None)


def _load(loaded: LoadedModels, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    own = loaded.engine.parameters
    if own.keys() != weights.keys() or any(own[name].shape != one.shape for name, one in weights.items()):
        raise IntegrityError(
            Fault(str(folder), "its weights are not those of the model that its config describes", code="SF-REPLAY")
        )
    with torch.no_grad():
        for name, one in weights.items():
            own[name].copy_(one)


def _go_on(run: PreparedRun, loaded: LoadedModels, state: RunState, last: int) -> RunState:
    """Take the steps after `state` up to step `last`."""
    return run_loop(job_again(run, loaded, last), state, SilentObserver(), StopRequest()).state


def job_again(run: PreparedRun, loaded: LoadedModels, last: int) -> Job:
    """The run's own up to step `last`, after which nothing is evaluated or written. No number of bad steps ends it."""
    job = make_job(run, loaded, None, SilentObserver(), Activity())
    never: frozenset[int] = frozenset()
    return replace(
        job,
        total_steps=last,
        eval_steps=never,
        save_steps=never,
        save=lambda state: run.folder,
        max_consecutive=last + 1,
        max_recent=last + 1,
        patience=None,
    )


def _within(plain: str, own: str) -> bool:
    """Whether a module of the plain path is one of the run's or in it: a kernel of surefoot's own runs a module without
    calling those inside."""
    return f"{plain}.".startswith(f"{own}.")
