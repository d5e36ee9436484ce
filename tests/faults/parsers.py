"""Every reader with what is given to it: drawn and changed inputs, and what was found once or is known to be hard.

A reader may give anything back, or refuse by one of surefoot's faults (exit 2, 3 or 4); nothing else may come out of
it, and nothing may take long. `read_or_refuse` holds it to that, for one input.
"""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from helpers.other_tools import FILES
from hypothesis import strategies as st

from faults import corpus, readers
from faults.good_files import (
    ADAPTER,
    CARD,
    CELLS,
    CONFIG,
    HEADER,
    LOGGED,
    MANIFEST,
    OWN,
    RECORDS,
    RUN_STATE,
    RUN_YAML,
    TOKENIZER,
    parquet,
)  # fmt: skip
from faults.parser_inputs import (
    DIGITS,
    GROUPS,
    HARD_SCRIPTS,
    HUGE,
    JINJA_LIKE,
    JSON_LIKE,
    NESTED,
    OTHER_COMMANDS,
    OTHER_FILES,
    OVERRIDES,
    REPEATED_TENFOLD,
    SCRIPTS,
    YAML_LIKE,
    damaged,
    damaged_json,
    damaged_text,
)  # fmt: skip
from faults.readers import FAULTS, with_header
from helpers.configs import ANYTHING, mutated_configs

SECONDS = 10  # of the processor, for an input of at most some hundred kilobytes: most take a thousandth of one
WALL = 120  # seconds by the clock: one that waits, for a pipe or a lock, uses no processor


class TooLong(Exception):
    """A reader was busy for longer than SECONDS, or waited for longer than WALL."""


@dataclass(frozen=True)
class Parser:
    """read: takes one input. inputs: drawn ones. changed: real ones changed at random; a pure function of the seed.
    known: those that failed once, or are known to be hard."""

    read: Callable[[Any], object]
    inputs: st.SearchStrategy[Any]
    changed: Callable[[Random], Any]
    known: tuple[Any, ...] = ()


def read_or_refuse(read: Callable[[Any], object], value: Any) -> bool:
    """Whether it was read. Raises whatever comes out that is no fault, and TooLong."""
    with _at_most(SECONDS, WALL), suppress(*FAULTS):
        read(value)
        return True
    return False


@contextmanager
def _at_most(seconds: float, wall: float) -> Iterator[None]:
    """seconds: of processor time: a busy machine makes nothing slow. Raises TooLong also where a reader caught it."""
    late: list[int] = []

    def stop(number: int, frame: object) -> None:
        late.append(number)
        raise TooLong

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGVTALRM, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)
    if late:
        raise TooLong


DATA = st.one_of(
    st.tuples(st.just("d.json"), damaged_json(RECORDS[:2]) | JSON_LIKE),
    *(st.tuples(st.just("d.jsonl"), damaged_json(record)) for record in RECORDS),
    st.tuples(st.just("d.jsonl"), damaged("\n".join(map(json.dumps, RECORDS)).encode())),
    st.tuples(st.sampled_from(["d.csv", "d.tsv", "d.txt"]), damaged(CELLS) | st.binary(max_size=60)),
    st.tuples(st.just("d.parquet"), damaged(parquet())),
    st.tuples(st.just("d.jsonl.gz"), damaged(gzip.compress(b'{"text": "a"}\n' * 3, mtime=0))),
)
HARD_DATA = [
    *(("d.jsonl", content) for content in (b'"\n', b"\n\n", NESTED, HUGE)),
    ("d.parquet", parquet().replace(b"instruction", b"\x80nstruction")),
]
ENV_AS_TEXT = FILES["sft_config.yaml"].partition("\n  SOME")[0].encode() + b" x\n"
MANY_KEYS = "".join(f"key_{number}: {number}\n" for number in range(8_000))
HARD_CONFIGS = (
    MANY_KEYS.encode(),
    b"a: &a [*a]",
    b"? - a\n: b",
    b"a: " + b"[" * 5000,
    f"a: {DIGITS}".encode(),
    b"data:\n  0:\n",
)
AXOLOTL_WITHOUT_MAPPING = (
    b"base_model: m\ndatasets:\n- {path: d.json, type: chat_template, message_property_mappings: [e], roles: [u]}\n"
)
HARD_COMMANDS = (
    ["WORLD_SIZE=²", "trl", "sft"],
    [f"WORLD_SIZE={DIGITS}", "trl", "sft"],
    ["torchrun", "--nproc_per_node", "²", "a.py"],
    ["train_sft.py", "--model", DIGITS],
    ["llamafactory-cli", "train", "a.yaml"],
    ["python", "finetune.py", "--base_model", "m", "--data_path", "d.json", "--output_dir", "o"],
    ["trl", "sft", "--dataset_name", "d.json", "--model_name_or_path", "m"],
)
HARD_CARDS = tuple(
    (f"---\n{header}\n---\n", "")
    for header in ("configs: 5", "a: 2001-99-99", f"a: {DIGITS}", f"a: {'[' * 3000}", *REPEATED_TENFOLD)
)
_LONG = [2] * 40
HARD_HEADERS = tuple(
    json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    for shape in ([*_LONG, [{}], *_LONG], [10**4000] * 50, [-1, -2], [2.0], [True, 2], "2")
)
HARD_MODELS = (
    json.dumps({**corpus.TINY["mistral"], "num_hidden_layers": 2**70}).encode(),
    json.dumps({**corpus.TINY["mistral"], "torch_dtype": [1]}).encode(),
)
HARD_MANIFEST = b'{"schema":2,"step":2,"identity":{},"files":{},"a":Infinity}'

