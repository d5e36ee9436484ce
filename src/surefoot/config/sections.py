"""Config sections of tokens, data and processes, and the shape of every adapter (`AdapterShape`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_serializer

from surefoot.config.types import Count, Flag, Number, OneOrMore, Positive, Section, Share, ShortForm, Switch, Text
from surefoot.method_facts.methods import FORMATS

PATTERN = "re:"  # before a regular expression in adapter.targets


class TokenizerConfig(Section):
    pad: Text = "auto"
    """auto: the first of the tokenizer's own pad, a reserved token, a spare embedding row and EOS (masked by position).
    add: append <|pad|> and an embedding row. Anything else names an existing token."""
    bos: Annotated[Text | None, Field(examples=["<s>"])] = None
    """The tokenizer's own BOS, which is checked: with another one the run is refused. null: whichever it is."""
    eos: Annotated[Text | None, Field(examples=["</s>"])] = None
    """The tokenizer's own EOS, checked in the same way; or a token of add_special, which becomes EOS."""
    unk: Annotated[Text | None, Field(examples=["<unk>"])] = None
    """The tokenizer's own token for unknown text, checked in the same way."""
    add: list[Text] = Field(default=[], examples=[["<think>", "</think>"]])
    """Tokens to append to the vocabulary: wherever a text spells one, it gets the one id. Embedding and head grow by
    the rows that they lack, drawn like the existing ones; under an adapter both train in full unless
    adapter.modules_to_save names one of them."""
    add_special: list[Text] = Field(default=[], examples=[["<|im_start|>", "<|im_end|>"]])
    """The same for control tokens, which templates write, and which in the data's texts stay text."""


