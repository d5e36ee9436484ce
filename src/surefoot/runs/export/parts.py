"""The parts of an export: base, adapters in merge order, tokenizer and template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.data.chat.templates import make_template
from surefoot.data.tokenize.segments import Template, TextEncoder
from surefoot.families.model_facts import ModelFacts
from surefoot.methods.open_model import find_parts, find_tokens, saved_bos_scale, template_name
from surefoot.methods.provenance import changed_files, over_another_base, saved_plan
from surefoot.models.facts import facts_of
from surefoot.models.folder import check_folder
from surefoot.models.load import load_tokenizer
from surefoot.models.saved_adapter import SavedAdapter
from surefoot.planning.plan import PACKED_BITS, RunPlan, TokenizerPlan
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import looks_local


@dataclass(frozen=True)
class ExportParts:
    """Files and facts of an export.

    base_name: the base's name as given by the user or the adapter.
    base_revision: hub revision, if known.
    trained: folder of the last adapter, or of the model.
    with_tokenizer: folder whose tokenizer is exported.
    bos_id: BOS id put before every text; None for none.
    bos_scale: factor of the first token's embedding; None if it is not scaled.
    packed: bits per weight of the quantized base it was trained over; None if it was not quantized.
    elsewhere: adapters that were trained over other weights than the base's.
    cautions: warnings about files that were changed after the run.
    """

    base: Path
    base_name: str
    base_revision: str | None
    chain: tuple[SavedAdapter, ...]
    trained: Path
    plan: RunPlan | None
    facts: ModelFacts
    tokens: TokenizerPlan
    with_tokenizer: Path
    encoder: TextEncoder
    template: Template
    bos_scale: float | None
    elsewhere: tuple[SavedAdapter, ...]
    cautions: tuple[str, ...]

    @property
    def bos_id(self) -> int | None:
        return self.tokens.bos_id if self.tokens.bos.value else None

    @property
    def tokenizer_writes_bos(self) -> bool:
        """Whether `tokenizer(text)` adds the BOS that this model expects."""
        return self.encoder.tokenizer("a")["input_ids"][:1] == [self.bos_id]

    @property
    def packed(self) -> int | None:
        return PACKED_BITS.get(self.plan.precision.base.value) if self.plan else None

    @property
    def added_rows(self) -> int:
        """Embedding rows that the base does not have."""
        return max((saved.rows - self.facts.vocab for saved in self.chain if saved.rows is not None), default=0)

    @property
    def base_is_hub_id(self) -> bool:
        return not looks_local(self.base_name)


def find_export_parts(path: str, adapters: Sequence[str]) -> ExportParts:
    """Find base, adapters, tokenizer and BOS facts of an export.

    path: a model, or an adapter, which records its base.
    adapters: adapters over the model, in this order.

    Raises InputError if something is missing or does not fit together.
    """
    base, first = find_parts(path, adapters[0] if adapters else None)
    check_folder(base)
    chain = [first] if first else []
    for name in adapters[1:]:
        saved = find_parts(path, name)[1]
        assert saved is not None, "an adapter that is asked for is read"
        chain.append(saved)
    written = [saved.folder for saved in chain] or [base]
    trained = written[-1]
    plan = saved_plan(trained)
    scale = _one_scale(written, base)
    facts = replace(facts_of(base), bos_scale=scale)
    with_tokenizer, tokens = find_tokens(path, trained, base, facts, plan)
    encoder = TextEncoder(load_tokenizer(with_tokenizer))
    own_base = bool(first) and not adapters
    return ExportParts(
        base=base,
        base_name=first.base if first and own_base else path,
        base_revision=first.revision if first and own_base else None,
        chain=tuple(chain),
        trained=trained,
        plan=plan,
        facts=facts,
        tokens=tokens,
        with_tokenizer=with_tokenizer,
        encoder=encoder,
        template=make_template(template_name(tokens), encoder, tokens.stop.value),
        bos_scale=None if scale == 1 else scale,
        elsewhere=tuple(saved for saved in chain if over_another_base(saved.folder, base)),
        cautions=tuple(one for folder in written for one in changed_files(folder)),
    )


def _one_scale(folders: Sequence[Path], base: Path) -> float:
    """Return the common BOS factor of these folders, 1 for none. Raises InputError if they differ."""
    scales = {saved_bos_scale(folder, base, saved_plan(folder)) for folder in folders}
    if len(scales) > 1:
        what = "the adapters were trained with different scalings of the BOS embedding"
        raise InputError(Fault("adapters", what, "merge one of them", code="SF-BOS"))
    return scales.pop()
