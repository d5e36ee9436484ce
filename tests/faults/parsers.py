"""Everything that reads what somebody else wrote: what is given to it, and what was found once or is known to be hard.

A reader may give anything back, or refuse by one of surefoot's faults (exit 2, 3 or 4); nothing else may come out of
it, and nothing may take long. `read_or_refuse` holds it to that, for one input.
"""

from __future__ import annotations

import gzip
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from configs import ANYTHING, mutated_configs
from documented_tools import FILES
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
    SCRIPTS,
    YAML_LIKE,
    damaged,
    damaged_json,
    damaged_text,
    parquet,
    with_header,
)  # fmt: skip
from surefoot.config.load import check_values, load_config
from surefoot.convert.safetensors_file import read_header
from surefoot.data import chat_jinja
from surefoot.data.chat_jinja import TemplateFault
from surefoot.data.files import parse_bytes
from surefoot.data.formats import Turn
from surefoot.data.formats.layouts import LAYOUTS, convert, recognise
from surefoot.data.rows import Source, parse_rows
from surefoot.dialects.launch import Options, no_files
from surefoot.dialects.tools import translate_command, translate_file
from surefoot.errors import EnvironmentFault, InputError, IntegrityError
from surefoot.families.files import read_json
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.report import journal
from surefoot.training.checkpoint import STATE, Checkpoint, read_state
from surefoot.training.manifest import read_manifest
from surefoot.training.scaling import LossScale
from surefoot.training.state import Best, RunState

SECONDS = 10  # of the processor, for an input of at most some hundred kilobytes: most take a thousandth of one
FAULTS = (InputError, EnvironmentFault, IntegrityError)


class TooLong(Exception):
    """A reader was busy for longer than SECONDS."""


@dataclass(frozen=True)
class Parser:
    """read: takes one input. inputs: drawn ones. known: those that failed once, or are known to be hard."""

    read: Callable[[Any], object]
    inputs: st.SearchStrategy[Any]
    known: tuple[Any, ...] = ()


def read_or_refuse(read: Callable[[Any], object], value: Any) -> None:
    """Raises whatever comes out that is no fault, and TooLong."""
    with _at_most(SECONDS), suppress(*FAULTS):
        read(value)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Of processor time: a busy machine makes nothing slow. Raises TooLong also where a reader caught it."""
    late: list[int] = []

    def stop(number: int, frame: object) -> None:
        late.append(number)
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if late:
        raise TooLong


def config_file(given: tuple[bytes, str]) -> None:
    content, override = given
    load_config(_written("run.yaml", content), [override] if override else [])


def config_tree(tree: Mapping[str, Any]) -> None:
    check_values({"stage": "sft", "model": "m", "data": {"train": "d.json"}, "output": "o", **tree})


def data_file(given: tuple[str, bytes]) -> None:
    name, content = given
    kind = f".{name.removesuffix('.gz').rpartition('.')[2]}"
    rows = parse_rows(Source(name, kind, "", lambda: parse_bytes(name, kind, content)))
    convert(rows, recognise(rows, name, among=tuple(LAYOUTS))[0], name)


def template(source: str) -> None:
    turns = [Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b")]
    with suppress(TemplateFault):  # whoever reads the data makes a fault of it, with the row
        chat_jinja.render(source, turns, {"bos_token": "<s>"}, generation_prompt=True)


def weights_header(content: bytes) -> None:
    read_header(_written("model.safetensors", content))


def model_config(content: bytes) -> None:
    read_json(_written("config.json", content))


def tokenizer_files(content: bytes) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        path = _written(f"tokenizer/{name}", content)
    read_tokenizer_facts(path.parent)


def manifest(content: bytes) -> None:
    read_manifest(_written("MANIFEST.json", content).parent)


def run_state(content: bytes) -> None:
    read_state(Checkpoint(_written(f"checkpoint/{STATE}", content).parent, 2))


def run_log(content: bytes) -> None:
    journal.read(_written("events.jsonl", content), "step")
    journal.salvage(_written("events.jsonl", content))


def other_tool(given: tuple[str, bytes]) -> None:
    name, content = given
    translate_file(name, content.decode("utf-8", "replace"), (), Options())


def other_command(words: list[str]) -> None:
    def read(path: str) -> str:
        return FILES[path] if path in FILES else no_files(path)

    translate_command(words, Options(read=read))


def script(text: str) -> None:
    def read(path: str) -> str:
        return text if path == "s.py" else no_files(path)

    translate_command(["python", "s.py"], Options(read=read))


@lru_cache
def _here() -> Path:
    return Path(tempfile.mkdtemp(prefix="parsers"))


def _written(name: str, content: bytes) -> Path:
    path = _here() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


RUN_YAML = b"""\
stage: sft
model: m
adapter: {kind: lora, rank: 8, targets: [q_proj]}
data:
  train:
    - path: d.json
      weight: 2
  eval: 0.1
