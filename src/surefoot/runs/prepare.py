"""Prepare everything that needs no weights: the plan, the data, the task and the schedule of steps.

A draft of the plan selects the tokenizer and finds conflicts before anything slow starts. The data is read with it, and
the plan is then made again with the known lengths. Nothing in the run folder changes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.families.files import read_json
from surefoot.methods.examples import all_fields_read
from surefoot.methods.method import Task
from surefoot.methods.table import functions_of
from surefoot.models.folder import resolve_folder, stored_tensors, unpacked_caution
from surefoot.models.load import layout_caution
from surefoot.planning.packing import without_packing
from surefoot.planning.plan import Origin, RunPlan
from surefoot.report.console import Console
from surefoot.report.tables.audit import audit_report
from surefoot.report.tables.plan import plan_changes, plan_table
from surefoot.report.trackers.adapters import require_trackers
from surefoot.runs.custom import Custom, custom_faults
from surefoot.runs.evaluating import check_answers
from surefoot.runs.identity import check_identity, require_base, run_identity
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.runs.output_folder import check_disk, disk_of
from surefoot.runs.plan_with_data import carry_template, lengths_of, other_kernels, plan_of, with_template
from surefoot.runs.prepared import PreparedRun, Timetable, make_schedule, make_task, make_timetable, with_noise
from surefoot.runs.profiling import Phases
from surefoot.runs.requirements import raised_together
from surefoot.runs.revisions import Commits, pin, saved_commits
from surefoot.runs.run_folder import DATA, FolderState, sentence
from surefoot.runs.summary import run_summary
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.messages import counted
from surefoot.training.checkpoint import TRAINER_STATE, Checkpoint

_MIN_EVAL = 10  # with fewer evaluation examples or pairs, their mean is mostly noise


def prepare(
    config: RunConfig,
    existing: FolderState,
    console: Console,
    custom: Custom,
    commits: Commits | None = None,
    phases: Phases | None = None,
    origin: Origin | None = None,
) -> PreparedRun:
    """Make the plan, read the data, and show both. For a resumed run, show only what is new.

    Every error that can be found without weights is raised here.

    commits: commits resolved by another rank; None asks the hub.
    phases: records how long each part took.
    origin: as in RunPlan.
    """
    requested, phases = config, phases or Phases()
    with raised_together(custom_faults(config, custom)):
        require_trackers(config.report_to)  # a resumed run has its plan already
        _say_found(console, existing)
        known = saved_commits(existing.folder / DATA) if existing.checkpoint else {}
        config, commits = pin(requested, known if commits is None else commits)
        draft = existing.plan or make_plan(config, measure=False)  # raises all conflicts before anything slow starts
    drawn = config.model.weights == "random"
    base = resolve_folder(config.model.path, config.model.revision, weights=not drawn)
    if not drawn:
        stored_tensors(base)  # finds truncated downloads by their headers, before the data is read
    if existing.checkpoint is not None:
        require_base(existing.checkpoint, base)
    tokenizer = planned_tokenizer(base, draft.tokenizer)
    kind = functions_of(config.stage)
    phases.end("planning")
    data = kind.prepare(config, draft.tokenizer, tokenizer, read_record=custom.read_record)
    if custom.reward is not None and not config.method.critic:  # a critic's stage asks about texts alone
        data = all_fields_read(data)
    check_answers(config, data)
    lengths = lengths_of(config, data)
    phases.end("data")
    with phases.during("probes", "measuring this machine, once for each shape of a model"):
        plan = with_template(plan_of(config, existing, lengths), data, config)
    plan = replace(plan, origin=origin) if origin else plan
    if custom.objective is not None and plan.kernels.documents.source != "user":
        plan = without_packing(plan, "a custom objective may not support packed rows", "default")
    carry_template(tokenizer, data, plan.tokenizer)
    task = make_task(config, plan, data, existing.rollbacks)
    if custom.objective is not None:
        task = replace(task, objective=custom.objective)
    if custom.reward is not None:
        task = replace(task, reward=custom.reward)
    task = with_noise(config, task)
    timetable = make_timetable(
        config.duration,
        config.eval_every,
        config.checkpoint.every,
        task.steps_per_epoch,
        task.step_tokens,
        eval_at_start=config.eval_at_start,
    )
    if existing.plan is None:
        console.show_summary(run_summary(config, plan, data, base, timetable), [plan_table(plan), audit_report(data)])
    elif any(change.key.startswith("data.eval") for change in existing.changes):
        console.show(audit_report(data))
    if existing.checkpoint is not None:
        _refuse_finished(config, existing.checkpoint, timetable.total_steps)
        _say_resume_point(console, existing, existing.checkpoint, plan, timetable)
    disk = disk_of(config, plan, len(timetable.save_steps))
    for caution in (
        *check_disk(existing.folder, disk, resumed=existing.checkpoint is not None),
        *_cautions(config, base, task, timetable),
    ):
        console.say(f"caution: {caution}", style="yellow")
    identity = run_identity(requested, plan, base, task.data, custom.objective_name)
    if existing.checkpoint is not None:
        for caution in check_identity(existing.checkpoint, identity, other_kernels(existing, plan)):
            console.say(caution, style="yellow")
    return PreparedRun(config, commits, existing, plan, base, tokenizer, task, timetable, identity)


def conflicts(config: RunConfig, custom: Custom) -> tuple[Fault, ...]:
    """Return the conflicts `prepare` would raise for the config, to report them with an error found earlier. Missing
    libraries and the like are left out."""
    try:
        with raised_together(custom_faults(config, custom)):
            make_plan(config, measure=False)
    except InputError as error:
        return error.faults
    except SurefootError:
        pass
    return ()


def _cautions(config: RunConfig, base: Path, task: Task, timetable: Timetable) -> Iterator[str]:
    """Yield warnings that need config, model and data together."""
    drawn = config.model.weights == "random"
    for caution in () if drawn else (layout_caution(base), unpacked_caution(base)):
        if caution:
            yield caution
    warmup = make_schedule(config, task, timetable).warmup
    if warmup >= timetable.total_steps:
        takes = counted(warmup, "step")
        yield f"optim.warmup takes {takes} and the run has {timetable.total_steps}: optim.lr is never reached"
    count = _MIN_EVAL if task.data.eval is None else len(task.data.eval) // task.data.rows_per_item
    if count < _MIN_EVAL and (config.early_stopping or config.checkpoint.best != "none"):
        few = counted(count, f"evaluation {config.method.counted.removesuffix('s')}")
        yield f"{few} {'decides' if count == 1 else 'decide'} which checkpoint is best, so the choice is largely chance"


def _refuse_finished(config: RunConfig, checkpoint: Checkpoint, total: int) -> None:
    """Refuse a duration that leaves no step to take: it would publish the checkpoint, or an older best one, as a run of
    that length. A duration that ends where the run was planned to end is allowed: that run only has to be finished."""
    planned = read_json(checkpoint.folder / TRAINER_STATE)["max_steps"]
    if total <= checkpoint.step and total != planned:
        what = f"{config.duration} ends at step {total:,}, and {checkpoint.folder} already exists"
        raise InputError(
            Fault(
                "duration",
                what,
                f"give more than {counted(checkpoint.step, 'step')}, or start another run",
                code="SF-CONFIG-CONFLICT",
            )
        )


def _say_resume_point(
    console: Console, existing: FolderState, checkpoint: Checkpoint, plan: RunPlan, timetable: Timetable
) -> None:
    """Say where the run resumes. This replaces the plan and the audit, which the first start has shown."""
    changed = [] if existing.plan is None else plan_changes(existing.plan, plan)
    after, total = checkpoint.step, timetable.total_steps
    here = f"after step {after:,} of {total:,}" if after < total else f"at its end, step {total:,}"
    console.say(f"it is {here}; the plan is {'unchanged except for:' if changed else 'unchanged'}")
    for line in changed:
        console.say(f"  {line}")


def _say_found(console: Console, existing: FolderState) -> None:
    for fault in existing.rejected:
        console.say(f"not used: {fault}", style="yellow")
    for change in existing.changes:
        console.say(sentence(change), style="yellow")
    if existing.checkpoint is not None:
        console.say(f"resuming from {existing.checkpoint.folder}")
    elif existing.mode == "resume":
        console.say(f"no checkpoint in {existing.folder}: starting at step 0")
