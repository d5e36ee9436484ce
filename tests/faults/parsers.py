"""Every reader with what is given to it: real inputs changed at random, and what was found once or is known to be hard.

A reader may give anything back, or refuse by one of surefoot's faults (exit 2, 3 or 4); nothing else may come out of
it, and nothing may take long. `read_or_refuse` holds it to that, for one input.
"""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from faults import corpus, readers
from faults.good_files import (
    RUN_YAML,
    parquet,
)  # fmt: skip
from faults.parser_inputs import (
    DIGITS,
    HARD_SCRIPTS,
    HUGE,
    NESTED,
    REPEATED_TENFOLD,
)  # fmt: skip
from faults.readers import FAULTS, with_header
from interop.documented import FILES

SECONDS = 10  # of the processor, for an input of at most some hundred kilobytes: most take a thousandth of one
WALL = 120  # seconds by the clock: one that waits, for a pipe or a lock, uses no processor


class TooLong(Exception):
    """A reader was busy for longer than SECONDS, or waited for longer than WALL."""


@dataclass(frozen=True)
class Parser:
    """read: takes one input.

    changed: a real one changed at random; a pure function of the seed.
    known: those that failed once, or are known to be hard.
    """

    read: Callable[[Any], object]
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
        corpus.config_text,
        (*((text, "") for text in HARD_CONFIGS), (RUN_YAML, f"optim.betas.{DIGITS}=1")),
    ),
    "values of configs": Parser(
        readers.config_tree,
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
    "data": Parser(readers.data_file, corpus.data, (*HARD_DATA, ("d.json", NESTED), ("d.json.gz", b"\x1f\x8b\x08"))),
    "cards of data sets": Parser(
        readers.data_card,
        corpus.card,
        HARD_CARDS,
    ),
    "templates": Parser(readers.template, corpus.template),
    "headers of weights": Parser(
        readers.weights_header,
        corpus.weights_header,
        (with_header(b"[" * 100_000), with_header(HUGE), *map(with_header, HARD_HEADERS)),
    ),
    "files of models": Parser(
        readers.model_config,
        corpus.model_file,
        (("config.json", HUGE), ("config.json", NESTED), *(("config.json", content) for content in HARD_MODELS)),
    ),
    "tokenizers": Parser(readers.tokenizer_files, corpus.tokenizer, (HUGE, NESTED)),
    "adapters": Parser(readers.adapter_config, corpus.adapter, (HUGE, NESTED)),
    "manifests": Parser(readers.manifest, corpus.manifest, (HUGE, NESTED, HARD_MANIFEST)),
    "run states": Parser(readers.run_state, corpus.run_state, (HUGE, NESTED, b"{}", b"[]")),
    "plans": Parser(readers.saved_plan, corpus.plan, (HUGE, NESTED)),
    "logs": Parser(readers.run_log, corpus.log, (HUGE, NESTED, b"\xff\n")),
    "own records": Parser(readers.own_record, corpus.own_record, (HUGE, NESTED)),
    "files of other tools": Parser(
        readers.other_tool,
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
        corpus.command,
        tuple((words, beside) for words in HARD_COMMANDS for beside in ("", NESTED.decode())),
    ),
    "scripts": Parser(readers.script, corpus.script, HARD_SCRIPTS),
}
