"""The tool that counts what becomes of other tools' configs and commands finds them all, and values that vanish."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interop.small_configs import BASES
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.interop.translation import Translation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import translated

SHELL = """\
#!/bin/bash
MODEL=tiny
# accelerate launch -m axolotl.cli.train good.yml
trl sft --model_name_or_path $MODEL \\
    --dataset_name ${DATA:-org/d} --output_dir o --packing_strategy_of wrong 2>&1 | tee log
pip install trl
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    axolotl = BASES["axolotl"][1]
    files: dict[str, Any] = {
        "good.yml": axolotl,
        "deep/bad.yml": axolotl | {"lisa_n_layers": 4, "optimizer": "none_such"},
        "none.yaml": {"model_name_or_path": "m", "no_such_key": 1},
        "data.json": {"a": 1},
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    (tmp_path / "run.sh").write_text(SHELL)
    (tmp_path / "README.md").write_text("```\n$ axolotl train good.yml\n```\nWe don't use `trl`.\n")
    return tmp_path


def test_every_config_and_command_is_counted_once(folder: Path) -> None:
    items = {item.name: item for item in translated.read_folder(folder)}
    fates = {name: (item.tool, item.fate) for name, item in items.items()}
    assert fates == {
        "good.yml": ("Axolotl files", "complete"),
        "deep/bad.yml": ("Axolotl files", "refused"),
        "none.yaml": ("no tool's files", "refused"),
        "README.md: axolotl train good.yml": ("Axolotl commands", "complete"),
        "run.sh: accelerate launch -m axolotl.cli.train good.yml": ("Axolotl commands", "complete"),
        "run.sh: trl sft --model_name_or_path tiny --dataset_name org/d --output_dir o --packing_strategy_of wrong": (
            "TRL commands", "refused"),
    }  # fmt: skip
    assert len(items["deep/bad.yml"].reasons) == 2
    assert not any(item.lost for item in items.values())
    lines = translated.report(list(items.values()), 10)
    assert lines[1].split() == ["Axolotl", "commands", "2", "2", "0", "0", "0", "0", "0", "0"]


def test_a_command_is_read_where_its_program_is(tmp_path: Path) -> None:
    for step in ("step1_supervised_finetuning", "step2_dpo_finetuning"):
        script = tmp_path / step / "scripts/run.sh"
        script.parent.mkdir(parents=True)
        (tmp_path / step / "main.py").touch()
        script.write_text(
            "MODEL=$1\ndeepspeed main.py --model_name_or_path $MODEL --zero_stage ${2:-0} --data_path d.json\n"
            "deepspeed main.py ... --zero_stage 1\ndeepspeed main.py --model_name_or_path <model> --zero_stage 1\n"
            "python -c 'import torch'\n"
        )
    items = sorted((item.tool, item.fate, item.name) for item in translated.read_folder(tmp_path))
    words = "deepspeed main.py --model_name_or_path 1 --zero_stage 0 --data_path d.json"
    assert items[:2] == [
        ("DeepSpeed-Chat step 1 commands", "leftovers", f"step1_supervised_finetuning/scripts/run.sh: {words}"),
        ("DeepSpeed-Chat step 2 with DPO commands", "leftovers", f"step2_dpo_finetuning/scripts/run.sh: {words}"),
    ]
    assert [(tool, fate) for tool, fate, _ in items[2:]] == [("launchers", "other")]


def _translate(data: dict[str, Any]) -> Translation:
    return translate_file("a.json", json.dumps(data), [], Options())


def test_a_value_that_changes_nothing_is_lost() -> None:
    data = BASES["axolotl"][1] | {"trust_remote_code": True}

    def forgets(given: dict[str, Any]) -> Translation:
        found = _translate({**given, "datasets": data["datasets"]})
        return replace(found, notes=tuple(note for note in found.notes if not note.word.startswith("trust")))

    assert list(translated.lost_values(data, _translate)) == []
    assert list(translated.lost_values(data, forgets)) == ["datasets.0.path", "datasets.0.type", "trust_remote_code"]
