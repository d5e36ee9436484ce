"""The reference policy of stages dpo and kto, as the plan has it: opened, or computed once and kept.

A reference that is a model of its own belongs to no engine: each rank holds all of it, frozen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.config.schema import RunConfig
from surefoot.data.pack import unpacked
from surefoot.methods.losses.reference import Reference, adapter_off, frozen
from surefoot.methods.open_model import open_for_use
from surefoot.methods.policy import load_policy
from surefoot.methods.reference_cache import cached_reference
from surefoot.models.bos import install_bos_scaling
from surefoot.models.facts import facts_of
from surefoot.models.fast.packing import documents_fault, packed_attention
from surefoot.models.folder import resolve_folder
from surefoot.models.peft import PeftModel
from surefoot.planning.plan import PLAIN, Choice, RunPlan
from surefoot.planning.reference import ADAPTER_OFF, CACHED, MODEL, NONE
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.runs.prepared import Prepared
    from surefoot.runs.setup import Setup


def open_reference(run: Prepared, setup: Setup, say: Callable[[str], None]) -> Reference | None:
    """None where the loss needs none. Raises InputError for a model that is not intact or has another tokenizer."""
    config, plan = run.config, run.plan
    choice = plan.reference.value if plan.reference else NONE
    if choice == NONE:
        return None
    if choice == ADAPTER_OFF:
        assert isinstance(setup.policy, PeftModel)
        return adapter_off(setup.policy)
    if choice == MODEL:
        return _second_copy(config, plan, setup.engine.device)
    if choice == CACHED:
        base, at_hand = _base_for_now(config, plan, setup)
        return cached_reference(run, setup, base, at_hand, say)
    return _another(choice, plan, run.tokenizer, setup.engine.device, say)


def _base_for_now(config: RunConfig, plan: RunPlan, setup: Setup) -> tuple[Callable[[], Reference], bool]:
    """The base for as long as its numbers are taken, and whether it is in memory already: under the adapter or, before
    step 1 of full fine-tuning, as the policy itself."""
    policy = setup.policy
    if isinstance(policy, PeftModel):
        return lambda: adapter_off(policy), True
    if setup.checkpoint is None:
        return lambda: frozen(policy), True
    return lambda: _second_copy(config, plan, setup.engine.device), False


def _second_copy(config: RunConfig, plan: RunPlan, device: torch.device) -> Reference:
    """The base as the policy began with it, added rows and BOS factor included."""
    base = resolve_folder(config.model.path, config.model.revision, weights=True)
    once = replace(plan.memory, gradient_checkpointing=Choice(False, "nothing flows back", "default"))
    model = load_policy(config, replace(plan, adapter=None, memory=once), base, None, device)
    install_bos_scaling(model, plan.tokenizer.bos_scale.value)
    if (form := plan.kernels.documents.value) != PLAIN:
        packed_attention(form).install(model)  # as in the policy, whose architecture is the same and was tried
    return frozen(_at_rest(model))


def _another(
    path: str, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device, say: Callable[[str], None]
) -> Reference:
    """A model or adapter from elsewhere, in its own dtype."""
    opened = open_for_use(path)
    if not same_ids(opened.tokenizer, tokenizer):
        what = f"{path} has another tokenizer than the policy, so its ids mean other texts"
        raise InputError(Fault("alignment.reference", what, "name a model of the same family and vocabulary"))
    if opened.bos_scale != plan.tokenizer.bos_scale.value:
        say(f"the reference multiplies the first embedding by {opened.bos_scale:g}, as it was trained to")
    for caution in opened.cautions:
        say(f"reference: {caution}")
    model = _at_rest(opened.model.to(device))
    if (form := plan.kernels.documents.value) == PLAIN:
        return frozen(model)
    window = facts_of(opened.base).window
    why = documents_fault(model) if window is None else f"its layers look back {window} tokens"
    if why:
        say(f"the reference gets padded rows: {why}")
        of_rows = frozen(model)
        return lambda rows: of_rows(unpacked(rows, plan.tokenizer.pad_id))
    packed_attention(form).install(model)
    return frozen(model)


def _at_rest(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether a text gets the same ids from both. One may have tokens at its end that the other lacks, as a PAD of its
    own: no text is made of those."""
    first, second = one.get_vocab(), other.get_vocab()
    if any(second[token] != number for token, number in first.items() if token in second):
        return False
    return _rules(one) == _rules(other)


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """How text is cut before and after the vocabulary decides."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "what is opened has a fast tokenizer"
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: backend.get(name) for name in ("normalizer", "pre_tokenizer", "model")}
