"""Collect the facts of the model card from config, plan, data and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.methods import SftConfig
from surefoot.config.schema import OptimConfig, RunConfig
from surefoot.data.audit import Audit
from surefoot.data.prepare import PreparedData
from surefoot.method_facts.losses import TOKEN_LOSSES
from surefoot.models.facts import facts_of
from surefoot.planning.plan import RunPlan
from surefoot.report.cards.run import CardFacts, DataFile, ending_token
from surefoot.report.footer import EXAMPLE_PROMPT
from surefoot.runs.plan_with_data import is_on_texts
from surefoot.runs.prepared import PreparedRun
from surefoot.system import hardware
from surefoot.system.locations import looks_local
from surefoot.training.optimizer import MUON_MOMENTUM

_INSPECTED = 32  # examples searched for the stop token


def card_facts(run: PreparedRun, results: Mapping[str, Any], plots: Sequence[str]) -> CardFacts:
    """Collect the facts of a finished run's model card.

    results: content of all_results.json.
    plots: file names of the curves.
    """
    config, plan, data, tokenizer = run.config, run.plan, run.task.data, run.tokenizer
    model = facts_of(run.base)
    optim = config.optim
    return CardFacts(
        name=run.folder.name,
        stage=config.stage,
        base=config.model.path,
        opened_by=model.opened_by,
        stored_form=model.stored_form,
        base_is_hub_id=not looks_local(config.model.path),
        base_revision=config.model.revision,
        plan=plan,
        settings={
            "optimizer": _optimizer(optim),
            "learning rate": f"{optim.lr:g}",
            "schedule": f"{optim.schedule}, warm-up {optim.warmup}",
            "gradient norm clipped to": str(optim.max_grad_norm) if optim.max_grad_norm else "not clipped",
            "duration": str(config.duration),
            **({"weights at the start": "random, by the seed"} if config.model.weights == "random" else {}),
            **_of_tokens(config),
            **_alignment(config),
            **_distillation(config),
            f"{config.method.counted} per step": str(config.batch.size),
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
        question=_public_question(data),
        end=_end(data, tokenizer) if plan.reward else "",
        merged=config.adapter is not None and config.adapter.publish == "merged",
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


def _of_tokens(config: RunConfig) -> dict[str, str]:
    """The loss of stages sft and pretrain, where tokens have weights."""
    if config.method.losses is not TOKEN_LOSSES or config.sft == SftConfig() or config.loss is None:
        return {}
    more = "".join(f", {key} {getattr(config.sft, key):g}" for key in config.loss.keys)
    return {"loss": f"{config.sft.loss}{more}"}


def _alignment(config: RunConfig) -> dict[str, str]:
    """The loss of stages dpo and kto, with the constants it uses."""
    given, loss = config.alignment, config.loss
    if not config.method.reference:
        return {}
    if loss is None:
        named = config.stage.upper()
        return {
            "loss": f"{named}, beta {given.beta:g}, weights of good and bad answers {given.good:g} and {given.bad:g}"
        }
    own = {key: getattr(given, key) for key in ("beta", *loss.keys) if key not in loss.unread}
    more = "".join(f", {key.replace('_', ' ')} {value:g}" for key, value in own.items() if value)
    more += f", {given.sft:g} times the cross entropy of the better answers" if given.sft else ""
    return {"loss": f"{given.loss}{more}"}


def _distillation(config: RunConfig) -> dict[str, str]:
    """The loss of stage distill."""
    given = config.distill
    if not config.method.teacher:
        return {}
    ends: dict[float, str] = {0: "forward KL", 1: "reverse KL"}
    kind = ends.get(given.beta, f"generalized JSD, beta {given.beta:g}")
    more = f", temperature {given.temperature:g}" if given.temperature != 1 else ""
    more += f", {given.sft:g} times the cross entropy of the data's answers" if given.sft else ""
    own = {"answers drawn by the student": f"{given.on_policy:.0%}"} if given.on_policy else {}
    return {"loss": f"{kind} from the teacher{more}", **own}


def _optimizer(optim: OptimConfig) -> str:
    """The optimizer's name and settings."""
    momentum = optim.momentum if optim.momentum is not None else {"muon": MUON_MOMENTUM}.get(optim.name, 0)
    moving, adam = f", momentum {momentum:g}", f", betas {optim.betas}, eps {optim.eps:g}"
    settings = {
        "adamw": adam,
        "adamw_8bit": adam,
        "adafactor": "",
        "rmsprop": f"{moving}, eps {optim.eps:g}",
        "sgd": moving,
        "muon": f"{moving}; for the other weights adamw{adam}",
    }
    return f"{optim.name}{settings[optim.name]}, weight decay {optim.weight_decay:g}"


def example_question(data: PreparedData) -> str:
    """An example prompt from the run's data, for local use; a default if the data has nothing short."""
    return data.audit.source.example_prompt or EXAMPLE_PROMPT


def example_picture(data: PreparedData) -> str:
    """The path of the first picture of the run's data, for local use; "" if there is none."""
    return next((pictures[0].path for _, pictures in data.train.pictures()), "")


def _end(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> str:
    """The stop token after an answer; empty if none of the inspected examples has one."""
    inspected = (data.train[index] for index in range(min(len(data.train), _INSPECTED)))
    found = (ending_token(example.ids.tolist(), data.template.stop_ids) for example in inspected)
    last = next((token for token in found if token is not None), None)
    return "" if last is None else str(tokenizer.convert_ids_to_tokens(last))


def _public_question(data: PreparedData) -> str:
    """An example prompt for the published card: only from hub data, never from a user's own files."""
    found = (audit.source.example_prompt for audit in data.sources if audit.source.commit is not None)
    return next(filter(None, found), EXAMPLE_PROMPT)


def _example_prompt(plan: RunPlan, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A text to continue, for a run on plain texts. None if the chat template formats prompts."""
    if not is_on_texts(data):
        return None
    tokens = plan.tokenizer
    bos = str(tokenizer.convert_ids_to_tokens(tokens.bos_id)) if tokens.bos.value and tokens.bos_id is not None else ""
    return bos + _public_question(data)
