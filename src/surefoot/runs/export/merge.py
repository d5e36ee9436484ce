"""Merge base and adapters into the plain fp32 model that an export writes, comparing it with the trained one at each
step.

Each adapter is compared by itself, over the base with the previous adapters merged. A scaled BOS embedding is written
into its row at the end. The texts for the comparison are the user's, else training examples, else built-in ones; all
are formatted with the training template, because that is how the model is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import Template, TextEncoder, prompt_ids, text_ids
from surefoot.families.files import read_json_if_there, read_text
from surefoot.models.bos import bake, bake_obstacle, install_bos_scaling
from surefoot.models.embeddings import embedding_and_head, is_tied, resize_vocabulary
from surefoot.models.load import load_model
from surefoot.models.merge import merge_adapter
from surefoot.models.saved_adapter import SavedAdapter, open_adapter
from surefoot.models.verify import compare_logits, logits_of, rounding_noise
from surefoot.runs.export.certificate import MERGED_LIMIT, check_record, merged_limit, require_merged
from surefoot.runs.export.parts import ExportParts
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import run_of


@dataclass
class Account:
    """What was done to the model, for the certificate.

    hidden: adapters whose whole effect is below the limit of their comparison.
    baked: the factor written into the embedding row of BOS.
    cautions: warnings for the user only, because they name folders.
    """

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    merged_layers: int = 0
    replaced: tuple[str, ...] = ()
    untied: bool = False
    hidden: tuple[str, ...] = ()
    baked: float | None = None
    cautions: list[str] = field(default_factory=list)


def merged_model(
    parts: ExportParts, device: torch.device, prompts: PromptSet, scale: float | None, account: Account
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """Return the plain fp32 model and the logits that it must reproduce. scale: factor for BOS, from `scale_to_bake`.

    Raises EnvironmentFault if a merged model differs from its adapter.
    """
    model: PreTrainedModel = load_model(
        parts.base,
        dtype=torch.float32,
        attention_implementation="eager" if parts.facts.without_sdpa else "sdpa",
        device=device,
        vocab_rows=parts.chain[0].rows if parts.chain else None,
        notify=account.cautions.append,
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
    """Merge one adapter into the model. Returns the model, and the logits of the unmerged adapter."""
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
    """Return the factor to write into BOS, or None. Obstacles that need no weights are raised before any are loaded."""
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
        fix = f"{kept}, or drop the scaling with --drop-bos-scale"
        raise InputError(Fault("bos.scale", what, fix, code="SF-BOS"))


LONGEST = 256  # tokens of one text
TOGETHER = 1024  # tokens of all texts: with 128,000 logits per token, half a GB per compared model
BUILT_IN = (
    "Give three tips for staying healthy.",
    "What is the capital of France, and which river runs through it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.",
    "Summarize: the meeting moved from 9:30 on Tuesday to 14:00 on Thursday, room 12B, bring the 2024 figures.",
    "小猫为什么喜欢睡觉?",
)


@dataclass(frozen=True)
class PromptSet:
    """Prompts on which two models are compared.

    ids: token ids of each text, with BOS if the model uses one.
    source: where they come from, for the certificate.
    """

    ids: tuple[tuple[int, ...], ...]
    source: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def choose_prompts(
    file: Path | None, trained: Path, template: Template | None, encoder: TextEncoder, bos_id: int | None, longest: int
) -> PromptSet:
    """Choose the prompts of a certificate: the user's, else training examples, else built-in ones.

    file: one prompt per line.
    trained: folder of the trained model; its data.json may contain examples.
    template: None for a model of plain texts.
    longest: context length of the model, in tokens.

    Raises InputError for a file without prompts.
    """

    def lay_out(text: str) -> list[int]:
        return _laid_out(text, template, encoder, bos_id)

    if file is not None:
        return _within(map(lay_out, _lines(file)), f"the prompts of {file.name}", longest)
    if examples := _examples(trained):
        ids = (text_ids(text, encoder, bos_id) for text in examples)
        return _within(ids, "examples that the run was trained on", longest)
    return _within(map(lay_out, BUILT_IN), "built-in prompts", longest)


def _lines(file: Path) -> list[str]:
    lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise InputError(Fault(str(file), "contains no prompt", "write one per line", code="SF-DATA-EMPTY"))
    return lines


def _examples(trained: Path) -> list[str]:
    """Samples of the data audit, as the template rendered them."""
    run = run_of(trained)
    audit: dict[str, Any] = {} if run is None else read_json_if_there(run / "data.json").get("train") or {}
    return ["".join(part["text"] for part in sample["parts"]) for sample in audit.get("samples", ())]


def _laid_out(text: str, template: Template | None, encoder: TextEncoder, bos_id: int | None) -> list[int]:
    if template is None:
        return text_ids(text, encoder, bos_id)
    try:
        return prompt_ids(Conversation((Turn("user", text),)), template, encoder, bos_id)
    except RowFault as fault:
        raise InputError(Fault("prompt", fault.what, fault.fix, code="SF-DATA-TEMPLATE")) from None


def _within(texts: Iterable[list[int]], source: str, longest: int) -> PromptSet:
    kept: list[tuple[int, ...]] = []
    room = TOGETHER
    for ids in texts:
        cut = ids[: min(LONGEST, longest, room)]
        if cut:
            kept.append(tuple(cut))
            room -= len(cut)
    return PromptSet(tuple(kept), source)
