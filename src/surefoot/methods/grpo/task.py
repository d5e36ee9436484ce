"""GRPO's data: the prompts of each step, and checks that they can be scored.

batch.size counts answers, so a step has batch.size / grpo.group prompts (`surefoot.methods.rollouts.prompts_task`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.rollouts import Cycles
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.picture_processor import read_processor
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.method_facts.losses import GROUP_LOSSES, GroupLossFacts
from surefoot.methods.examples import prepare_examples
from surefoot.methods.grpo.turns import named_environment, turn_marks
from surefoot.methods.losses.grpo import GroupSettings, group_objective
from surefoot.methods.losses.mismatch import Correction
from surefoot.methods.method import Task
from surefoot.methods.open_model import find_parts
from surefoot.methods.rewards.graders import COMPARING, expected_fault
from surefoot.methods.rewards.terms import needed_fields, open_rewards
from surefoot.methods.rollouts import prompts_task
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few, nearest_word

_PICTURE = "SF-DATA-PICTURE"


def prepare_grpo(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Prepare the prompts. Rewards, the answers they compare with, and the environment are also checked here, before a
    model is loaded."""
    open_rewards(config.grpo.rewards)
    environment = named_environment(config)
    data = prepare_examples(config, tokens, tokenizer, read_record=read_record)
    if environment is not None:
        turn_marks(config, tokens, tokenizer, data, environment.role)
    seen = any(file.pictures for one in (data.train, data.eval) if one is not None for file in one.files)
    unseen = _unseen(config, data, TextEncoder(tokenizer)) if seen else ()
    if faults := [*unseen, *_without_expected(config, data), *_without_fields(config, data)]:
        raise InputError(faults)
    return data


def _unseen(config: RunConfig, data: PreparedData, encoder: TextEncoder) -> Iterator[Fault]:
    """Faults for what cannot be shown the prompts' pictures: an environment, and reward models that would see them in
    another way than the policy, whose pixels they get."""
    if config.grpo.environment is not None:
        what = "has turns, which do not show the prompts' pictures"
        yield Fault("grpo.environment", what, "leave it out, or take prompts without pictures", code=_PICTURE)
    for path, key in config.grpo.reward_models.items():
        base, _ = find_parts(path, None)
        own = read_processor(str(base), encoder) and read_processor(str(base), encoder, config.data.max_pixels)
        if own is None or data.train.processor is None or own.identity != data.train.processor.identity:
            what = f"{path} does not read pictures as the policy does"
            yield Fault(key, what, "train a reward model on the policy's own base", code=_PICTURE)


def _without_expected(config: RunConfig, data: PreparedData) -> list[Fault]:
    """Faults for records in which a grader finds no expected answer: one for each file, also if part is held out."""
    found: list[Fault] = []
    for term in (term for term in config.grpo.rewards if term.name in COMPARING):
        wrong: dict[str, list[tuple[int, int, str]]] = {}  # file -> (row, line, why)
        for dataset in (one for one in (data.train, data.eval) if one is not None):
            for place in range(len(dataset)):
                if why := expected_fault(term, dataset.record(place)):
                    file, row, line = dataset.row(place)
                    wrong.setdefault(file, []).append((row, line, why))
        for file, records in wrong.items():
            row, line, why = min(records)
            rows = first_few(sorted(number for number, _, _ in records), 8)
            fix = f"rows {rows}: name the field with the right answer (grpo.rewards, field:), or leave them out"
            found.append(Fault(f"{file}:{line}", f"row {row}: {why}", fix, code="SF-REWARD"))
    return found


def _without_fields(config: RunConfig, data: PreparedData) -> Iterator[Fault]:
    """Faults for own functions that ask for a field that no record has."""
    for place, term in enumerate(config.grpo.rewards):
        needed = set(needed_fields(term, config.grpo.environment is not None))
        fields: dict[str, None] = {}
        for number in range(len(data.train)):
            if needed <= fields.keys():
                break
            fields |= dict.fromkeys(data.train.record(number))
        if lacking := sorted(needed - fields.keys()):
            near = nearest_word(lacking[0], fields)
            fix = f"did you mean {near}?" if near else f"they have {', '.join(fields)}"
            what = f"{term.name} asks for {lacking[0]!r}, which no record has"
            yield Fault(f"grpo.rewards[{place}].name", what, fix, code="SF-OWN-FUNCTION")


def cycles_of(config: RunConfig, plan: RunPlan, data: PreparedData) -> Cycles:
    """Cycles of prompts."""
    grpo = config.grpo
    return Cycles(data.mixture, plan.batch.size.value // grpo.group, grpo.rollout_batches, grpo.epochs)


def loss_facts(config: RunConfig) -> GroupLossFacts:
    """Facts of the loss, with baseline and scale from the config if set."""
    grpo = config.grpo
    row = GROUP_LOSSES[grpo.loss]
    return replace(
        row,
        baseline=row.baseline if grpo.baseline == "auto" else grpo.baseline,
        scale=row.scale if grpo.scale == "auto" else grpo.scale,
    )


def settings_of(config: RunConfig) -> GroupSettings:
    grpo, facts = config.grpo, loss_facts(config)
    low, high = facts.clip
    return GroupSettings(
        facts=facts,
        clip_low=low if grpo.clip_low == "auto" else grpo.clip_low,
        clip_high=high if grpo.clip_high == "auto" else grpo.clip_high,
        kl=grpo.kl if facts.penalty == "loss" else 0.0,
        temperature=grpo.temperature,
        limit=grpo.max_new_tokens,
        kl_by_ratio=grpo.kl_by_ratio,
    )


def correction_of(config: RunConfig) -> Correction:
    grpo = config.grpo
    return Correction(grpo.correction, grpo.correction_low, grpo.correction_high)


def grpo_task(config: RunConfig, plan: RunPlan, data: PreparedData) -> Task:
    """Make the task of prompts under a plan; `start_grpo` adds the models."""
    objective = group_objective(settings_of(config))
    return prompts_task(
        config, plan, data, cycles_of(config, plan, data), objective, ratio_bound=config.grpo.ratio_bound
    )
