"""Groups of keys that several sections share: where examples come from (`SourceConfig`) and what an adapter is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from surefoot.config.types import Count, Flag, OneOrMore, Positive, Section, Share, ShortForm, Text
from surefoot.method_facts.methods import FORMATS


class AdapterShape(Section):
    kind: Annotated[Literal["lora", "dora"], Field(examples=["lora"])]
    """lora: W + scale * B A.  dora: the same, with the norm of each row of W learned separately."""
    rank: Count = 16
    """Rank of A and B."""
    alpha: Positive = 32.0
    """Scale is alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """all-linear (every linear layer but the output head, and every expert), or names such as [q_proj, v_proj] and
    [experts.down_proj]; with a dot at its end, as [decoder.layers.], a name takes every linear layer that lies
    there."""
    experts: Literal["auto"] | Flag = "auto"
    """Adapters on the experts of a mixture. auto: as adapter.targets says, but a run whose all-linear cannot reach them
    is refused. true: in any case. false: they stay frozen."""
    router: Flag = False
    """Adapters on the routers of a mixture too, which all-linear leaves frozen: tokens then go to other experts."""
    rslora: Flag = False
    """Rank-stabilised scale: alpha / sqrt(rank)."""
    modules_to_save: list[Text] = Field(default=[], examples=[["lm_head"]])
    """Modules trained in full and saved with the adapter, such as [lm_head]."""


if TYPE_CHECKING:
    DataFormat = str
else:  # the rows are the one list of names; a type checker wants constants
    DataFormat = Literal[("auto", *FORMATS, "custom")]


class PartConfig(Section):
    of: Annotated[list[Positive], Field(min_length=2, examples=[[2, 4, 4]])]
    """Sizes of the parts, relative to each other."""
    take: Annotated[Count, Field(examples=[1])]
    """Which of them this run uses, from 1."""


class SourceConfig(Section):
    path: Annotated[Text, Field(examples=["data/train.jsonl"])]
    """File (.json, .jsonl, .csv, .parquet), folder of such files, or hub data set such as org/name."""
    format: DataFormat = "auto"
    """Layout of its records; auto recognises it from the first record and says what it saw."""
    columns: dict[Text, Text] = Field(default={}, examples=[{"instruction": "question", "output": "answer"}])
    """Field of the format -> the file's own name for it, such as {instruction: question, output: answer}."""
    name: Annotated[Text | None, Field(examples=["alpaca_en_demo"])] = None
    """Entry of the folder's dataset_info.json."""
    subset: Annotated[Text | None, Field(examples=["main"])] = None
    """Configuration (subset) of a hub data set."""
    split: Annotated[Text | None, Field(examples=["train"])] = None
    """Split of a hub data set, or of a folder, seen from the names of its files. Left out: train; for data.eval
    validation, or else test."""
    revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit of a hub data set."""
    streaming: Flag = False
    """Read a hub data set without storing it; reads max_samples records."""
    max_samples: Annotated[Count | None, Field(examples=[1000])] = None
    """Use only the first N records of this source."""
    share: Annotated[PartConfig | None, Field(examples=[{"of": [2, 4, 4], "take": 1}])] = None
    """Use one part of the records, all of which the seed shuffles once: runs with one seed that take different parts
    share no record, as the three phases of DeepSpeed-Chat do with --data_split 2,4,4."""
    weight: Annotated[Positive | None, Field(examples=[2.0])] = None
    """Share of this source among the examples of an epoch, relative to the other weights."""
    epochs: Annotated[Positive | None, Field(examples=[2.0])] = None
    """How often this source is gone through in one epoch of the mixture; 1 where neither this nor weight is given."""


Sources = Annotated[tuple[Annotated[SourceConfig, ShortForm("path")], ...], Field(min_length=1), OneOrMore()]


def plain_sources(sources: tuple[SourceConfig, ...]) -> Any:
    """As short as they can be written: a path, a group of the keys that are set, or a list of these."""
    plain = [_plain(source) for source in sources]
    return plain[0] if len(plain) == 1 else plain


def _plain(source: SourceConfig) -> Any:
    given = source.model_dump(mode="json", exclude_defaults=True)
    return source.path if given.keys() == {"path"} and source.path != "none" else given