batch: {size: 8, micro: auto}
optim:
  lr: 1e-4  # as ever
  betas: [0.9, 0.95]
duration: 3 epochs
output: o
"""
RECORDS = [
    {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}],
        "tools": [],
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "p", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
    {"text": "a"},
]
CELLS = b'instruction,output,label\n"a, b","c ""d""",1\ne,f,\n'
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
HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_scaling": {"factor": 2.0}, "eos_token_id": [1, 2]}
TOKENIZER = {
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
    "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
    "added_tokens_decoder": {"1": {"content": "<s>"}},
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    "post_processor": {"type": "TemplateProcessing", "single": []},
    "eos_token_id": 2,
    "vocab_size": 3,
    "chat_template": "{{ a }}",
}
MANIFEST = {"schema": 1, "step": 2, "identity": {}, "files": {"a": {"size": 1, "sha256": "0"}}}
RUN_STATE = json.loads(json.dumps(RunState(step=2, norms=(1.0,), best=Best(2, 1.5), scale=LossScale(8.0)).to_json()))
LOGGED = b'{"kind": "step", "step": 1, "loss": 1.5}\n{"kind": "eval", "step": 1}\n'
ENV_AS_TEXT = FILES["sft_config.yaml"].partition("\n  SOME")[0].encode() + b" x\n"
HARD_CONFIGS = (b"a: &a [*a]", b"? - a\n: b", b"a: " + b"[" * 5000, f"a: {DIGITS}".encode(), b"data:\n  0:\n")
HARD_COMMANDS = (
    ["WORLD_SIZE=²", "trl", "sft"],
    [f"WORLD_SIZE={DIGITS}", "trl", "sft"],
    ["torchrun", "--nproc_per_node", "²", "a.py"],
    ["train_sft.py", "--model", DIGITS],
)

PARSERS: dict[str, Parser] = {
    "configs": Parser(
        config_file,
        st.tuples(damaged(RUN_YAML) | YAML_LIKE, OVERRIDES),
        (*((text, "") for text in HARD_CONFIGS), (RUN_YAML, f"optim.betas.{DIGITS}=1")),
    ),
    "values of configs": Parser(
        config_tree,
        st.dictionaries(GROUPS, ANYTHING) | mutated_configs(),
        ({"data": {"0": None}}, {"optim": {"betas": {"0": 1}}}, {"model": DIGITS}),
    ),
    "data": Parser(data_file, DATA, (*HARD_DATA, ("d.json", NESTED), ("d.json.gz", b"\x1f\x8b\x08"))),
    "templates": Parser(template, JINJA_LIKE),
    "headers of weights": Parser(
        weights_header,
        damaged_json(HEADER).map(with_header) | damaged(with_header(json.dumps(HEADER).encode())),
        (with_header(b"[" * 100_000), with_header(HUGE)),
    ),
    "configs of models": Parser(model_config, damaged_json(CONFIG), (HUGE, NESTED)),
    "tokenizers": Parser(tokenizer_files, damaged_json(TOKENIZER), (HUGE, NESTED)),
    "manifests": Parser(manifest, damaged_json(MANIFEST), (HUGE, NESTED)),
    "run states": Parser(run_state, damaged_json(RUN_STATE), (HUGE, NESTED, b"{}", b"[]")),
    "logs": Parser(run_log, damaged(LOGGED) | JSON_LIKE, (HUGE, NESTED, b"\xff\n")),
    "files of other tools": Parser(
        other_tool,
        OTHER_FILES,
        (("a.json", HUGE), ("sft_config.yaml", ENV_AS_TEXT), ("a.json", NESTED), ("a.yaml", f"a: {DIGITS}".encode())),
    ),
    "commands of other tools": Parser(other_command, OTHER_COMMANDS, HARD_COMMANDS),
    "scripts": Parser(script, st.one_of(damaged_text(text) for text in SCRIPTS), HARD_SCRIPTS),
}