class AdapterShape(Section):
    kind: Annotated[Literal["lora", "dora"], Field(examples=["lora"])]
    """lora: W + scale * B A.  dora: the same, with the norm of each row of W trained separately."""
    rank: Count = 16
    """Rank of A and B."""
    alpha: Positive = 32.0
    """Scale is alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """all-linear (every linear layer except the output head, and every expert), or names such as [q_proj, v_proj] and
    [experts.down_proj]. A name with a trailing dot, such as [decoder.layers.], selects every linear layer below it;
    "re:PATTERN" those whose whole name matches a regular expression, as a string does in PEFT."""
    experts: Literal["auto"] | Flag = "auto"
    """Adapters on the experts of a mixture-of-experts model. auto: as adapter.targets selects; a run is refused if
    all-linear cannot reach them. true: always. false: experts stay frozen."""
    router: Flag = False
    """Also put adapters on the routers, which all-linear leaves frozen; this changes which experts tokens go to."""
    rslora: Flag = False
    """Rank-stabilized scale: alpha / sqrt(rank)."""
    modules_to_save: Literal["rest"] | list[Text] = Field(default=[], examples=[["lm_head"]])
    """Modules trained in full and saved with the adapter, such as [lm_head]. rest: all without an adapter (embeddings,
    norms, head, linear layers that targets leaves out)."""


if TYPE_CHECKING:
    DataFormat = str
else:  # the rows are the only list of names, but a type checker needs constants
    DataFormat = Literal[("auto", *FORMATS, "custom")]


class PartRate(Section):
    of: Annotated[Text, Field(examples=["lora_B"])]
    """Regular expression that occurs in the names of its parameters. lora_B with a higher rate is LoRA+; embed_tokens
    and lm_head are the embeddings."""
    lr: Annotated[Positive, Field(examples=[3.2e-3])]
    """Peak learning rate."""


class PartConfig(Section):
    of: Annotated[list[Positive], Field(min_length=2, examples=[[2, 4, 4]])]
    """Relative sizes of the parts."""
    take: Annotated[Count, Field(examples=[1])]
    """Part that this run uses, counted from 1."""
    in_order: Flag = False
    """Divide the records in the order of the files, without shuffling: {of: [95, 5], take: 1} is train[:95%]."""


class SourceConfig(Section):
    path: Annotated[Text, Field(examples=["data/train.jsonl"])]
    """File (.json, .jsonl, .csv, .parquet), folder of such files, or hub dataset such as org/name."""
    format: DataFormat = "auto"
    """Format of its records; auto: detect it from the first record and report the result."""
    columns: dict[Text, Text] = Field(default={}, examples=[{"instruction": "question", "output": "answer"}])
    """Field of the format -> column of the file, such as {instruction: question, output: answer}."""
    constant: dict[Text, Text] = Field(default={}, examples=[{"instruction": "Describe it."}])
    """Field of the format -> a text that stands in every record, such as the question about each picture."""
    compose: dict[Text, Text] = Field(default={}, examples=[{"prompt": "Q: {{question}} A:"}])
    """Field of the format -> a text with the record's own columns in it, as {{COLUMN}}, {{COLUMN.KEY}} or
    {{COLUMN.0}}. It replaces a field of the same name; columns in it are not read otherwise."""
    system: Annotated[Text | None, Field(examples=["You are a helpful assistant."])] = None
    """System message of the conversations that have none. Send it to the trained model too."""
    drop_system: Flag = False
    """Leave out the system messages that the records have; with `system`, that one stands in their place."""
    fill: dict[Text, Text] = Field(default={}, examples=[{"name": "Ada", "author": "Example Lab"}])
    """NAME of a placeholder {{NAME}} in the texts -> the text in its place."""
    name: Annotated[Text | None, Field(examples=["alpaca_en_demo"])] = None
    """Entry of the folder's dataset_info.json."""
    subset: Annotated[Text | None, Field(examples=["main"])] = None
    """Configuration (subset) of a hub dataset."""
    split: Annotated[Text | None, Field(examples=["train"])] = None
    """Split of a hub dataset, or of a folder, recognized by its file names. Default: train; for data.eval validation,
    else test."""
    revision: Annotated[Text | None, Field(examples=["main"])] = None
    """Branch, tag or commit of a hub dataset."""
    streaming: Flag = False
    """Read max_samples records of a hub dataset without storing it."""
    max_samples: Annotated[Count | None, Field(examples=[1000])] = None
    """Use only the first N records of this source."""
    share: Annotated[PartConfig | None, Field(examples=[{"of": [2, 4, 4], "take": 1}])] = None
    """Use one part of the records after they are shuffled once with the seed. Runs with the same seed and different
    parts share no record, like the three phases of DeepSpeed-Chat with --data_split 2,4,4."""
    weight: Annotated[Positive | None, Field(examples=[2.0])] = None
    """Relative weight of this source among the examples of an epoch."""
    epochs: Annotated[Positive | None, Field(examples=[2.0])] = None
    """Passes over this source in one epoch of the mixture; 1 if neither this nor weight is given."""


Sources = Annotated[tuple[Annotated[SourceConfig, ShortForm("path")], ...], Field(min_length=1), OneOrMore()]


