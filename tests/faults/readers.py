"""Everything that reads what somebody else wrote, as functions of what stands in the file.

Files lie in memory where the machine has a place for that: millions are written.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from helpers.converted_records import convert
from interop.documented import FILES
from surefoot.commands.tune.attempt import Journal
from surefoot.config.load import check_config, load_config
from surefoot.data.chat import render as chat_jinja
from surefoot.data.chat.render import TemplateFault
from surefoot.data.formats import Turn
from surefoot.data.formats.registry import LAYOUTS, recognize
from surefoot.data.sources.hub_files import choose_files
from surefoot.data.sources.records import Source, parse_bytes, parse_rows
from surefoot.data.tokenize.cache import open_cache
from surefoot.families.files import read_json
from surefoot.families.model_facts import read_model_facts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.interop.launch import Options, no_files
from surefoot.interop.registry import translate_command, translate_file
from surefoot.models.convert.safetensors_file import read_header
from surefoot.models.folder import read_config, weight_files
from surefoot.models.saved_adapter import read_adapter
from surefoot.planning.plan import plan_from_json
from surefoot.planning.probes.kept import Kept
from surefoot.report import journal
from surefoot.runs.rollback import RECORD, read_rollbacks
from surefoot.system.errors import EnvironmentFault, InputError, IntegrityError
from surefoot.system.folders import require_same_request
from surefoot.training.checkpoint import STATE, Checkpoint, read_state
from surefoot.training.manifest import read_manifest

FAULTS = (InputError, EnvironmentFault, IntegrityError)
_MEMORY = Path("/dev/shm")
_SETTINGS = (".json", ".jsonl", ".yaml", ".yml")
_REPOSITORY = ("README.md", "data/train-00000-of-00001.parquet", "en/test.jsonl", "en/train.jsonl", "train.csv")


def config_file(given: tuple[bytes, str]) -> None:
    content, override = given
    load_config(_written("run.yaml", content), [override] if override else [])


def config_tree(tree: Mapping[str, Any]) -> None:
    check_config({"stage": "sft", "model": "m", "data": {"train": "d.json"}, "output": "o", **tree}, files=False)


def data_file(given: tuple[str, bytes]) -> None:
    name, content = given
    kind = f".{name.removesuffix('.gz').rpartition('.')[2]}"
    rows = parse_rows(Source(name, kind, "", lambda: parse_bytes(name, kind, content)))
    convert(rows, recognize(rows[0], name, among=tuple(LAYOUTS))[0], name)


def data_card(given: tuple[str, str]) -> None:
    readme, subset = given
    choose_files("org/data", _REPOSITORY, readme, subset or None, ("train", "test"))


def template(source: str) -> None:
    turns = [Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b")]
    with suppress(TemplateFault):  # whoever reads the data makes a fault of it, with the row
        chat_jinja.render(source, turns, {"bos_token": "<s>"}, generation_prompt=True)


def weights_header(content: bytes) -> None:
    read_header(_written("model.safetensors", content))


def model_config(given: tuple[str, bytes]) -> None:
    """One file of a model's folder, beside others that are good."""
    name, content = given
    model = _written("model/config.json", b'{"model_type": "llama"}').parent
    for other in ("bos_zero_config.json", "model.safetensors.index.json"):
        (model / other).unlink(missing_ok=True)
    path = _written(f"model/{name}", content)
    _each(
        lambda: read_json(path), lambda: read_config(model), lambda: read_model_facts(model),
        lambda: weight_files(model),
    )  # fmt: skip


def tokenizer_files(content: bytes) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        path = _written(f"tokenizer/{name}", content)
    read_tokenizer_facts(path.parent)


def adapter_config(content: bytes) -> None:
    if not (folder() / "adapter/adapter_model.safetensors").is_file():
        _written("adapter/adapter_model.safetensors", ADAPTER_WEIGHTS)
    read_adapter(_written("adapter/adapter_config.json", content).parent)


def manifest(content: bytes) -> None:
    read_manifest(_written("MANIFEST.json", content).parent)


def run_state(content: bytes) -> None:
    read_state(Checkpoint(_written(f"checkpoint/{STATE}", content).parent, 2))


def saved_plan(content: bytes) -> None:
    plan_from_json(read_json(_written("plan.json", content)).get("plan"))


def run_log(content: bytes) -> None:
    journal.read(_written("events.jsonl", content), "step")
    journal.salvage(_written("events.jsonl", content))


def own_record(content: bytes) -> None:
    """What surefoot keeps for itself: caches, a search's journal, findings, the record of rollbacks."""
    kept = _written("kept/meta.json", content).parent
    _answer_file().write_bytes(content)
    _each(
        _answer, lambda: open_cache(kept, "a"), lambda: Journal(kept / "meta.json", {}),
        lambda: require_same_request(kept / "meta.json", {"a": 1}, overwrite=False),
        lambda: read_rollbacks(_written(f"kept/{RECORD}", content).parent),
    )  # fmt: skip


def other_tool(given: tuple[str, bytes]) -> None:
    name, content = given
    translate_file(name, content.decode("utf-8", "replace"), (), Options())


def other_command(given: tuple[Sequence[str], str]) -> None:
    """beside: what stands in every file that the words lead to; "" where there is none."""
    words, beside = given

    def read(path: str) -> str:
        if path in FILES:
            return FILES[path]
        return beside if beside and path.endswith(_SETTINGS) else no_files(path)

    translate_command(words, Options(read=read))


def script(text: str) -> None:
    def read(path: str) -> str:
        return text if path == "s.py" else no_files(path)

    translate_command(["python", "s.py"], Options(read=read))


def with_header(header: bytes, size: int = 8) -> bytes:
    """A safetensors file of so many bytes under this header."""
    return len(header).to_bytes(8, "little") + header + bytes(size)


_PLACE = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER_WEIGHTS = with_header(
    f'{{"{_PLACE}.lora_A.weight": {{"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}, '
    f'"{_PLACE}.lora_B.weight": {{"dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16]}}}}'.encode(),
    16,
)


def _each(*calls: Callable[[], object]) -> None:
    """One that refuses does not spare the others the input."""
    for call in calls:
        with suppress(*FAULTS):
            call()


def _answer() -> dict[str, float]:
    return Kept(folder() / "answers", {}).get("a", {"b": 1}, dict[str, float], lambda: {"c": 1.5})


@lru_cache
def _answer_file() -> Path:
    _answer()
    return next((folder() / "answers").glob("*.json"))


@lru_cache
def _memory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="readers", dir=_MEMORY if _MEMORY.is_dir() else None)


def folder() -> Path:
    """Where readers find the files that they are given; gone when the process ends."""
    return Path(_memory().name)


def _written(name: str, content: bytes) -> Path:
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path
