"""Export a trained model: merge the adapter into its base, cast, shard, verify and publish.

The merge runs in fp32 on the unquantized base, in place, layer by layer: peak memory is one fp32 copy of the model.
Everything is written into a hidden folder, which is renamed once the certificate is complete; an error, a full disk or
a kill leaves nothing behind.

Without a merge the adapter is copied byte for byte in PEFT's format, without the run's other files. An adapter in
another layout (`surefoot.models.convert`) is converted to PEFT's, because PEFT would misread it silently.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.families.files import read_json
from surefoot.methods.provenance import other_base_caution
from surefoot.methods.requests import require_mergeable
from surefoot.models.convert.safetensors_file import write_file
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.models.facts import model_config
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.merge import cast_weights, tensor_digests
from surefoot.models.precision import TORCH_DTYPE
from surefoot.models.quiet import quiet_libraries
from surefoot.models.save import ADAPTER_WEIGHTS, save_full
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.models.verify import compare_logits, logits_of
from surefoot.models.wrapped import auto_class
from surefoot.planning.disk import model_bytes
from surefoot.planning.plan import DType
from surefoot.report.cards.export import CERTIFICATE
from surefoot.runs.export.certificate import CAST_LIMIT, check_record, reloaded_limit, require_cast, require_reloaded
from surefoot.runs.export.files import (
    copy_tokenizer,
    copy_value_head,
    input_record,
    public_name,
    write_certificate,
    write_guides,
)
from surefoot.runs.export.gguf import add_gguf, require_gguf_package
from surefoot.runs.export.merge import Account, PromptSet, choose_prompts, merged_model, scale_to_bake
from surefoot.runs.export.parts import ExportParts, find_export_parts
from surefoot.runs.output_folder import free_space
from surefoot.system import durable, hardware
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.folders import require_replaceable
from surefoot.system.messages import size_text

_SPARE = 1.05  # required free disk space relative to the weights, for tokenizer and headers


@dataclass(frozen=True)
class Exported:
    """A published export.

    record: content of export.json.
    cautions: warnings for the user.
    """

    folder: Path
    record: dict[str, Any]
    cautions: tuple[str, ...]


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
    """Export the model, adapter or run `path` to the folder `out`.

    path: a model, an adapter (which records its base) or a run of either kind; a folder or hub id.
    adapters: adapters to merge into the model `path`, in this order.
    merge: required for `adapters`; without it the adapter is copied unchanged.
    dtype: dtype of the written weights; "stored" is the base's.
    max_shard_size: bytes per file.
    device: where to compute.
    drop_bos_scale: drop a scaled BOS embedding if the format cannot express it.
    threshold: change by rounding to the dtype that is allowed, as a fraction of the largest logit.
    prompts: a file with one prompt per line, for the certificate.
    overwrite: replace an earlier export in `out`.

    Raises InputError if the request is impossible or the dtype changes the model too much; EnvironmentFault for a full
    disk or a merged model that differs from its adapter. In these cases nothing is published.
    """
    require_replaceable(out, overwrite, CERTIFICATE, "export", lambda record: record["outputs"])
    parts = find_export_parts(path, adapters)
    require_mergeable(path, merge=merge, gguf=gguf, adapted=bool(parts.chain))
    durable.require_writable(out)
    if parts.chain and not merge:
        record = copy_adapter(parts, out, overwrite)
        return Exported(out, record, (*parts.cautions, *record["notes"][1:]))
    if gguf and (parts.trained / VALUE_HEAD_FILE).is_file():
        raise InputError(Fault("--gguf", "cannot hold a reward model's value head", "leave it out", code="SF-EXPORT"))
    if gguf:
        require_gguf_package()
    scale = scale_to_bake(parts, drop_bos_scale)
    kind: DType = parts.facts.stored if dtype == "stored" else dtype
    _require_room(out, parts, kind, copies=2 if gguf else 1)
    prompt_set = choose_prompts(
        prompts, parts.trained, parts.template, parts.encoder, parts.bos_id, parts.facts.max_positions
    )
    place = torch.device("cpu" if device == "cpu" else hardware.detect().kind)
    # An export killed between its two renames has left the earlier one under another name.
    durable.restore_replaced(out.absolute().parent)
    with durable.staged_folder(out, replace=overwrite) as staging:
        account = Account()
        model, wanted = merged_model(parts, place, prompt_set, scale, account)
        _stop_as_trained(model, parts)
        rounding = cast_weights(model, TORCH_DTYPE[kind])
        require_cast(rounding, kind)
        digests = tensor_digests(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        save_full(model, staging, max_shard_size)
        # Freed before the written files are loaded, so that the peak stays at one copy of the model.
        del model
        gc.collect()
        copy_tokenizer(parts, staging)
        scores = copy_value_head(parts, staging)
        reloaded = _reload(staging, place, digests)
        found = compare_logits(wanted, logits_of(reloaded, prompt_set.ids))
        require_reloaded(found, kind, threshold)
        account.checks["fp32_and_reloaded"] = check_record(found, reloaded_limit(kind, threshold))
        record = model_record(
            parts,
            kind,
            prompt_set,
            account,
            tensors=len(digests),
            parameters=parameters,
            rounding=rounding,
            dropped=drop_bos_scale,
        )
        cautions = [*parts.cautions, *account.cautions, *record["notes"]]
        if gguf:
            cautions += add_gguf(parts, staging, reloaded, prompt_set, record, out)
        cautions += write_guides(parts, staging, record, name=out.name, modelfile=modelfile and not scores)
        write_certificate(staging, record, input_record(parts))
    return Exported(out, record, tuple(cautions))


def _stop_as_trained(model: PreTrainedModel, parts: ExportParts) -> None:
    """Use the run's generation_config.json, which has the stop tokens of training."""
    if parts.chain and (parts.trained / "generation_config.json").is_file():
        with quiet_libraries():
            model.generation_config = GenerationConfig.from_pretrained(parts.trained)


