"""Publish a run: copy the chosen checkpoint's model into the run folder, with results, plots and model card.

Every step can be repeated: a run killed while publishing publishes again when it is resumed. The run folder's manifest
is written last and marks the result as complete. With `adapter.publish: merged` the adapter is merged into its base by
the code of `surefoot export --merge`, with the same certificate (export.json); checkpoints keep the adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open

from surefoot.config.schema import RunConfig
from surefoot.data.batching.order import steps_per_epoch
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.files import PROCESSOR_FILES, TOKENIZER_FILES
from surefoot.methods.method import LoadedModels
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.report.cards.run import model_card
from surefoot.report.events import append_event, note_once
from surefoot.report.expert_load import NAME as EXPERT_LOAD
from surefoot.report.expert_load import dead_caution, load_record
from surefoot.report.html import draw_report
from surefoot.report.log_copies import NAME as LOG_COPIES
from surefoot.report.log_marks import NAME as LOG_MARKS
from surefoot.report.pictures.plots import REWARD, draw_curves
from surefoot.report.results import ALL, eval_results, rollout_results, train_results, write_results
from surefoot.report.trainer_log import Row, eval_report, is_eval_row
from surefoot.runs.card_facts import card_facts
from surefoot.runs.convert_run import convert_run
from surefoot.runs.export.model import export_model
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.run_folder import CONFIG, DATA, ENVIRONMENT, ORIGIN, PLAN
from surefoot.system import durable
from surefoot.system.errors import Fault, IntegrityError, NothingLearned
from surefoot.system.folders import AVERAGE, CERTIFICATE, CONVERSION
from surefoot.training.checkpoint import OPTIMIZER, STAGE, STATE, TRAINER_STATE, clear_rejected, verify_checkpoint
from surefoot.training.manifest import MANIFEST, manifest, read_manifest
from surefoot.training.report import EvalReport
from surefoot.training.state import LOSS, Goal, RunState

_STATE_FILES = frozenset({OPTIMIZER, STAGE, STATE, TRAINER_STATE, LOG_COPIES, LOG_MARKS})


@dataclass(frozen=True)
class Published:
    """What a run published.

    results: content of all_results.json.
    step: step of the published weights.
    cautions: warnings for the user.
    """

    results: dict[str, Any]
    step: int
    cautions: tuple[str, ...]


def is_published(run: Path, step: int) -> bool:
    """Whether the run folder holds the published result of a run that ended at `step`, with all of its files."""
    try:
        content = read_manifest(run)
    except IntegrityError:
        return False
    return content["step"] == step and all((run / name).is_file() for name in content["files"])


def publish(
    run: PreparedRun, loaded: LoadedModels, state: RunState, *, rows: Sequence[Row], more: Mapping[str, Any]
) -> Published:
    """Publish the chosen checkpoint's model in the run folder, with results, plots, report and model card.

    loaded: the run's models; the published weights are read from the checkpoint.
    state: the final state.
    rows: rows of the log.
    more: additional metrics for all_results.json.
    """
    config, folder = run.config, run.folder
    if config.method.rollouts:
        _check_adapter_moved(folder / f"checkpoint-{state.step}")
    # The manifest is removed first and written last. A run killed in between has none, so `is_published` is false and
    # --resume publishes again instead of trusting a mixture of two results.
    durable.remove(folder / MANIFEST)
    step, lost = chosen_step(folder, state, keep_best=config.checkpoint.best != "none")
    if step == 0 and state.step > 0:
        lost.append(_untrained(config, rows))
    names, of_merge = _take_model(config, folder, folder / f"checkpoint-{step}", folder / f"checkpoint-{state.step}")
    lost += of_merge
    if BOS_FILE in names:
        durable.write_json(folder / BOS_FILE, bos_file(run.plan.tokenizer.bos_scale.value))  # no step
    more = {**rollout_results(rows), **more}
    results = _write_results(run, state, _evaluation_at(rows, step), step, more)
    if config.method.scores:
        lost += _ranking_cautions(results)
    conversion = convert_run(run, loaded, folder / f"checkpoint-{step}", _evaluation_at(rows, step))
    if conversion is not None:
        durable.write_json(folder / CONVERSION, conversion.record)
        names, lost = [*names, *conversion.files, CONVERSION], [*lost, *conversion.cautions]
    plots, cautions = draw_curves(folder, rows, folder.name)
    durable.write_text(folder / "README.md", model_card(card_facts(run, results, plots)))
    of_experts = []
    if state.load:
        durable.write_json(folder / EXPERT_LOAD, load_record(state.load))
        of_experts, lost = [EXPERT_LOAD], [*lost, *dead_caution(state.load)]
    for sentence in lost:
        note_once(folder, "caution", state.step, sentence)
    untrained = ", before any training" if step == 0 else ""
    append_event(folder, "published", state.step, f"published the weights of step {step}{untrained}")
    report, missing = draw_report(folder)
    listed = (*names, *of_experts, CONFIG, PLAN, ENVIRONMENT, DATA, ALL, "README.md")
    origin = [ORIGIN] if (folder / ORIGIN).is_file() else []
    paths = [folder / name for name in (*listed, *origin, *plots, *report)]
    content = manifest(folder, paths, state.step, {**run.identity, "published_step": step})
    durable.write_json(folder / MANIFEST, content)
    # Last: until the result is complete, the rejected checkpoints may be all that is left to inspect.
    clear_rejected(folder)
    return Published(results, step, (*lost, *cautions, *missing))


def _check_adapter_moved(checkpoint: Path) -> None:
    """Raise NothingLearned if every LoRA B is still zero, so that the model equals its base."""
    weights = checkpoint / ADAPTER_WEIGHTS
    if not weights.is_file():
        return
    with safe_open(weights, "pt") as file:
        of_b = [name for name in file.keys() if ".lora_B." in name or ".lora_embedding_B" in name]  # noqa: SIM118
        if of_b and not any(bool(file.get_tensor(name).any()) for name in of_b):
            what = f"all {len(of_b)} LoRA B matrices are still zero, so nothing was learned; nothing is published"
            fix = "check reward, grad_norm and groups_without_spread in the log"
            raise NothingLearned(Fault(checkpoint.name, what, fix, code="SF-NOTHING-LEARNED"))


def _write_results(
    run: PreparedRun, state: RunState, evaluation: EvalReport | None, step: int, more: Mapping[str, Any]
) -> dict[str, Any]:
    """evaluation: evaluation of the published weights (those of `step`)."""
    timetable = run.timetable
    return write_results(
        run.folder,
        train_results(
            loss=state.mean_loss,
            steps=state.step,
            epoch=timetable.epoch(state.step),
            examples=_examples_seen(run, state.step),
            tokens=state.tokens,
            supervised=state.supervised,
            skipped=state.guard.skipped,
            scaler_skips=state.guard.scaler,
            rollbacks=len(state.rollbacks),
            seconds=state.seconds,
            beside=state.beside,
            unit=run.config.method.unit,
        ),
        eval_results(evaluation, timetable.epoch(step)) if evaluation else None,
        more,
    )


def chosen_step(run: Path, state: RunState, *, keep_best: bool) -> tuple[int, list[str]]:
    """Return the step whose weights are published, and warnings: the best checkpoint, or the last one if the best fails
    verification. Raises IntegrityError if the last one fails too: only verified weights are published."""
    cautions: list[str] = []
    if keep_best and state.best is not None:
        faults = verify_checkpoint(run / f"checkpoint-{state.best.step}")
        if not faults:
            return state.best.step, []
        last = f"checkpoint-{state.step}, the last one"
        cautions = [*map(str, faults), f"the best checkpoint is damaged: {last}, is published instead"]
    if faults := verify_checkpoint(run / f"checkpoint-{state.step}"):
        advice = Fault(
            str(run),
            "the run cannot be finished from a damaged checkpoint",
            "continue from an older one with --resume",
            code="SF-CHECKPOINT-DAMAGED",
        )
        raise IntegrityError([*faults, advice])
    return state.step, cautions


def _ranking_cautions(results: Mapping[str, Any]) -> list[str]:
    """Return warnings about how well a reward model ranks held-out pairs."""
    from surefoot.methods.reward import evaluated_ranking

    ranking = evaluated_ranking(results)
    if ranking is None:
        return ["no pairs were held out to measure how often it prefers the better answer; set data.eval: 0.05"]
    return [ranking.caution] if ranking.caution else []


def _untrained(config: RunConfig, rows: Sequence[Row]) -> str:
    best = config.checkpoint.best
    if config.method.rollouts and best == LOSS:
        best = REWARD.key  # the loss of an evaluation is minus the mean reward
    values = [Goal(best).value(eval_report(row)) for row in rows if is_eval_row(row)]
    return (
        f"the weights of step 0, before any training, are published: no later evaluation had a better {best} "
        f"(it was {values[0]:.4g}, and at the end {values[-1]:.4g}). Look at the curves; checkpoint.best: none "
        "publishes the weights of the last step"
    )


def _examples_seen(run: PreparedRun, steps: int) -> int:
    """Number of examples seen, with repetitions; the last batch of an epoch may be short."""
    size, count = run.plan.batch.size.value, run.task.data.mixture.epoch_size
    if run.config.batch.row_tokens is None:
        epochs, rest = divmod(steps, steps_per_epoch(count, size))
        return epochs * count + min(rest * size, count)
    epochs, rest = divmod(steps, run.task.steps_per_epoch)
    return epochs * count + sum(len(run.task.step_places(step)) for step in range(steps - rest + 1, steps + 1))


def _take_model(config: RunConfig, run: Path, chosen: Path, last: Path) -> tuple[list[str], tuple[str, ...]]:
    """Copy the chosen checkpoint's model files (its adapter merged, if configured) and the last checkpoint's trainer
    state. Returns the file names, and warnings of the merge."""
    names = [name for name in read_manifest(chosen)["files"] if name not in _STATE_FILES]
    of_merge: list[str] = []
    cautions: tuple[str, ...] = ()
    if config.adapter is not None and config.adapter.publish == "merged":
        of_merge, cautions = publish_merged(run, chosen)
        names = [name for name in without_adapter(run, names) if name not in of_merge]
    for name in names:
        durable.make_folders((run / name).parent)  # critic and average are in subfolders
        # Copied, not moved or linked: the checkpoint stays whole, and --resume can publish from it again.
        durable.copy_file(chosen / name, run / name)
    # Of the last checkpoint, not the chosen one, because it covers the whole run.
    durable.copy_file(last / TRAINER_STATE, run / TRAINER_STATE)
    return [*names, *of_merge], cautions


def _evaluation_at(rows: Sequence[Row], step: int) -> EvalReport | None:
    found = (row for row in reversed(rows) if is_eval_row(row) and row["current_steps"] == step)
    return next(map(eval_report, found), None)


ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS})
_POLICIES = ("", AVERAGE)  # folders of a checkpoint with a policy; a critic stays an adapter, as PPO uses it
_STAGING = ".merged"
_OWN = frozenset({"README.md", *TOKENIZER_FILES, *PROCESSOR_FILES})  # the run writes these itself


def publish_merged(run: Path, checkpoint: Path) -> tuple[list[str], tuple[str, ...]]:
    """Merge the adapters of `checkpoint` and put the models into the run folder. Returns their file names and warnings.
    Raises EnvironmentFault if a merged model disagrees with its adapter, or the disk is full."""
    names: list[str] = []
    cautions: list[str] = []
    staging = run / _STAGING
    for place in _POLICIES:
        if not (checkpoint / place / ADAPTER_CONFIG).is_file():
            continue
        exported = export_model(str(checkpoint / place), staging, merge=True, modelfile=False, overwrite=True)
        own = sorted(path.name for path in staging.iterdir() if path.is_file() and path.name not in _OWN)
        durable.make_folders(run / place)
        for name in own:
            durable.copy_file(staging / name, run / place / name)
        outputs = {name: entry for name, entry in exported.record["outputs"].items() if name in own}
        durable.write_json(run / place / CERTIFICATE, {**exported.record, "outputs": outputs})
        durable.remove(staging)
        names += [str(PurePosixPath(place, name)) for name in own]
        cautions += exported.cautions
    return names, tuple(dict.fromkeys(cautions))


def without_adapter(run: Path, names: Collection[str]) -> list[str]:
    """Delete the adapter files from a run with merged models, and return the names of the remaining files."""
    places = [place for place in _POLICIES if (run / place).is_dir()]
    adapters = {str(PurePosixPath(place, name)) for place in places for name in ADAPTER_FILES}
    for name in adapters:
        durable.remove(run / name)
    return [name for name in names if name not in adapters]
