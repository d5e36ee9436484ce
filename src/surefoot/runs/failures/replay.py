"""`surefoot replay FOLDER`: replay a recorded failure, and report whether the same value occurs in the same module.

It needs the base model and the data, at the paths of the config or where they were moved; both are compared with the
run's. The batch and the trained weights come from the folder. If the weights were too large to keep, or are not enough,
the steps since the last checkpoint are repeated.

    failed step               its forward and backward passes, with the recorded batches
    making of batches         as in the run; for rollouts, from the checkpoint on
    state carried over        the step and the state after it, from the checkpoint on
    evaluation                the pass of the recorded batch; the whole evaluation if there is none, as during
                              generation

For a multi-process run, the step of the rank that wrote the folder is replayed in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.config.load import load_config
from surefoot.config.schema import RunConfig
from surefoot.config.sections import ParallelConfig
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
    """Result of a replay, with the recorded failure.

    then: the recorded failure.
    now: what was found; None if an exception was raised.
    error: the exception, as type and message.
    place: the module that raised it.
    plain: whether it ran in plain fp32 without fast paths.
    cautions: differences between this process and the run.
    start: step of the checkpoint from which steps were repeated, 0 for the base model; None if none were.
    reached: whether the repeated steps succeeded.
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
        """Whether the same kind of value, or the same exception, occurred in the same module."""
        if self.then.kind == "crash":
            kind, of_then = (error.partition(":")[0] for error in (self.error, self.then.error))
            return self.reached and kind != "" and (kind, self.place) == (of_then, self.then.place)
        then, now = (finding.origin if finding else None for finding in (self.then.finding, self.now))
        if then is None or now is None:
            return then is now and self.now is not None
        if (then.way, then.micro_batch) != (now.way, now.micro_batch):
            return False
        if then.made_in is None:  # an older record, which attributes values before a module to its output
            return _within(now.module, then.module) if self.plain else now.module == then.module
        if self.plain:
            return _within(now.maker, then.maker)
        return (then.phase, then.module, then.made_in) == (now.phase, now.module, now.made_in)

    @property
    def same_bits(self) -> bool:
        """Whether all losses before it, and the value itself, are bit-identical."""
        if not self.same_place or self.then.kind == "crash":
            return False
        bits = []
        for finding in (self.then.finding, self.now):
            assert finding is not None, "what is not the same place was told apart above"
            bits.append(([loss.hex() for loss in finding.losses], finding.origin and finding.origin.tensor))
        return bits[0] == bits[1]


def replay(folder: Path, *, moved: Sequence[str] = (), plain: bool = False, custom: Custom = NOTHING) -> Replayed:
    """Replay a recorded failure.

    folder: `failure-STEP` of a run.
    moved: config overrides with new locations of base and data.
    plain: compute in fp32 with eager attention and without surefoot's kernels, to tell whether a kernel or the model is
        at fault.
    custom: functions that a Python caller passed to the run.

    Raises InputError for a folder without a failure record, IntegrityError for a damaged one or if data or base model
    are not the run's, EnvironmentFault if the device fails.
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
    loaded = load_for_replay(run)
    if kept.weights is not None:
        _load(loaded, kept.weights, folder)
    run = with_models(run, loaded, ignore)
    failure, model, reached = kept.failure, loaded.engine.model, False
    start = (run.existing.checkpoint.step if run.existing.checkpoint else 0) if _needs_steps(kept) else None
    try:
        if _needs_steps(kept):
            loaded = replace(loaded, state=_take_steps_to(run, loaded, loaded.state, failure.steps_before))
        reached = True
        finding = _rerun(kept, run, loaded, custom, plain)
    except SurefootError:
        raise
    except Exception as error:  # the recorded crash can be any exception; device errors are not recorded
        if is_device_error(error):
            raise
        said = f"{type(error).__name__}: {error}"
        return Replayed(failure, None, said, place_of_error(error, model), plain, cautions, start, reached)
    return Replayed(failure, finding, "", "", plain, cautions, start)


def load_for_replay(run: PreparedRun) -> LoadedModels:
    """Load the run's checkpoint with all fast paths of its plan, which were verified when the run started."""
    loaded = load_models(run.config, run.plan, run.base, run.existing.checkpoint)
    for path in planned_paths(run.plan):
        path.install(loaded.engine.model)
    return loaded


def plain_plan(plan: RunPlan) -> RunPlan:
    """Return the plan in fp32 with eager attention, without surefoot's kernels and without compilation. A quantized
    base stays quantized, because these are its weights."""
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


def _rerun(kept: SavedFailure, run: PreparedRun, loaded: LoadedModels, custom: Custom, plain: bool) -> Finding:
    """Repeat what failed. Returns the finding of a step; for everything else, an empty one if nothing is raised."""
    failure, engine, task = kept.failure, loaded.engine, run.task
    pad = loaded.plan.tokenizer.pad_id
    # Plain code takes only padded rows.
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
            _take_steps_to(run, loaded, loaded.state, failure.step)
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
    """Return config and plan of the run, changed to a single process."""
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
        fix = f"or give its new path, as in `surefoot replay {folder} model.path=…`"
        raise InputError([replace(one, fix=f"{one.fix}; {fix}" if one.fix else fix) for one in error.faults]) from None
    alone = config.parallel.model_copy(update={"nproc": None, "machines": 1, "engine": "auto"})
    if config.parallel.engine in ("fsdp2", "deepspeed"):
        alone = ParallelConfig()  # stage and offload are these engines' own
    return config.model_copy(update={"parallel": alone}), plan


def check_loss(folder: Path, name: str | None, custom: Custom, fix: str) -> None:
    """Check that the loss is the run's. A Python caller's loss is not in the folder, because no code is saved.

    name: name of the run's loss; None for the stage's own.

    Raises InputError if it is another one.
    """
    own = "the loss of its stage"
    if name != custom.objective_name:
        what = f"the step was computed with {name or own}, not {custom.objective_name or own}"
        raise InputError(Fault(str(folder), what, fix, code="SF-OWN-FUNCTION"))


def _checkpoint(folder: Path, kept: SavedFailure) -> Checkpoint | None:
    """Return the checkpoint from which steps are repeated; None for the base model."""
    if not _needs_steps(kept):
        return None
    for one in list_checkpoints(folder.resolve().parent):
        if one.step > kept.failure.steps_before or verify_checkpoint(one.folder):
            continue
        if is_on_the_way(one.step, read_state(one).rollbacks, kept.failure.rollbacks):
            return one
    return None


def _needs_steps(kept: SavedFailure) -> bool:
    """Whether the steps before the failure must be repeated."""
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


def _take_steps_to(run: PreparedRun, loaded: LoadedModels, state: RunState, last: int) -> RunState:
    """Take the steps after `state` up to step `last`."""
    return run_loop(replay_job(run, loaded, last), state, SilentObserver(), StopRequest()).state


def replay_job(run: PreparedRun, loaded: LoadedModels, last: int) -> Job:
    """The run's job up to step `last`, without evaluations or checkpoints and without the limit on bad steps."""
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
    """Whether a module of the plain model is the run's module or inside it: a fast path computes a module without
    calling its submodules."""
    return f"{plain}.".startswith(f"{own}.")