def _reload(folder: Path, device: torch.device, digests: dict[str, str]) -> PreTrainedModel:
    """Load the export with transformers. Raises EnvironmentFault unless it equals, bit for bit, what was written."""
    with quiet_libraries():
        model = auto_class(model_config(folder)).from_pretrained(folder, local_files_only=True).eval()
    found = tensor_digests(model)
    if different := sorted(name for name in digests.keys() | found.keys() if digests.get(name) != found.get(name)):
        what = f"{len(different)} of {len(digests)} tensors come back otherwise than written, first {different[0]}"
        raise EnvironmentFault(
            Fault("exported model", what, "nothing was published; please report it", code="SF-EXPORT")
        )
    return model.to(device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature


def _require_room(out: Path, parts: ExportParts, dtype: DType, copies: int) -> None:
    """copies: number of copies of the weights; a GGUF file is one."""
    needed = int(model_bytes(parts.facts, dtype) * copies * _SPARE)
    _, free = free_space(out)
    if free < needed:
        what = f"the disk has {size_text(free)} free, and the export needs about {size_text(needed)}"
        raise EnvironmentFault(Fault(str(out), what, "free some space or choose another disk", code="SF-DISK-FULL"))


_OTHER_FILES = ("generation_config.json", BOS_FILE, VALUE_HEAD_FILE, "README.md")


def copy_adapter(parts: ExportParts, out: Path, overwrite: bool) -> dict[str, Any]:
    """Publish the only adapter of `parts` and return the content of export.json. Raises InputError for several."""
    if len(parts.chain) != 1:
        what = "several adapters can only be exported merged"
        raise InputError(Fault("--adapter", what, "give --merge, or export them one by one", code="SF-EXPORT"))
    saved = parts.chain[0]
    notes = ["adapter only; its base model is not part of this folder", *base_notes(parts)]
    with durable.staged_folder(out, replace=overwrite) as staging:
        layouts = _other_layouts(saved)
        if layouts:
            _write_as_peft(saved, staging)
            notes.append(layout_note(saved.folder.resolve().name, layouts))
        for name in (*(() if layouts else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)), *_OTHER_FILES):
            if (saved.folder / name).is_file():
                durable.copy_file(saved.folder / name, staging / name)
        if parts.bos_scale is not None:
            what = f"the first embedding of every sequence must be multiplied by {parts.bos_scale:g}"
            notes.append(f"{what} (see {BOS_FILE}); surefoot does this, PEFT does not")
            if not (staging / BOS_FILE).is_file():  # otherwise the adapter has its own file
                durable.write_json(staging / BOS_FILE, bos_file(parts.bos_scale))
        copy_tokenizer(parts, staging)
        record: dict[str, Any] = {"notes": notes, "checks": {}}
        write_certificate(staging, record, input_record(parts))
    return record


