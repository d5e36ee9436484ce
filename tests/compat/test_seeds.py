"""Every command of the documents that surefoot grew from runs from the scripts of compat, and prints and writes what
they promise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from compat.seeds import FINETUNE, LLAMAFACTORY, SEEDS, added, blocks, of_kind, substituted
from surefoot.compat import write_scripts

DATA = SEEDS.parent / "data"
pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents do not lie beside this checkout")
FINETUNE_LINES = ("Finetuning model with params:", "attn_implementation: eager", "disable_cudnn_sdpa: True")
RECORDS = 16


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Models of the documents' families, small, and the first records of their data."""
    folder = tmp_path_factory.mktemp("seeds")
    zoo.llama3(folder / "llama3", chat_template=False, version="3.0")
    zoo.phi3(folder / "phi3", max_position_embeddings=1024, original_max_position_embeddings=1024)
    records = json.loads((DATA / "commonsense" / "commonsense_train_2k.json").read_text())
    (folder / "commonsense.json").write_text(json.dumps(records[:RECORDS]))
    return {
        "llama3": str(folder / "llama3"),
        "phi3": str(folder / "phi3"),
        "commonsense": str(folder / "commonsense.json"),
    }


@pytest.fixture(scope="module")
def scripts(tmp_path_factory, names):
    """The scripts, with a description of alpaca_en that leads to a local file; runs are made in this folder."""
    folder = tmp_path_factory.mktemp("compat")
    write_scripts(folder, overwrite=False)
    shutil.copy(DATA / "instruct" / "alpaca_en_demo.json", folder / "data")
    described = {"alpaca_en": {"file_name": "alpaca_en_demo.json"}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described))
    config = folder / "examples" / "train_lora" / "phi3_bos_zero_lora.yaml"
    text = substituted(config.read_text(), names).replace("cutoff_len: 2048", "cutoff_len: 256")
    config.write_text(text + "max_samples: 12\n")
    return folder


def shell(command, folder):
    """Run by bash behind `source activate`, as a user does; (exit code, output)."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"set -e; source ./activate; {command}"],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def finetune(block, names):
    """A command block as it is run: one command; a comment or #! above it goes."""
    lines = [line for line in substituted(block.text, names).splitlines() if line and not line.startswith("#")]
    return added("\n".join(lines), FINETUNE, names)


COMMANDS = list(of_kind("command", "000"))
FLAGS = list(of_kind("flags", "000"))
OPTIONAL = {"flash_attention_2"}  # what the machine of a test may lack


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: f"000-{block.number}")
def test_the_migration_guides_commands_run(block, names, scripts):
    command = finetune(block, names)
    name = f"out-{block.number}"
    command = command.replace('"./output"', name) if "--output_dir" in command else f"{command} --output_dir={name}"
    code, said = shell(command, scripts)
    if any(word in command for word in OPTIONAL) and code == 2:  # what the machine lacks is refused, never replaced
        assert "flash_attention_2 needs an NVIDIA GPU" in said
        return
    assert code == 0, said
    for line in FINETUNE_LINES:
        assert line in said
    assert "Model loaded successfully. dtype: torch.float32" in said
    assert "Adding dedicated PAD token" in said
    run = scripts / name
    assert (run / "adapter_model.safetensors").is_file()
    assert (run / "training_args.json").is_file()
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses
    assert all(loss and 0 < loss < 100 for loss in losses)


@pytest.mark.parametrize("block", FLAGS, ids=lambda block: f"000-{block.number}")
def test_the_migration_guides_flags_are_understood(block, names, scripts):
    """Added to the guide's first command. What they ask for is planned, or refused with the reason; nothing trains."""
    base = finetune(COMMANDS[0], names).replace("--bf16=True", "")
    flags = " ".join(line.split("#")[0].strip() for line in block.text.splitlines())
    words = f"finetune.py {base.partition('finetune.py')[2]} --output_dir=out-flags {flags}"
    code, said = shell(f"surefoot run --dry-run -- {words}", scripts)
    if any(word in flags for word in OPTIONAL):
        assert code in (0, 2), said
        assert code == 0 or "flash_attention_2 needs an NVIDIA GPU" in said
    else:
        assert code == 0, said
    assert not (scripts / "out-flags").exists()


def test_the_migration_guides_python_call_runs(names, scripts):
    (code_block,) = [block for block in of_kind("code", "000") if "from finetune import train" in block.text]
    settings = ", ".join(
        f"{flag.lstrip('-')}={value.format(**names)!r}"
        for flag, value in {**FINETUNE, "--output_dir": "out-py"}.items()
    )
    text = substituted(code_block.text, names).rstrip().removesuffix(")") + f"    {settings},\n)\n"
    (scripts / "call.py").write_text(text)
    code, said = shell("python call.py", scripts)
    assert code == 0, said
    assert (scripts / "out-py" / "adapter_model.safetensors").is_file()


BOS = {block.number: block for block in of_kind("command", "001")}
RUN = "saves/phi3-bos-zero-lora-alpaca"


