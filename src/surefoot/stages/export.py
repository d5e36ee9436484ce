"""A trained model in one piece: the adapter merged into its base, cast, sharded, proven to be the same, and published.

Merged in fp32 from the base as it was before any 4-bit packing, in place, layer by layer: the peak is one copy of the
model in fp32. Everything is written into a hidden folder that takes its name when the certificate holds; a refusal, a
full disk or a kill leaves nothing behind.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from surefoot import durable, hardware
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.models.agreement import Agreement, compare_logits, logits_of
from surefoot.models.bos import bake, bake_obstacle, install_bos_scaling
from surefoot.models.load import load_model
from surefoot.models.merge import cast_weights, merge_adapter, tensor_digests
from surefoot.models.precision import TORCH_DTYPE
from surefoot.models.quiet import quiet_libraries
from surefoot.models.save import save_full
from surefoot.models.saved_adapter import open_adapter
from surefoot.models.vocabulary import embedding_and_head, is_tied, resize_vocabulary
from surefoot.planning.plan import DType
from surefoot.stages.certificate import (
    MERGED_LIMIT,
    RELOADED_LIMIT,
    check_record,
    require_merged,
    require_reloaded,
)
from surefoot.stages.export_adapter import copy_adapter
from surefoot.stages.export_files import copy_tokenizer, input_record, write_certificate, write_guides
from surefoot.stages.export_gguf import add_gguf, require_gguf_package
from surefoot.stages.export_parts import ExportParts, find_export_parts
from surefoot.stages.export_place import check_out
from surefoot.stages.export_prompts import PromptSet, choose_prompts

_SPARE = 1.05  # of the weights' bytes: what the disk must have free, tokenizer and headers included


@dataclass(frozen=True)
class Exported:
    """record: what export.json holds. cautions: sentences that the user should read."""

    folder: Path
    record: dict[str, Any]
    cautions: tuple[str, ...]


@dataclass
class _Account:
    """What happens to the model on its way, as the certificate tells it."""

    checks: dict[str, dict[str, Any]]
    merged_layers: int = 0
    replaced: tuple[str, ...] = ()
    untied: bool = False
    baked: float | None = None


def export_model(
    path: str,
    out: Path,
    *,
    adapters: Sequence[str] = (),
    merge: bool = False,
    dtype: DType | Literal["stored"] = "stored",
    max_shard_size: int = 5 * 10**9,
    device: Literal["cpu", "auto"] = "cpu",
    gguf: bool = False,
    modelfile: bool = True,
    drop_bos_scale: bool = False,
    threshold: float | None = None,
    prompts: Path | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write what `path` names to the folder `out`.

    path: a model, an adapter (which records its base) or a run of either kind, as folder or hub id. adapters: to be put
    over the model `path`, merged one after the other. merge: needed for adapters; without it the adapter is copied as
    it is. dtype: of the written weights; stored: the base's. max_shard_size: bytes per file. device: where to compute.
    drop_bos_scale: leave a scaled BOS embedding out where the format cannot carry it. threshold: share of the largest
    logit that rounding to the dtype may change. prompts: a file with one per line, for the certificate. overwrite: an
    earlier export in `out`.

    Raises InputError for what cannot be exported as asked and where the dtype changes the model too much;
    EnvironmentFault for a disk without room and a merge that does not agree with the adapter. Then nothing is
    published.
    """
    check_out(out, overwrite)
    parts = find_export_parts(path, adapters)
    durable.require_writable(out)
    if parts.chain and not merge:
        if gguf:
            raise InputError(Fault("--gguf", "is for whole models, and this is an adapter", "give --merge as well"))
        return Exported(out, copy_adapter(parts, out, overwrite), parts.cautions)
    if merge and not parts.chain:
        raise InputError(Fault(path, "is a whole model, so there is nothing to merge", "leave --merge out"))
    if gguf:
        require_gguf_package()
    scale = _scale(parts, drop_bos_scale)
    kind: DType = parts.facts.stored if dtype == "stored" else dtype
    _require_room(out, parts, kind)
    prompt_set = choose_prompts(
        prompts, parts.trained, parts.template, parts.encoder, parts.bos_id, parts.facts.max_positions
    )
    place = torch.device("cpu" if device == "cpu" else hardware.detect().kind)
    durable.restore_replaced(out.absolute().parent)
    with durable.staged_folder(out, replace=overwrite) as staging:
        account = _Account({})
        model, wanted = _merged(parts, place, prompt_set, scale, account)
        _stop_as_trained(model, parts)
        cast_weights(model, TORCH_DTYPE[kind])
        digests = tensor_digests(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        save_full(model, staging, max_shard_size)
        del model
        gc.collect()
        copy_tokenizer(parts, staging)
        reloaded = _reload(staging, place, digests)
        found = compare_logits(wanted, logits_of(reloaded, prompt_set.ids))
        require_reloaded(found, kind, threshold)
        account.checks["fp32_and_reloaded"] = check_record(found, threshold or RELOADED_LIMIT[kind])
        record = _record(parts, kind, prompt_set, account, digests, parameters, drop_bos_scale)
        cautions = [*parts.cautions, *record["notes"]]
        if gguf:
            cautions += add_gguf(parts, staging, reloaded, prompt_set, record, out)
        cautions += write_guides(parts, staging, record, name=out.name, modelfile=modelfile)
        write_certificate(staging, record, input_record(parts))
    return Exported(out, record, tuple(cautions))


def _merged(
    parts: ExportParts, device: torch.device, prompts: PromptSet, scale: float | None, account: _Account
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """The plain model in fp32, and the logits that it must keep."""
    rows = parts.chain[0].rows if parts.chain else None
    model: PreTrainedModel = load_model(
        parts.base,
        dtype=torch.float32,
        attention_implementation="eager" if parts.facts.without_sdpa else "sdpa",
        device=device,
        vocab_rows=rows,
    )
    if not parts.chain and scale is not None:
        install_bos_scaling(model, scale)
    wanted = [] if parts.chain else logits_of(model, prompts.ids)
    for number, saved in enumerate(parts.chain):
        if number and saved.rows is not None and saved.rows > embedding_and_head(model)[0].shape[0]:
            resize_vocabulary(model, saved.rows)
        adapted = open_adapter(model, saved)
        if scale is not None:
            install_bos_scaling(adapted, scale)
        wanted = logits_of(adapted, prompts.ids)
        merged = merge_adapter(adapted)
        model = merged.model
        account.merged_layers += len(merged.layers)
        account.replaced += merged.replaced
        account.untied = account.untied or merged.untied
        _agree(model, prompts, wanted, account, "adapter_and_merged" if len(parts.chain) == 1 else saved.folder.name)
    if scale is not None:
        _bake(model, parts, scale)
        account.baked = scale
        _agree(model, prompts, wanted, account, "scaled_and_baked")
    return model, wanted


def _agree(model: nn.Module, prompts: PromptSet, wanted: list[torch.Tensor], account: _Account, name: str) -> Agreement:
    found = compare_logits(wanted, logits_of(model, prompts.ids))
    require_merged(found)
    account.checks[name] = check_record(found, MERGED_LIMIT)
    return found


def _scale(parts: ExportParts, drop: bool) -> float | None:
    """The factor to bake; None where there is none. Obstacles that need no weights are told before any is loaded."""
    if parts.bos_scale is None or drop:
        return None
    _require_bakeable(parts, tied=False)
    return parts.bos_scale


def _bake(model: PreTrainedModel, parts: ExportParts, scale: float) -> None:
    _require_bakeable(parts, tied=is_tied(model))
    assert parts.bos_id is not None, "bake_obstacle names a missing BOS"
    bake(model, parts.bos_id, scale)


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
        fix = "export the adapter alone (without --merge), or give up the scaling with --drop-bos-scale"
        raise InputError(Fault("bos.scale", what, fix))


def _stop_as_trained(model: PreTrainedModel, parts: ExportParts) -> None:
    """generation_config.json of the run, which stops at the tokens that were learned."""
    if parts.chain and (parts.trained / "generation_config.json").is_file():
        with quiet_libraries():
            model.generation_config = GenerationConfig.from_pretrained(parts.trained)


def _reload(folder: Path, device: torch.device, digests: dict[str, str]) -> PreTrainedModel:
    """As anybody opens it. Raises EnvironmentFault where it is not, bit for bit, what was written."""
    with quiet_libraries():
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    found = tensor_digests(model)
    if different := sorted(name for name in digests.keys() | found.keys() if digests.get(name) != found.get(name)):
        what = f"{len(different)} of {len(digests)} tensors come back otherwise than written, first {different[0]}"
        raise EnvironmentFault(Fault("exported model", what, "nothing was published; please report it"))
    return model.to(device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature


def _require_room(out: Path, parts: ExportParts, dtype: DType) -> None:
    needed = int(parts.facts.parameters * {"fp32": 4, "bf16": 2, "fp16": 2}[dtype] * _SPARE)
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = hardware.free_disk(place)
    if free < needed:
        what = f"the disk has {free / 1e9:.1f} GB free, and the export takes about {needed / 1e9:.1f} GB"
        raise EnvironmentFault(Fault(str(out), what, "free some space or choose another disk"))


def _record(
    parts: ExportParts,
    dtype: DType,
    prompts: PromptSet,
    account: _Account,
    digests: dict[str, str],
    parameters: int,
    dropped: bool,
) -> dict[str, Any]:
    notes = []
    if parts.packed:
        notes.append("trained over the base in 4 bits, merged into the base as it was before packing")
    if account.untied:
        notes.append("embedding and output head were tied and differ now, so config.json says that they are two")
    if account.baked is not None:
        notes.append(
            f"the embedding's row of BOS is multiplied by {account.baked:g}; bos_zero_config.json is not needed"
        )
    if parts.bos_scale is not None and dropped:
        notes.append(f"the scaling of the BOS embedding ({parts.bos_scale:g}) was dropped, as asked")
    return {
        "dtype": dtype,
        "stored_dtype_of_base": parts.facts.stored,
        "tensors": {
            "count": len(digests),
            "parameters": parameters,
            "merged_layers": account.merged_layers,
            "trained_in_full": list(account.replaced),
            "added_rows": parts.added_rows,
            "bit_for_bit_after_reloading": len(digests),
        },
        "prompts": {"from": prompts.source, "count": len(prompts.ids), "tokens": prompts.tokens},
        "checks": account.checks,
        "notes": notes,
    }
