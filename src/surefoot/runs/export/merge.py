"""From base and adapters to the plain model in fp32 that an export writes, compared at each step with what was trained.

Each adapter is compared by itself, over the base with those before it merged. A scaled BOS embedding is written into
its row at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.models.bos import bake, bake_obstacle, install_bos_scaling
from surefoot.models.embeddings import embedding_and_head, is_tied, resize_vocabulary
from surefoot.models.load import load_model
from surefoot.models.merge import merge_adapter
from surefoot.models.saved_adapter import SavedAdapter, open_adapter
from surefoot.models.verify import compare_logits, logits_of, rounding_noise
from surefoot.runs.export.certificate import MERGED_LIMIT, check_record, merged_limit, require_merged
from surefoot.runs.export.parts import ExportParts
from surefoot.runs.export.prompts import PromptSet
from surefoot.system.errors import Fault, InputError


@dataclass
class Account:
    """What happens to the model on its way, as the certificate tells it. hidden: adapters whose whole effect is within
    the limit of their comparison. baked: the factor that is in the row of BOS. said: sentences for the user alone, for
    they name folders."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    merged_layers: int = 0
    replaced: tuple[str, ...] = ()
    untied: bool = False
    hidden: tuple[str, ...] = ()
    baked: float | None = None
    said: list[str] = field(default_factory=list)


def merged_model(
    parts: ExportParts, device: torch.device, prompts: PromptSet, scale: float | None, account: Account
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """The plain model in fp32, and the logits that it must keep. scale: to be written into BOS, from `scale_to_bake`.

    Raises EnvironmentFault for a merge that is not the adapter.
    """
    model: PreTrainedModel = load_model(
        parts.base,
        dtype=torch.float32,
        attention_implementation="eager" if parts.facts.without_sdpa else "sdpa",
        device=device,
        vocab_rows=parts.chain[0].rows if parts.chain else None,
        say=account.said.append,
    )
    wanted: list[torch.Tensor] = []
    for number, saved in enumerate(parts.chain):
        if number and saved.rows is not None and saved.rows > embedding_and_head(model)[0].shape[0]:
            resize_vocabulary(model, saved.rows)
        key = "adapter_and_merged" if len(parts.chain) == 1 else f"{number + 1}: {saved.folder.resolve().name}"
        model, wanted = _with_adapter(model, saved, prompts, scale, account, key)
    if not parts.chain:
        install_bos_scaling(model, 1.0 if scale is None else scale)
        wanted = logits_of(model, prompts.ids)
    if scale is not None:
        _require_bakeable(parts, tied=is_tied(model))
        assert parts.bos_id is not None, "bake_obstacle names a missing BOS"
        bake(model, parts.bos_id, scale)
        account.baked = scale
        _agree(model, prompts, wanted, account, "scaled_and_baked", MERGED_LIMIT)
    return model, wanted


def _with_adapter(
    model: PreTrainedModel, saved: SavedAdapter, prompts: PromptSet, scale: float | None, account: Account, key: str
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """The model with one adapter merged into it, and the adapter's logits."""
    factor = 1.0 if scale is None else scale
    install_bos_scaling(model, factor)
    before = logits_of(model, prompts.ids)
    noise = rounding_noise(model, prompts.ids, before)
    adapted = open_adapter(model, saved)
    install_bos_scaling(adapted, factor)
    wanted = logits_of(adapted, prompts.ids)
    effect = compare_logits(before, wanted)
    limit = merged_limit(effect.share, noise)
    merged = merge_adapter(adapted)
    account.merged_layers += len(merged.layers)
    account.replaced += merged.replaced
    account.untied = account.untied or merged.untied
    _agree(merged.model, prompts, wanted, account, key, limit)
    account.checks[key] |= {"adapter_changes": effect.largest, "adapter_changes_share": effect.share}
    if effect.share <= limit:
        account.hidden += (saved.folder.resolve().name,)
    return merged.model, wanted


def _agree(
    model: nn.Module, prompts: PromptSet, wanted: list[torch.Tensor], account: Account, key: str, limit: float
) -> None:
    found = compare_logits(wanted, logits_of(model, prompts.ids))
    require_merged(found, limit)
    account.checks[key] = check_record(found, limit)


def scale_to_bake(parts: ExportParts, drop: bool) -> float | None:
    """The factor to bake; None where there is none. Obstacles that need no weights are told before any is loaded."""
    if parts.bos_scale is None or drop:
        return None
    _require_bakeable(parts, tied=False)
    return parts.bos_scale


def _require_bakeable(parts: ExportParts, tied: bool) -> None:
    tokens = parts.tokens
    obstacle = bake_obstacle(
        bos_id=parts.bos_id,
        ends=tokens.stop.value,
        pad_id=tokens.pad_id,
        tied=tied,
        repeats_bos=parts.template.repeats_bos,
    )
    if obstacle:
        what = f"the scaled BOS embedding ({parts.bos_scale:g}) cannot be written into the weights: {obstacle}"
        kept = "export the adapter alone (without --merge)" if parts.chain else "use the run's folder as it is"
        fix = f"{kept}, or give up the scaling with --drop-bos-scale"
        raise InputError(Fault("bos.scale", what, fix, code="SF-BOS"))
