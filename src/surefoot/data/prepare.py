"""From data files to what a run trains and evaluates on, with the audit of both.

Read, recognise, lay out, encode, cache, split, prove. A file that was tokenised before in the same way is taken from
the cache, which needs its bytes hashed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from surefoot.data.audit import Audit, SourceFacts, audit_dataset
from surefoot.data.cache import cache_key, open_cache, write_cache
from surefoot.data.dataset import TokenisedDataset
from surefoot.data.encode import TrainOn, encode
from surefoot.data.files import open_file
from surefoot.data.formats import convert, recognise, unused_fields
from surefoot.data.rows import Source, parse_rows
from surefoot.data.segments import Template
from surefoot.data.split import split
from surefoot.data.templates import make_template
from surefoot.data.text_encoder import TextEncoder
from surefoot.errors import Fault, InputError


@dataclass(frozen=True)
class PreparedData:
    """template: what the examples were written with; generation lays its prompts out with it and stops at its
    stop_ids. tokenizer_sha256: of all that decides how text becomes ids."""

    train: TokenisedDataset
    eval: TokenisedDataset | None
    audit: Audit
    eval_audit: Audit | None
    template: Template
    tokenizer_sha256: str


@dataclass(frozen=True)
class _Method:
    """How rows become examples: the same for all files of a run."""

    encoder: TextEncoder
    digest: str
    template: str
    template_asked: bool
    bos_id: int | None
    stop_ids: tuple[int, ...]
    max_length: int
    train_on: TrainOn

    def template_for(self, layout: str) -> Template:
        """A text without turns has no place in a chat template; only a template that was asked for is refused."""
        name = "plain" if layout == "text" and not self.template_asked else self.template
        return make_template(name, self.encoder, self.stop_ids)


def prepare_data(
    train: str | Path,
    evaluation: str | int | float,
    *,
    layout: str,
    template: str,
    template_asked: bool,
    tokenizer: PreTrainedTokenizerBase,
    bos_id: int | None,
    pad_id: int,
    stop_ids: Sequence[int],
    max_length: int,
    max_samples: int | None,
    train_on: TrainOn,
    seed: int,
    cache: Path,
) -> PreparedData:
    """Tokenise (or find in the cache), split and audit.

    evaluation: "none", a file, a number of examples or a share to hold out. layout: auto | alpaca | messages | text.
    template_asked: the user named it. bos_id: None for no BOS. stop_ids: EOS first. max_samples: only the first so
    many records of the training file. cache: a folder. Raises InputError for anything wrong with the data.
    """
    encoder = TextEncoder(tokenizer)
    method = _Method(encoder, encoder.digest(), template, template_asked, bos_id, tuple(stop_ids), max_length, train_on)
    data, facts = _tokenised(open_file(train), layout, method, max_samples, cache)
    made_with = method.template_for(facts.layout)
    held_out, held_out_facts = None, facts
    if isinstance(evaluation, str) and evaluation != "none":
        held_out, held_out_facts = _tokenised(open_file(evaluation), layout, method, None, cache)
    elif not isinstance(evaluation, str):
        kept, taken = split(len(data), evaluation, seed)
        data, held_out = data.subset(kept), data.subset(taken)
        held_out_facts = replace(facts, part=f"{len(taken)} held out by the seed", dropped=(), unused=(), notes=())
        facts = replace(facts, part=f"without {len(taken)} held out for evaluation")

    def audited(dataset: TokenisedDataset, source: SourceFacts, training: TokenisedDataset | None) -> Audit:
        return audit_dataset(
            dataset,
            source,
            encoder,
            bos_id=bos_id,
            pad_id=pad_id,
            stop_ids=method.template_for(source.layout).stop_ids,
            train_on=train_on,
            training=training,
        )

    audit = audited(data, facts, None)
    eval_audit = None if held_out is None else audited(held_out, held_out_facts, data)
    return PreparedData(data, held_out, audit, eval_audit, made_with, method.digest)


def _tokenised(
    source: Source, layout: str, method: _Method, max_samples: int | None, cache: Path
) -> tuple[TokenisedDataset, SourceFacts]:
    asked = make_template(method.template, method.encoder, method.stop_ids)
    key = cache_key(
        {
            "source": source.identity,
            "layout": layout,
            "template": asked.identity,
            "template_asked": method.template_asked,
            "tokenizer": method.digest,
            "bos": method.bos_id,
            "stops": method.stop_ids,
            "max_length": method.max_length,
            "max_samples": max_samples,
            "train_on": method.train_on,
        }
    )
    folder = Path(cache) / "tokenised" / key
    dataset, record = open_cache(folder) or _tokenise(source, layout, method, max_samples, folder)
    return dataset, _facts(source, record)


def _tokenise(
    source: Source, layout: str, method: _Method, max_samples: int | None, folder: Path
) -> tuple[TokenisedDataset, dict[str, Any]]:
    rows = parse_rows(source)
    used = rows[:max_samples]
    layout, reason = recognise(rows, source.name) if layout == "auto" else (layout, "asked for")
    template = method.template_for(layout)
    conversations = convert(used, layout, source.name)
    several = any(sum(turn.role == "assistant" for turn in one.turns) > 1 for one in conversations)
    examples = list(
        encode(
            conversations,
            template,
            method.encoder,
            bos_id=method.bos_id,
            max_length=method.max_length,
            train_on=method.train_on,
            name=source.name,
        )
    )
    kept = [example for example in examples if example.supervised.any()]
    if not kept:
        what = f"no label is left in any of {len(used)} examples: every answer lies beyond {method.max_length} tokens"
        raise InputError(Fault("data.max_length", what, "raise it"))
    record = {
        "layout": layout,
        "layout_reason": reason,
        "template": template.name,
        "rows": len(rows),
        "used": len(used),
        "dropped": [[example.number, example.line] for example in examples if not example.supervised.any()],
        "unused": list(unused_fields(used, layout)),
        "notes": [*template.notes, *(template.dialogue_notes if several else ())],
    }
    return write_cache(folder, kept, record, method.encoder.size)


def _facts(source: Source, record: dict[str, Any]) -> SourceFacts:
    """The file's name is not part of the cache: the same content may lie elsewhere."""
    dropped = cast("list[tuple[int, int]]", [tuple(place) for place in record["dropped"]])
    listed = {name: tuple(record[name]) for name in ("unused", "notes")}
    return SourceFacts(**{**record, **listed, "dropped": tuple(dropped)}, file=source.name, sha256=source.sha256)
