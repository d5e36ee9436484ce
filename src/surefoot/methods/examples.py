"""The examples that a stage learns from: found, rendered, tokenised and audited, or taken from the cache."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.prepare import PreparedData, prepare_data
from surefoot.data.tokenise import ReadRecord
from surefoot.families.templates import is_file
from surefoot.methods.asked_sources import KINDS_OF_RECORDS, evaluated_specs, trained_specs
from surefoot.planning.plan import TokenizerPlan
from surefoot.system import process
from surefoot.system.errors import Fault, InputError


def prepare_examples(
    config: RunConfig,
    tokens: TokenizerPlan,
    tokenizer: PreTrainedTokenizerBase,
    *,
    read_record: ReadRecord | None = None,
) -> PreparedData:
    """Those of config.stage; of the plan its tokenizer's part alone is needed. Stage pretrain: plain texts, in as many
    examples as they need; ppo: prompts, each of which leaves room for ppo.max_new_tokens. read_record: for sources
    whose format is custom. Raises InputError for bad data."""
    data = config.data
    evaluation = evaluated_specs(config) if isinstance(data.eval, tuple) else data.eval
    planned = tokens.dialogues or tokens.template.value
    learned = data.train_on
    assert learned != "by-record", "settled before the plan: surefoot.methods.by_record"
    return prepare_data(
        trained_specs(config),
        None if evaluation == "none" else evaluation,
        template=data.template if is_file(data.template) else planned,  # a file may have moved
        template_asked=data.template != "auto",
        template_fallbacks=tokens.fallbacks,
        tokenizer=tokenizer,
        bos_id=tokens.bos_id if tokens.bos.value else None,
        pad_id=tokens.pad_id,
        stop_ids=tokens.stop.value,
        max_length=_max_length(config, tokens),
        max_samples=data.max_samples,
        train_on=learned,
        encoding=data.encoding,
        seed=config.seed,
        cache=process.cache_folder(),
        chunks=config.stage == "pretrain",
        read_record=read_record,
        kind=KINDS_OF_RECORDS[config.stage],
    )


def _max_length(config: RunConfig, tokens: TokenizerPlan) -> int:
    """Of an example, in tokens."""
    longest = tokens.max_length.value
    if config.stage != "ppo":
        return longest
    room = longest - config.ppo.max_new_tokens
    if room < 1:
        what = f"{config.ppo.max_new_tokens} leave no room for a prompt in {longest} (data.max_length)"
        raise InputError(Fault("ppo.max_new_tokens", what, "lower it"))
    return room