PARSERS: dict[str, Parser] = {
    "configs": Parser(
        readers.config_file,
        st.tuples(damaged(RUN_YAML) | YAML_LIKE, OVERRIDES),
        corpus.config_text,
        (*((text, "") for text in HARD_CONFIGS), (RUN_YAML, f"optim.betas.{DIGITS}=1")),
    ),
    "values of configs": Parser(
        readers.config_tree,
        st.dictionaries(GROUPS, ANYTHING) | mutated_configs(),
        corpus.config_values,
        (
            {"data": {"0": None}},
            {"optim": {"betas": {"0": 1}}},
            {"model": DIGITS},
            {"adapter": {"a.b": 1}},
            {1: 2},
            {"data": {"train": [{"path": "a.json", "epochs": " "}] * 2}},
        ),
    ),
    "data": Parser(
        readers.data_file, DATA, corpus.data, (*HARD_DATA, ("d.json", NESTED), ("d.json.gz", b"\x1f\x8b\x08"))
    ),
    "cards of data sets": Parser(
        readers.data_card,
        st.tuples(st.one_of(damaged_text(card.decode()) for card in CARD), st.sampled_from(["", "en"])),
        corpus.card,
        HARD_CARDS,
    ),
    "templates": Parser(readers.template, JINJA_LIKE, corpus.template),
    "headers of weights": Parser(
        readers.weights_header,
        damaged_json(HEADER).map(with_header) | damaged(with_header(json.dumps(HEADER).encode())),
        corpus.weights_header,
        (with_header(b"[" * 100_000), with_header(HUGE), *map(with_header, HARD_HEADERS)),
    ),
    "files of models": Parser(
        readers.model_config,
        st.tuples(st.just("config.json"), damaged_json(CONFIG)),
        corpus.model_file,
        (("config.json", HUGE), ("config.json", NESTED), *(("config.json", content) for content in HARD_MODELS)),
    ),
    "tokenizers": Parser(readers.tokenizer_files, damaged_json(TOKENIZER), corpus.tokenizer, (HUGE, NESTED)),
    "adapters": Parser(readers.adapter_config, damaged_json(ADAPTER), corpus.adapter, (HUGE, NESTED)),
    "manifests": Parser(readers.manifest, damaged_json(MANIFEST), corpus.manifest, (HUGE, NESTED, HARD_MANIFEST)),
    "run states": Parser(readers.run_state, damaged_json(RUN_STATE), corpus.run_state, (HUGE, NESTED, b"{}", b"[]")),
    "plans": Parser(readers.saved_plan, damaged_json({"plan": {}}), corpus.plan, (HUGE, NESTED)),
    "logs": Parser(readers.run_log, damaged(LOGGED) | JSON_LIKE, corpus.log, (HUGE, NESTED, b"\xff\n")),
    "own records": Parser(
        readers.own_record, st.one_of(damaged_json(one) for one in OWN), corpus.own_record, (HUGE, NESTED)
    ),
    "files of other tools": Parser(
        readers.other_tool,
        OTHER_FILES,
        corpus.tool_file,
        (
            ("a.json", HUGE),
            ("sft_config.yaml", ENV_AS_TEXT),
            ("a.json", NESTED),
            ("a.yaml", f"a: {DIGITS}".encode()),
            ("a.yaml", f"model_name_or_path: m\nstage: sft\n{MANY_KEYS}".encode()),
            ("a.json", json.dumps({f"key_{number}": number for number in range(20_000)}).encode()),
            ("a.json", json.dumps({"stage": "sft", **{f"k{number}": number for number in range(8_000)}}).encode()),
            ("a.json", b'{"model_name_or_path": "m", "stage": "sft", "do_train": true, "lora_rank": 1e308}'),
            ("a.yaml", AXOLOTL_WITHOUT_MAPPING),
        ),
    ),
    "commands of other tools": Parser(
        readers.other_command,
        st.tuples(OTHER_COMMANDS, st.just("")),
        corpus.command,
        tuple((words, beside) for words in HARD_COMMANDS for beside in ("", NESTED.decode())),
    ),
    "scripts": Parser(readers.script, st.one_of(damaged_text(text) for text in SCRIPTS), corpus.script, HARD_SCRIPTS),
}
