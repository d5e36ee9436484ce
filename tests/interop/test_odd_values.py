"""Whatever stands behind a word, a tool's config is translated with an outcome for it, or refused: nothing else
comes out, least of all an exception of Python's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from helpers.faults import refused_settings
from surefoot.interop import draft as drafts
from surefoot.interop import finetune, measuring, train_sft, trl
from surefoot.interop.axolotl import rows as axolotl
from surefoot.interop.launch import Options, no_files
from surefoot.interop.llamafactory import rows as llamafactory
from surefoot.interop.llamafactory import tool as export
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.settings import Row
from surefoot.interop.torchtune import rows as torchtune
from surefoot.interop.translation import Translation
from surefoot.system.errors import InputError

ODD: tuple[Any, ...] = (
    "", [], True, {"a": 1}, 0, 1, -1, 1.5, math.nan, math.inf, "x", "3 y", False, ["a"], [1], [[]], {},
)  # fmt: skip
FEW = 1  # of them for settings that decide nothing
PER_SETTING = 2  # of them in the default tier, for settings that do
Read = Callable[[str, Any], Translation]


def llama(**more: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": "m", "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "d",
        "template": "alpaca", **more,
    }  # fmt: skip


def file_reader(base: Mapping[str, Any], path: str = "x.json") -> Read:
    def read(name: str, value: Any) -> Translation:
        return translate_file(path, json.dumps({**base, name: value}), [], Options())

    return read


def nested_reader(base: Mapping[str, Any]) -> Read:
    def read(name: str, value: Any) -> Translation:
        data = json.loads(json.dumps(base))
        group = data
        *steps, last = name.split(".")
        for step in steps:
            group = group.setdefault(step, {})
            if not isinstance(group, dict):
                raise InputError("the base holds no group there")
        group[last] = value
        return translate_file("x.json", json.dumps(data), [], Options())

    return read


def flag_reader(base: str) -> Read:
    def read(name: str, value: Any) -> Translation:
        written = value if isinstance(value, str) else json.dumps(value).replace("NaN", ".nan").replace("Inf", ".inf")
        return translate_command([*base.split(), f"--{name}={written}"], Options())

    return read


def scripted(name: str, value: Any) -> Translation:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError("Python has no such literal")
    arguments = ", ".join(f"{key}={one!r}" for key, one in {"output_dir": "o", name: value}.items())
    lines = [
        "from datasets import load_dataset",
        "from trl import SFTConfig, SFTTrainer",
        'data = load_dataset("json", data_files="d.json", split="train")',
        f"SFTTrainer(model='m', train_dataset=data, args=SFTConfig({arguments})).train()",
    ]
    files = {"s.py": "\n".join(lines)}

    def read(path: str) -> str:
        return files[path] if path in files else no_files(path)

    return translate_command(["python", "s.py"], Options(read=read))


CHAT = {"model_name_or_path": "m", "template": "alpaca", "adapter_name_or_path": "a"}


def chat(name: str, value: Any) -> Translation:
    files = {"x.json": json.dumps({**CHAT, name: value})}
    return translate_command(["llamafactory-cli", "chat", "x.json"], Options(read=files.__getitem__))


AXOLOTL = {
    "base_model": "m", "datasets": [{"path": "d.json", "type": "alpaca"}], "adapter": "lora", "lora_r": 8,
    "lora_alpha": 16, "lora_target_linear": True, "micro_batch_size": 1, "num_epochs": 1, "learning_rate": 1e-4,
    "output_dir": "o", "gradient_accumulation_steps": 1, "val_set_size": 0.1,
}  # fmt: skip
TRL = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}
TUNE = {
    "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ["q_proj"], "lora_rank": 8,
              "lora_alpha": 16},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "m/tokenizer.model"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "source": "d"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4}, "output_dir": "o", "epochs": 1, "batch_size": 1,
}  # fmt: skip
EXPORTED = {**export._SAVED, **export._MERGED}
_COMMONSENSE = "--dataset boolq --model m --adapter a --base_model b --lora_weights w"
READERS: dict[str, tuple[Mapping[str, Any], Read]] = {
    "llamafactory train": (llamafactory.ROWS, file_reader(llama())),
    "llamafactory train, evaluated": (llamafactory.ROWS, file_reader(llama(val_size=0.1, eval_strategy="steps"))),
    "llamafactory export": (EXPORTED, file_reader({**CHAT, "export_dir": "o"})),
    "llamafactory chat": (EXPORTED, chat),
    "axolotl": (axolotl.ROWS, file_reader(AXOLOTL)),
    "trl": (trl.ROWS, file_reader(TRL, "sft.json")),
    "trl with PEFT": (trl.ROWS, file_reader({**TRL, "use_peft": True, "bf16": False})),
    "torchtune": (torchtune.ROWS, nested_reader(TUNE)),
    "script": (trl.ROWS, scripted),
    "finetune.py": (finetune.GUIDE, flag_reader("finetune.py --base_model m --data_path d.json --seed 1")),
    "finetune.py of DoRA": (finetune.ORIGINAL,
                            flag_reader("finetune.py --base_model m --data_path d.json --micro_batch_size 4")),
    "finetune.py of alpaca-lora": (finetune.ALPACA_LORA,
                                   flag_reader("finetune.py --base_model m --data_path d.json --add_eos_token")),
    "train_sft.py": (train_sft.ROWS, flag_reader("train_sft.py --model m --data d --out o")),
    "commonsense": ({"dataset": 0, "batch_size": 0, "load_8bit": 0, "model": 0},
                    flag_reader(f"commonsense_evaluate.py {_COMMONSENSE}")),
    "norms": (measuring.NORMS_ROWS,
              flag_reader("evaluate_rmsnorm_llamafactory.py --model_name m")),
    "capture": (measuring.CAPTURE_ROWS,
                flag_reader("capture_phi3_with_rmsnorm_weights.py --model_id m --output_dir o")),
}  # fmt: skip


def odd_values(number: int, row: object, *, whole: bool) -> tuple[Any, ...]:
    """What stands behind the setting of this place. The default tier takes a few, the next setting the next few."""
    decides = not isinstance(row, Row) or row.kind in ("carried", "joint")
    if whole:
        return ODD if decides else ODD[:4]
    count = PER_SETTING if decides else FEW
    return tuple(ODD[(number * count + at) % len(ODD)] for at in range(count))


def wrong(tool: str, *, whole: bool) -> Iterator[str]:
    rows, read = READERS[tool]
    for number, (name, row) in enumerate(rows.items()):
        for value in odd_values(number, row, whole=whole):
            try:
                found = read(name, value)
            except InputError as error:
                if "internal" in str(error):
                    yield f"{name}: {value!r}: {error}"
            except Exception as error:
                yield f"{name}: {value!r}: {type(error).__name__}: {error}"
            else:
                noted = {re.split("[:= ]", note.word.lstrip("-").replace("-", "_"))[0] for note in found.notes}
                if not {name, name.partition(".")[0]} & noted and tool != "script":
                    yield f"{name}: {value!r}: has no note"


def test_some_odd_values_have_a_note_or_a_fault():
    assert {tool: found for tool in READERS if (found := list(wrong(tool, whole=False)))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("tool", READERS)
def test_every_odd_value_has_a_note_or_a_fault(tool):
    assert list(wrong(tool, whole=True)) == []


def test_the_readers_read_something():
    """Not every value is refused; otherwise nothing is tried above."""
    assert READERS["llamafactory train"][1]("seed", 1).config["seed"] == 1
    assert READERS["script"][1]("seed", 1).config["seed"] == 1
    assert READERS["torchtune"][1]("seed", 1).config["seed"] == 1
    assert READERS["llamafactory export"][1]("export_size", 1).command == "export"
    assert READERS["llamafactory chat"][1]("temperature", 0.5).arguments[-4:-2] == ("--temperature", "0.5")
    assert READERS["axolotl"][1]("seed", 1).config["seed"] == READERS["trl"][1]("seed", 1).config["seed"] == 1
    assert (
        READERS["finetune.py"][1]("seed", 1).config["seed"] == READERS["train_sft.py"][1]("seed", 1).config["seed"] == 1
    )
    assert all(
        READERS[tool][1]("model_id" if tool == "capture" else "model_name", "b").notes for tool in ("norms", "capture")
    )


def test_twin_a_word_that_no_rule_reads_is_a_fault_with_its_name(monkeypatch):
    monkeypatch.setattr(drafts.Draft, "note", lambda *words: None)
    assert "seed" in refused_settings(lambda: READERS["finetune.py"][1]("seed", 1))