class DataConfig(Section):
    train: Annotated[Sources, Field(examples=["data/train.jsonl"])]
    """Training examples: a file (.json, .jsonl, .csv, .tsv, .parquet, .txt), a folder, a hub dataset, or a list of
    sources, each a path or {path: …, format: …, columns: …, weight: …}."""
    eval: Annotated[
        Literal["none"] | Sources | Count | Annotated[float, Field(gt=0, lt=1), Number], Field(examples=[0.05])
    ] = "none"
    """none; a source as in train; or a fraction (0 to 1) or number of training records to hold out, chosen by the
    seed."""
    format: DataFormat = "auto"
    """Record format of every source that sets none. auto: detect it and report the result. custom: a Python caller
    passes the function that reads a record."""
    template: Text = "auto"
    """auto: the tokenizer's chat template, else alpaca, or vicuna for dialogues. Or tokenizer, llama3, llama2, phi3,
    qwen, qwen3, mistral, gemma, deepseek, chatml, alpaca, vicuna, human-assistant, zephyr, plain, raw, commonsense,
    commonsense-eval, commonsense-sentence, a .jinja file, or a text in Jinja. by-record: chosen by the first record:
    raw for texts (human-assistant for pairs of such dialogues), tokenizer for conversations. tokenizer-or-chatml:
    chatml if the tokenizer has no template."""
    template_arguments: dict[Text, bool | int | Annotated[float, Field(allow_inf_nan=False)] | Text] = Field(
        default={}, examples=[{"enable_thinking": False}]
    )
    """Values of variables that the tokenizer's template or a .jinja file reads, such as {enable_thinking: false}; the
    published template has them too."""
    max_length: Annotated[Literal["auto", "model"] | Annotated[int, Field(ge=8), Number], Field(examples=[2048])] = (
        "auto"
    )
    """Maximum tokens per example. Longer examples lose prompt tokens first, down to a quarter of this length, then the
    end of the answer. auto: 2048, or the model's maximum if it is smaller. model: the model's maximum."""
    min_length: Count = 1
    """Leave out training examples with fewer tokens than this; of a pair, if either answer's row has fewer."""
    order: Literal["shuffled", "file"] = "shuffled"
    """shuffled: every epoch in an order of its own, by the seed. file: as in the files, one source after the other,
    such as a curriculum from easy to hard; with batch.row_tokens rows are filled in this order too."""
    unique: Flag = False
    """Leave out training examples whose tokens and labels equal those of an earlier one, before any are held out."""
    max_samples: Annotated[Count | None, Field(examples=[1000])] = None
    """Use only the first N records of every training source without its own max_samples."""
    train_on: Literal["responses", "last", "completion", "everything", "by-record"] = "responses"
    """Which tokens carry loss: all answers, the last answer, everything after the first prompt, or all tokens.
    by-record: completion if the first record has a prompt, else everything."""
    encoding: Literal["parts", "whole"] = "parts"
    """parts: prompt and answer are tokenized separately, as in generation. whole: they are tokenized as one text and
    truncated at the end, as in TRL."""
    packing: Switch = "auto"
    """Stages sft and pretrain: pass the examples of a micro-batch through the model as one row without padding, none
    attending to another. auto: if an attention implementation passes the accuracy check and it saves time on this
    machine. off: padded rows of similar lengths. The examples of a step are the same in both cases."""
    max_pixels: Annotated[Count | None, Field(examples=[262144])] = None
    """Maximum pixels per image; larger images are scaled down and take fewer tokens. null: as the model's processor is
    configured."""
    workers: Annotated[int, Field(ge=0), Number] = 0
    """Threads that prepare batches ahead; 0 prepares each batch when its step starts. Does not affect results."""

    @field_serializer("train", "eval", when_used="json")
    def _short(self, value: Any) -> Any:
        return plain_sources(value) if isinstance(value, tuple) else value


def plain_sources(sources: tuple[SourceConfig, ...]) -> Any:
    """Return sources in their shortest form: a path, a mapping of the keys that are set, or a list of these."""
    plain = [_plain(source) for source in sources]
    return plain[0] if len(plain) == 1 else plain


def _plain(source: SourceConfig) -> Any:
    given = source.model_dump(mode="json", exclude_defaults=True)
    return source.path if given.keys() == {"path"} and source.path != "none" else given


class ParallelConfig(Section):
    engine: Literal["auto", "single", "ddp", "fsdp2", "deepspeed"] = "auto"
    """How several processes share the work. ddp: each has the whole model. fsdp2, deepspeed: weights, gradients and
    optimizer state are sharded. auto: single for one process; for several, the first of ddp and fsdp2 that fits."""
    nproc: Annotated[Count | None, Field(examples=[2])] = None
    """Processes to start on this machine; null: those of the launcher (torchrun, accelerate, deepspeed), or 1."""
    machines: Count = 1
    """Machines on which the same command starts nproc processes each. NODE_RANK says which one this is, from 0, and
    MASTER_ADDR and MASTER_PORT (29500) where machine 0 listens."""
    zero_stage: Annotated[int, Field(ge=1, le=3), Number] = 2
    """deepspeed only: what is sharded. 1: optimizer state. 2: also gradients. 3: also weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in host memory. optimizer (one process, deepspeed): fp32 weights, gradients and optimizer state, and
    the CPU takes the step. all (fsdp2, ZeRO 3): sharded weights too."""
    check_every: Count = 100
    """ddp: compare the ranks' weights by hash every N steps."""
    timeout: Positive = 1800.0
    """Seconds that a rank waits for the others before it gives up; a dead or stopped rank is detected within a
    minute."""
