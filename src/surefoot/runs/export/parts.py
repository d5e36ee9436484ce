"""What an export is made of: base, adapters in the order of merging, and how the model is asked."""

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
    """The files and facts that an export is made of.

    base_name: as the user or the adapter calls it.
    base_revision: the hub's, where it is known.
    trained: the folder of the last adapter, or of the model.
    with_tokenizer: the folder whose tokenizer goes along.
    bos_id: put before every text; None where none is.
    bos_scale: of the embedding of the first token; None where it is not scaled.
    packed: bits per weight of a quantised base that it was trained over; None: of none.
    elsewhere: adapters that were trained over other weights than the base has.
    cautions: what else is not as a run left it.
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
        """Whether `tokenizer(text)` begins with the BOS that every text of this model has."""
        return self.encoder.tokenizer("a")["input_ids"][:1] == [self.bos_id]

    @property
    def packed(self) -> int | None:
        return PACKED_BITS.get(self.plan.precision.base.value) if self.plan else None

    @property
    def added_rows(self) -> int:
        """Rows of the embedding that the base does not have."""
        return max((saved.rows - self.facts.vocab for saved in self.chain if saved.rows is not None), default=0)

    @property
    def base_is_hub_id(self) -> bool:
        return not looks_local(self.base_name)


def find_export_parts(path: str, adapters: Sequence[str]) -> ExportParts:
    """Find base, adapters, tokenizer and BOS facts of an export.

    path: a model, or an adapter, which records its base.
    adapters: over the model, in this order.

    Raises InputError where something is missing or does not go together.
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
    """The factor with which every command opens these, 1 for none. Raises InputError where they differ."""
    scales = {saved_bos_scale(folder, base, saved_plan(folder)) for folder in folders}
    if len(scales) > 1:
        what = "the adapters were trained with different scalings of the BOS embedding"
        raise InputError(Fault("adapters", what, "merge one of them", code="SF-BOS"))
    return scales.pop()