def bos(word, names):
    """The first command block of the BOS document that contains this word."""
    return substituted(next(block.text for block in BOS.values() if word in block.text), names)


def test_the_bos_documents_commands_run_in_their_order(names, scripts):
    """Train, look at the log, plot, evaluate both, merge, capture both: as the document walks through them."""
    direct = added(bos("--use_bos_zero_training", names), LLAMAFACTORY, names)
    code, said = shell(direct, scripts)
    assert code == 0, said
    for line in (
        "BOSZeroTrainer initialized",
        "BOS tokens will be added to sequences",
        "✅ Found embedding layer: ",
        "✅ BOS zeroing hook registered on embedding layer",
        "✅ Added BOS token (1) to sequence of length",
        f"💾 BOS zeroing configuration saved to {RUN}/bos_zero_config.json",
        "Training completed successfully!",
        "{'loss': ",
        "training example:",
    ):
        assert line in said, line
    run = scripts / RUN
    tree = next(block.text for block in blocks("001") if "├── adapter_config.json" in block.text)
    for name in ("adapter_config.json", "adapter_model.safetensors", "bos_zero_config.json", "trainer_log.jsonl"):
        assert name in tree
        assert (run / name).is_file()
    assert (run / "training_args.json").is_file()  # the document's training_args.bin is a pickle
    assert json.loads((run / "bos_zero_config.json").read_text())["scaling_factor"] == 0.1
    checkpoints = list(run.glob("checkpoint-*"))
    assert checkpoints
    for name in ("adapter_model.safetensors", "bos_zero_config.json", "trainer_state.json"):
        assert all((checkpoint / name).is_file() for checkpoint in checkpoints)
    (run / "training_loss.png").unlink(missing_ok=True)
    for word in ("ploting import", "du -sh"):
        code, said = shell(bos(word, names), scripts)
        assert code == 0, said
    assert (run / "training_loss.png").is_file()
    code, said = shell(bos("--adapter_path", names), scripts)
    assert code == 0, said
    baseline = next(
        block.text for block in BOS.values() if "rmsnorm_llama" in block.text and "--adapter_path" not in block.text
    )
    code, said = shell(substituted(baseline, names), scripts)
    assert code == 0, said
    for folder in ("bos_zero_eval_results", "baseline_eval_results"):
        assert (scripts / folder / "norms.json").is_file()
        assert list((scripts / folder).glob("*.png"))
    code, said = shell(bos("llamafactory-cli export", names), scripts)
    assert code == 0, said
    assert (scripts / "saves" / "phi3-bos-zero-merged" / "export.json").is_file()
    code, said = shell(substituted(_baseline_capture(), names), scripts)
    assert code == 0, said
    for folder in ("phi3_bos_zero_matrices", "phi3_baseline_matrices"):
        assert (scripts / folder / "index.json").is_file()


def _baseline_capture():
    return next(
        block.text for block in BOS.values() if "capture_phi3" in block.text and "llamafactory-cli" not in block.text
    )


@pytest.mark.parametrize(
    "word", ["train_phi3_bos_zero.py", "llamafactory-cli train examples", "CUDA_VISIBLE_DEVICES=0", "debug_bos_zero.py"]
)
def test_the_bos_documents_other_ways_to_train_run(word, names, scripts):
    command = next(block.text for block in BOS.values() if word in block.text and "yaml.safe_load" not in block.text)
    command = command.splitlines()[0] if word == "llamafactory-cli train examples" else command
    code, said = shell(substituted(command, names), scripts)
    assert code == 0, said
    assert "Training completed successfully!" in said
    if word == "train_phi3_bos_zero.py":
        assert "🚀 Starting Phi-3 BOS Zero LoRA Training" in said


@pytest.mark.parametrize("word", ["Original tokens", "yaml.safe_load", "BOS token:", "named_modules"])
def test_the_bos_documents_checks_of_tokenizer_config_and_layers_run(word, names, scripts):
    code, said = shell(bos(word, names), scripts)
    assert code == 0, said
    if word == "yaml.safe_load":
        assert "BOS zero training: True" in said
        assert "LoRA target: all" in said
        assert "LoRA rank: 16" in said
    if word == "named_modules":
        assert "Found: model.embed_tokens" in said


def test_no_block_of_the_documents_is_forgotten():
    """Each command block of seed 001 is run above, by a word that it contains; those of 000 all are."""
    words = ("--use_bos_zero_training", "ploting import", "du -sh", "rmsnorm_llama", "llamafactory-cli", "capture_phi3",
             "train_phi3_bos_zero.py", "CUDA_VISIBLE_DEVICES=0", "debug_bos_zero.py", "Original tokens",
             "yaml.safe_load", "BOS token:", "named_modules")  # fmt: skip
    assert [block for block in BOS.values() if not any(word in block.text for word in words)] == []
    assert len(COMMANDS) >= 6
    assert len(FLAGS) >= 6
