"""What export.json and the card say of an exported model: counts, comparisons, and notes on what is not obvious."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.methods.provenance import other_base_caution
from surefoot.planning.plan import DType
from surefoot.runs.export.certificate import CAST_LIMIT
from surefoot.runs.export.files import public_name
from surefoot.runs.export.merge import Account
from surefoot.runs.export.parts import ExportParts
from surefoot.runs.export.prompts import PromptSet


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
    """tensors, parameters: counts of the written model. rounding: of the worst weight, as `cast_weights` returns it.
    dropped: whether a scaled BOS embedding was given up, as asked."""
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
    """On adapters that are put over another base. Names of folders, no paths: they may be published."""
    base = public_name(parts.base_name, parts.base_is_hub_id)
    return [other_base_caution(f"the adapter {saved.folder.resolve().name}", base) for saved in parts.elsewhere]


def _notes(parts: ExportParts, account: Account, dropped: bool) -> list[str]:
    notes = base_notes(parts)
    notes += [layout_note(saved.folder.resolve().name, saved.layouts) for saved in parts.chain if saved.layouts]
    if parts.packed:
        notes.append("trained over the base in 4 bits, merged into the base as it was before packing")
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
    """Which prompts carry the factor: those that begin with BOS, and not every tokenizer writes it by itself."""
    tokenizer, bos_id = parts.encoder.tokenizer, parts.bos_id
    assert bos_id is not None, "there was a row to multiply"
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
        chat = "the chat template writes it, " if list(ids)[:1] == [bos_id] else "the chat template does not write it, "
    return f"{note}; {chat}tokenizer(text) does not: put {tokenizer.convert_ids_to_tokens(bos_id)} before plain text"
