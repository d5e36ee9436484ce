"""The scripts of compat: written where asked, nothing lost, and each word of the measuring ones finds its flag."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.compat import write_scripts
from surefoot.dialects.launch import Options
from surefoot.dialects.tools import translate_command
from surefoot.errors import InputError
from surefoot.report.plots import draw_history

ROOT = Path(__file__).parents[2]
NAMED = (
    "finetune.py", "accelerate_config.yaml", "llama3_8B_DoRA.sh", "commonsense_evaluate.py", "llamafactory-cli",
    "examples/train_lora/phi3_bos_zero_lora.yaml", "examples/train_lora/train_phi3_bos_zero.py",
    "evaluate_rmsnorm_llamafactory.py", "capture_phi3_with_rmsnorm_weights.py", "debug_bos_zero.py",
    "llamafactory/extras/ploting.py", "simple_finetune.py", "train_sft.py", "activate",
)  # fmt: skip


def test_every_name_is_written_and_programs_can_be_started(tmp_path):
    names = write_scripts(tmp_path / "new", overwrite=False)
    assert set(NAMED) <= set(names)
    for name in names:
        there, ours = tmp_path / "new" / name, ROOT / "compat" / name
        assert there.read_bytes() == ours.read_bytes()
        assert os.access(there, os.X_OK) == os.access(ours, os.X_OK) == there.read_bytes().startswith(b"#!")
    assert write_scripts(tmp_path / "new", overwrite=False) == names  # again: nothing differs


def test_another_file_of_the_name_is_kept_unless_asked(tmp_path):
    (tmp_path / "finetune.py").write_text("mine")
    with pytest.raises(InputError, match=r"has other files of these names: finetune.py; name another folder, or add"):
        write_scripts(tmp_path, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["finetune.py"]
    write_scripts(tmp_path, overwrite=True)
    assert (tmp_path / "finetune.py").read_text() != "mine"


@pytest.mark.parametrize("shell", ["bash"])
def test_activate_finds_its_own_folder_from_anywhere(tmp_path, shell):
    write_scripts(tmp_path / "with blank", overwrite=False)
    said = subprocess.run(
        [shell, "-c", f"source '{tmp_path}/with blank/activate'; command -v llamafactory-cli; echo $PYTHONPATH"],
        cwd="/", capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]},
    ).stdout  # fmt: skip
    assert said == f"{tmp_path}/with blank/llamafactory-cli\n{tmp_path}/with blank\n"


MEASURING = {
    "commonsense_evaluate.py --dataset boolq --model LLaMA3-8B --adapter DoRA --base_model b --lora_weights=w "
    "--batch_size 2": "evaluate commonsense b --adapter w --only adapter --data . --sets boolq --mode published "
    "--model-label LLaMA3-8B --label DoRA --out experiment --batch-size 2",
    "python evaluate_rmsnorm_llamafactory.py --model_name b --adapter_path w --output_dir o --generate_samples":
    "evaluate norms b --adapter w --out o --generate-samples",
    "evaluate_rmsnorm_llamafactory.py --model_name b": "evaluate norms b",
    "capture_phi3_with_rmsnorm_weights.py --model-id b --output-dir o":
    "capture b --out o --overwrite --seq-len 1024",
    "capture_phi3_with_rmsnorm_weights.py --model-id=b --output-dir=o --seq-len=64 --rmsnorm-weights-path x":
    "capture b --out o --overwrite --seq-len 64",
}  # fmt: skip


@pytest.mark.parametrize("command", MEASURING)
def test_the_measuring_scripts_become_words_of_ours(command):
    from surefoot.cli.main import main

    found = translate_command(command.split(), Options())
    words = [found.command, *found.arguments]
    assert words == MEASURING[command].split()
    group = main.get_command(None, words[0])  # and ours knows each of them
    if words[0] == "evaluate":
        group = group.get_command(None, words[1])
        words = words[1:]
    known = {option for parameter in group.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert len(found.notes) >= command.count("--")


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (
            "commonsense_evaluate.py --dataset bool --model m --adapter a --base_model b --lora_weights w",
            "bool is none",
        ),
        ("commonsense_evaluate.py --dataset boolq", "--base_model: is required"),
        ("evaluate_rmsnorm_llamafactory.py --model b", "did you mean model_name"),
        ("capture_phi3_with_rmsnorm_weights.py --model-id b", "--output_dir: is required"),
        ("capture_phi3_with_rmsnorm_weights.py b --output-dir o", "b: belongs to no flag"),
    ],
)
def test_a_wrong_word_is_one_clear_fault(command, fault):
    with pytest.raises(InputError, match=fault):
        translate_command(command.split(), Options())


def test_a_runs_history_is_drawn_and_what_it_lacks_is_named(tmp_path):
    rows = [{"step": step, "loss": 2.0 / step} for step in (1, 2, 3)] + [{"step": 3, "eval_loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert draw_history(tmp_path, ["loss", "eval_loss", "reward/mean"]) == (
        ["training_loss.png"],
        ["eval_loss", "reward/mean"],
    )
    assert (tmp_path / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    sys.path.insert(0, str(ROOT / "compat"))
    try:
        from llamafactory.extras.ploting import plot_loss
    finally:
        sys.path.remove(str(ROOT / "compat"))
    (tmp_path / "training_loss.png").unlink()
    plot_loss(str(tmp_path))
    assert (tmp_path / "training_loss.png").is_file()
    with pytest.raises(InputError, match="trainer_state"):
        draw_history(tmp_path / "no", ["loss"])
