"""Plan a reward model: which scores are compared, where a pair ends, and the value head.

DeepSpeed-Chat finds the end of an answer by counting PAD tokens, and must be told how many precede every text
(`--num_padding_at_beginning`): one for OPT, whose BOS `</s>` is the EOS that it pads with, else none. Its default of 1
is wrong for every other family and counts positions after the end. Here the ends are known; the number is inferred and
shown, and a requested number has the same effect as in DeepSpeed-Chat.
"""

from __future__ import annotations

from typing import Literal

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.families.tokenizer_facts import TokenizerFacts
from surefoot.planning.adapter import names_to_save
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice, RewardPlan, Source, TokenizerPlan
from surefoot.planning.trained import idle_parameters

ROWS = 2  # rows per example: a pair is two rows


def plan_reward(
    config: RunConfig,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    tokens: TokenizerPlan,
    shared_prompts: Choice[bool],
    notes: Notes,
) -> RewardPlan:
    """Plan the reward model. Pure. The output head is unused: frozen in full training, refused if an adapter names
    it."""
    request, facts = config.reward, config.loss
    assert facts is not None, "reward is a family of losses"
    _refuse_head(config, model, notes)
    source: Source = "user" if "loss" in request.model_fields_set else "default"
    front, reason = padding_in_front(tokenizer, tokens)
    chosen = _chosen(request.num_padding_at_beginning, front, reason, notes)
    return RewardPlan(
        loss=Choice(request.loss, facts.compared, source),
        num_padding_at_beginning=chosen,
        surplus=max(0, chosen.value - front),
        center=request.center,
        head=Choice("zeros", "every answer has the same score at first", "default")
        if request.init is None
        else Choice(request.init, "asked for: the value head of this reward model", "user"),
        head_parameters=model.embedding_width + (1 if request.center else 0),
        frozen=idle_parameters(config, model, tokens),
        shared_prompts=shared_prompts,
    )


def padding_in_front(tokenizer: TokenizerFacts, tokens: TokenizerPlan) -> tuple[int, str]:
    """Number of tokens before every text that DeepSpeed-Chat takes for PAD, and the reason. It pads with EOS, or
    PAD."""
    if not tokens.bos.value or tokens.bos_id is None:
        return 0, "texts do not begin with BOS"
    first = tokenizer.special.get(tokens.bos_id, str(tokens.bos_id))
    if tokenizer.eos is not None and tokens.bos_id == tokenizer.eos.id:
        return 1, f"every text begins with {first}, which is EOS and PAD as well for DeepSpeed-Chat"
    if tokens.bos_id == tokens.pad_id:
        return 1, f"every text begins with {first}, which is PAD"
    return 0, f"every text begins with {first}, which is not PAD"


def _chosen(requested: int | Literal["auto"], front: int, reason: str, notes: Notes) -> Choice[int]:
    if requested == "auto":
        return Choice(front, reason, "default")
    key = "reward.num_padding_at_beginning"
    if requested < front:
        what = f"is {requested}, but {reason}: the end of every pair would be found at its first token"
        notes.refuse(key, what, f"use auto, or {front}")
    elif requested > front:
        behind = f"{requested - front} position{'s' if requested - front > 1 else ''} behind the end of every pair"
        notes.caution(f"{key} is {requested}, but {reason}: the loss counts {behind}; auto takes {front}")
    return Choice(requested, f"asked for; {reason}", "user")


def _refuse_head(config: RunConfig, model: ModelFacts, notes: Notes) -> None:
    if config.adapter is None or model.tied:
        return
    named = {"modules_to_save": names_to_save(config.adapter), "targets": config.adapter.targets}
    for key, names in named.items():
        if names != "all-linear" and any(model.head == name or model.head.endswith(f".{name}") for name in names):
            what = f"names {model.head}, which stage reward does not use"
            notes.refuse(f"adapter.{key}", what, "leave it out: the value head is always trained")