def _other_layouts(saved: SavedAdapter) -> tuple[str, ...]:
    """Return the names of layouts that PEFT does not read; () if it does. PEFT rejects the settings of the first DoRA
    code."""
    of_peft = read_json(saved.folder / ADAPTER_CONFIG).get("peft_type") == "LORA"
    return saved.layouts or (() if of_peft else ("old-dora",))


def _write_as_peft(saved: SavedAdapter, folder: Path) -> None:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.base,
        "revision": saved.revision,
        "inference_mode": True,
        **saved.settings,
    }
    durable.write_json(folder / ADAPTER_CONFIG, dict(sorted(fields.items())))
    write_file(folder / ADAPTER_WEIGHTS, saved.tensors)
    durable.flush(folder / ADAPTER_WEIGHTS)


def model_record(
    parts: ExportParts,
    dtype: DType,
    prompts: PromptSet,
    account: Account,
    *,
    tensors: int,
    parameters: int,
    rounding: float,
    dropped: bool,
) -> dict[str, Any]:
    """Build the content of export.json.

    tensors, parameters: counts of the written model.
    rounding: error of the worst weight, as `cast_weights` returns it.
    dropped: whether the user dropped a scaled BOS embedding.
    """
    return {
        "dtype": dtype,
        "stored_dtype_of_base": parts.facts.stored,
        "tensors": {
            "count": tensors,
            "parameters": parameters,
            "merged_layers": account.merged_layers,
            "trained_in_full": list(account.replaced),
            "added_rows": parts.added_rows,
            "bit_for_bit_after_reloading": tensors,
            "largest_rounding": {"half_units_in_the_last_place": rounding, "limit": CAST_LIMIT},
        },
        "prompts": {"from": prompts.source, "count": len(prompts.ids), "tokens": prompts.tokens},
        "checks": account.checks,
        "notes": list(_notes(parts, account, dropped)),
    }


def layout_note(name: str, layouts: Sequence[str]) -> str:
    return f"the adapter {name} was in another layout ({', '.join(layouts)}) and was read through rules"


def base_notes(parts: ExportParts) -> list[str]:
    """Notes on adapters that were trained over another base. Folder names only, no paths: they may be published."""
    base = public_name(parts.base_name, parts.base_is_hub_id)
    return [other_base_caution(f"the adapter {saved.folder.resolve().name}", base) for saved in parts.elsewhere]


def _notes(parts: ExportParts, account: Account, dropped: bool) -> list[str]:
    notes = base_notes(parts)
    notes += [layout_note(saved.folder.resolve().name, saved.layouts) for saved in parts.chain if saved.layouts]
    if parts.packed:
        notes.append(f"trained over the base in {parts.packed} bits, merged into the base as it was before packing")
    if account.untied:
        notes.append("embedding and output head were tied and differ now, so config.json says that they are two")
    notes += [
        f"the adapter {name} changes these logits by less than rounding may, so the comparison cannot show that it is "
        "merged"
        for name in account.hidden
    ]
    if account.baked is not None:
        notes.append(_baked(parts, account.baked))
    if parts.bos_scale is not None and dropped:
        notes.append(f"the scaling of the BOS embedding ({parts.bos_scale:g}) was dropped, as asked")
    return notes


def _baked(parts: ExportParts, scale: float) -> str:
    """Say which prompts have the factor: those that begin with BOS, which not every tokenizer adds."""
    tokenizer, bos_id = parts.encoder.tokenizer, parts.bos_id
    assert bos_id is not None, "only set when BOS has a row"
    note = (
        f"the embedding's row of BOS is multiplied by {scale:g}: prompts that begin with BOS have the factor without "
        "bos_zero_config.json"
    )
    if parts.tokenizer_writes_bos:
        return f"{note}, and the tokenizer puts BOS before every text"
    chat = ""
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        chat = "the chat template writes it, " if list(ids)[:1] == [bos_id] else "the chat template does not add BOS, "
    return f"{note}; {chat}tokenizer(text) does not: put {tokenizer.convert_ids_to_tokens(bos_id)} before plain text"
