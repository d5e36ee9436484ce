"""What the model card says, gathered from config, plan, data and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot import hardware
from surefoot.config.schema import RunConfig
from surefoot.data.audit import Audit
from surefoot.data.formats import Conversation, Turn
from surefoot.data.prepare import PreparedData
from surefoot.data.segments import prompt_ids
from surefoot.data.text_encoder import TextEncoder
from surefoot.locations import looks_local
from surefoot.planning.plan import RunPlan
from surefoot.report.card import CardFacts, DataFile
from surefoot.stages.trained_template import is_on_texts

_QUESTION = "Give three tips for staying healthy."


def card_facts(
    config: RunConfig,
    plan: RunPlan,
    name: str,
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    results: Mapping[str, Any],
    plots: Sequence[str],
) -> CardFacts:
    """name: of the run. results: all_results.json. plots: file names."""
    optim = config.optim
    return CardFacts(
        name=name,
        stage=config.stage,
        base=config.model.path,
        base_is_hub_id=not looks_local(config.model.path),
        base_revision=config.model.revision,
        plan=plan,
        settings={
            "optimizer": f"{optim.name}, betas {optim.betas}, eps {optim.eps:g}, weight decay {optim.weight_decay:g}",
            "learning rate": f"{optim.lr:g}",
            "schedule": f"{optim.schedule}, warm-up {optim.warmup}",
            "gradient norm clipped to": str(optim.max_grad_norm) if optim.max_grad_norm else "not clipped",
            "duration": str(config.duration),
            "examples per step": str(config.batch.size),
            "longest example": f"{plan.tokenizer.max_length.value} tokens",
            "seed": str(config.seed),
        },
        data=(
            *(_data_file("training", audit) for audit in data.sources),
            *(_data_file("evaluation", audit) for audit in data.eval_sources),
        ),
        results=results,
        versions=hardware.versions(),
        hardware=plan.device.reason,
        prompt=_example_prompt(plan, data, tokenizer),
        plots=tuple(plots),
    )


def _data_file(role: str, audit: Audit) -> DataFile:
    source = audit.source
    return DataFile(
        role,
        source.file.replace("\\", "/").rpartition("/")[2],
        source.sha256,
        source.rows,
        audit.kept,
        audit.tokens,
        audit.supervised_tokens,
    )


def _example_prompt(plan: RunPlan, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """None where the saved chat template lays out the prompts, as it does but for runs on texts without turns."""
    if not is_on_texts(data):
        return None
    tokens = plan.tokenizer
    conversation = Conversation((Turn("user", _QUESTION),))
    ids = prompt_ids(conversation, data.template, TextEncoder(tokenizer), tokens.bos_id if tokens.bos.value else None)
    return str(tokenizer.decode(ids))
