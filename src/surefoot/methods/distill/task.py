"""Stage distill as a task: the batches are those of stage sft, the loss compares with the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import all_example_batches, example_batches
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.methods.distill.drawing import Drawing, check_prompts
from surefoot.methods.distill.served import KEY, open_served
from surefoot.methods.distill.stored import check_stored, is_stored, open_stored
from surefoot.methods.distill.teacher import open_teacher, require_teacher, student_rows
from surefoot.methods.examples import prepare_examples, task_of_items, with_digests
from surefoot.methods.losses.distill import DistillSettings, distill_objective, stand_in
from surefoot.methods.method import LoadedModels, Notify, RunInputs, Task
from surefoot.methods.rollouts import rollout_engine
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.system.locations import is_address
from surefoot.training.ranks import all_or_none


def prepare_distill(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Prepare the examples. A teacher without weights is found before the data are read, and one that is stored is
    compared with them."""
    require_teacher(config)
    data = prepare_examples(config, tokens, tokenizer, read_record=read_record)
    check_prompts(config, data)
    if is_stored(path := str(config.distill.teacher)):
        base = resolve_folder(config.model.path, config.model.revision, weights=False)
        check_stored(
            path,
            KEY,
            tokenizer=data.tokenizer_sha256,
            temperature=config.distill.temperature,
            words=facts_of(base).vocab + tokens.added_rows,
            data=[one for one in (data.train, data.eval) if one is not None],
        )
    return data


def settings_of(config: RunConfig) -> DistillSettings:
    given = config.distill
    return DistillSettings(given.beta, given.temperature, given.sft, config.draws)


def distill_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of the data under a plan; `start_distill` gives it the teacher."""
    objective = distill_objective(settings_of(config), stand_in)
    if is_stored(path := str(config.distill.teacher)) or is_address(path):
        return task_of_items(objective, config, plan, data, *with_digests(example_batches, all_example_batches))
    return task_of_items(objective, config, plan, data, example_batches, all_example_batches)


def start_distill(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task:
    """Open the teacher, and what draws the student's own answers."""
    config, path = run.config, str(run.config.distill.teacher)
    draw, servers = None, ()
    if config.draws:
        engine = rollout_engine(config, run.plan, loaded)
        draw, servers = Drawing(run, loaded, engine).ready, engine.servers
    if is_address(path):
        served = open_served(run, loaded, student_rows(loaded.policy), notify)

        def ask(step: int, batches: Sequence[Weighted]) -> Sequence[Weighted]:
            with all_or_none(loaded.engine.totals):
                return served.prepare(step, batches)

        return replace(
            run.task,
            objective=distill_objective(settings_of(config), served),
            ready=lambda step, batches: ask(step, batches if draw is None else draw(step, batches)),
            eval_ready=lambda batch: ask(loaded.state.step, [batch])[0],
            servers=(*servers, served.server),
        )
    teacher = open_stored(path, KEY) if is_stored(path) else open_teacher(config, run.plan, loaded, notify)
    objective = distill_objective(settings_of(config), teacher)
    return replace(run.task, objective=objective, ready=draw, servers=servers)
