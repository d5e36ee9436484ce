"""Every command of the documents that surefoot grew from runs from the scripts of compat, and prints and writes what
they promise."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers import zoo
from helpers.faults import gives
from helpers.tiers import representatives
from interop.compat.seeds import FINETUNE, LLAMAFACTORY, SEEDS, added, blocks, of_kind, substituted
from surefoot.commands.main import main
from surefoot.config.schema import RunConfig
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command

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
def scripts(tmp_path_factory, names, served):
    """The scripts, with a description of alpaca_en that leads to a local file; runs are made in this folder."""
    folder = tmp_path_factory.mktemp("compat")
    served.write_scripts(folder)
    shutil.copy(DATA / "instruct" / "alpaca_en_demo.json", folder / "data")
    described = {"alpaca_en": {"file_name": "alpaca_en_demo.json"}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described))
    config = folder / "examples" / "train_lora" / "phi3_bos_zero_lora.yaml"
    text = substituted(config.read_text(), names).replace("cutoff_len: 2048", "cutoff_len: 256")
    config.write_text(text + "max_samples: 12\n")
    return folder


def shell(command, folder, environment):
    """Run by bash behind `source activate`, as a user does; (exit code, output)."""
    done = subprocess.run(
        ["bash", "-c", f"set -e; source ./activate; {command}"],
        cwd=folder,
        env=environment,
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
TYPED = 0  # called by the Python on PATH, the others by one that is served
QUICK = 2  # the representative of those that train
TRAINED = {0, 2, 20}  # as python, as bash with accelerate, and with accelerate's file; the rest differs in flags alone


def words_of(text):
    return shlex.split(text.replace("\\\n", " "))  # shlex would leave the end of a continued line as a word


def planned(words, folder):
    """`surefoot run --dry-run` in this process, which has everything imported: (exit code, output)."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(main, ["run", "--dry-run", "--", *words])
    finally:
        os.chdir(before)
    return result.exit_code, result.output


def understood(words):
    """The config that the words of a command mean, and the words of the run."""
    return translate_command(words, Options()).config


@pytest.mark.parametrize(
    "block",
    representatives(
        [one for one in COMMANDS if one.number in TRAINED], *(one for one in COMMANDS if one.number == QUICK)
    ),
    ids=lambda block: str(block.number),
)
def test_the_migration_guides_commands_run(block, names, scripts, served):
    command = finetune(block, names)
    name = f"out-{block.number}"
    command = command.replace('"./output"', name) if "--output_dir" in command else f"{command} --output_dir={name}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path} if block.number == TYPED else served.environment
    code, said = shell(command, scripts, environment)
    assert code == 0, said
    for line in FINETUNE_LINES:
        assert line in said
    assert "Model loaded successfully. dtype: torch.float32" in said
    assert "Adding dedicated PAD token" in said
    assert "Disabled cuDNN SDPA" not in said  # attention is eager: there is none to disable
    run = scripts / name
    assert (run / "adapter_model.safetensors").is_file()
    assert (run / "training_args.json").is_file()
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses
    assert all(loss and 0 < loss < 100 for loss in losses)


PLANNED = [one for one in COMMANDS if one.number not in TRAINED]


@pytest.mark.parametrize("block", representatives(PLANNED, *PLANNED[:1]), ids=lambda block: str(block.number))
def test_the_migration_guides_other_commands_are_planned(block, names, scripts):
    code, said = planned([*words_of(finetune(block, names)), f"--output_dir=out-{block.number}"], scripts)
    if any(word in block.text for word in OPTIONAL) and code == 2:  # what the machine lacks is refused, never replaced
        assert gives(said, "flash_attention_2")
        return
    assert code == 0, said
    assert re.search(r"[1-9][\d,]* steps?", said.splitlines()[-1])
    assert not (scripts / f"out-{block.number}").exists()


# What each of the guide's flags does to the config.
EFFECTS = {
    "attn_implementation": lambda value: ("attention.implementation", value),
    "disable_cudnn_sdpa": lambda value: ("attention.cudnn", "off" if value == "True" else "auto"),
    "disable_flash_sdpa": lambda value: ("attention.flash", "off" if value == "True" else "auto"),
    "enable_torch_compile": lambda value: ("compile", "default" if value == "True" else "off"),
    "bf16": lambda value: ("precision.compute", "bf16" if value == "True" else None),
    "fp16": lambda value: ("precision.compute", "fp16" if value == "True" else None),
}


def flags_of(block):
    lines = [line.split("#")[0] for line in block.text.splitlines()]
    return words_of(" ".join(lines))


def value_at(config, key):
    filled = RunConfig.model_validate(config).model_dump(mode="json")  # defaults too
    for step in key.split("."):
        filled = filled[step]
    return filled


def with_flags(block, names):
    """The guide's first command with these flags."""
    base = [word for word in words_of(finetune(COMMANDS[0], names)) if "--bf16" not in word]
    return [*base, "--output_dir=out-flags", *flags_of(block)]


def test_the_migration_guides_flags_have_their_effect(names):
    for block in FLAGS:
        config = understood(with_flags(block, names))
        for name, value in (flag.removeprefix("--").split("=") for flag in flags_of(block)):
            key, wanted = EFFECTS[name](value)
            assert wanted is None or value_at(config, key) == wanted, (block.number, name)


@pytest.mark.slow
@pytest.mark.parametrize("block", FLAGS, ids=lambda block: f"000-{block.number}")
def test_the_migration_guides_flags_are_planned_or_refused_with_the_reason(block, names, scripts):
    code, said = planned(with_flags(block, names), scripts)
    if any(word in block.text for word in OPTIONAL):
        assert code in (0, 2), said
        assert code == 0 or gives(said, "flash_attention_2")
    else:
        assert code == 0, said
    assert not (scripts / "out-flags").exists()


def test_twin_other_values_have_another_effect(names):
    base = words_of(finetune(COMMANDS[0], names))
    for name, effect in EFFECTS.items():
        values = ("eager", "sdpa") if name == "attn_implementation" else ("True", "False")
        rest = [word for word in base if "--bf16" not in word]
        first, second = (value_at(understood([*rest, f"--{name}={value}"]), effect(value)[0]) for value in values)
        assert first != second, name


@pytest.mark.slow
def test_the_migration_guides_python_call_runs(names, scripts, served):
    (code_block,) = [block for block in of_kind("code", "000") if "from finetune import train" in block.text]
    settings = ", ".join(
        f"{flag.lstrip('-')}={int(value) if value.isdigit() else value.format(**names)!r}"
        for flag, value in {**FINETUNE, "--output_dir": "out-py"}.items()
    )
    text = substituted(code_block.text, names).rstrip().removesuffix(")") + f"    {settings},\n)\n"
    (scripts / "call.py").write_text(text)
    code, said = shell("python call.py", scripts, served.environment)
    assert code == 0, said
    assert (scripts / "out-py" / "adapter_model.safetensors").is_file()


BOS = {block.number: block for block in of_kind("command", "001")}
RUN = "saves/phi3-bos-zero-lora-alpaca"


DIRECT = next((block for block in BOS.values() if "--use_bos_zero_training" in block.text), None)


@pytest.fixture(scope="module")
def trained(names, scripts, served):
    """The BOS document's direct command, run once: what it printed."""
    code, said = shell(added(substituted(DIRECT.text, names), LLAMAFACTORY, names), scripts, served.environment)
    assert code == 0, said
    return said


def test_the_bos_documents_training_prints_and_writes_what_it_promises(trained, scripts):
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
        assert line in trained, line
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


# By a word of the block: the files it leaves behind, and what it prints. A block with none of the words is only run.
LEFT = {
    "ploting import": [f"{RUN}/training_loss.png"],
    "--adapter_path": ["bos_zero_eval_results/norms.json", "bos_zero_eval_results/*.png"],
    "baseline_eval_results": ["baseline_eval_results/norms.json", "baseline_eval_results/*.png"],
    "llamafactory-cli export": ["saves/phi3-bos-zero-merged/export.json", "phi3_bos_zero_matrices/index.json"],
    "phi3_baseline_matrices": ["phi3_baseline_matrices/index.json"],
}
SAID = {
    "train_phi3_bos_zero.py": ["🚀 Starting Phi-3 BOS Zero LoRA Training", "Training completed successfully!"],
    "CUDA_VISIBLE_DEVICES=0": ["Training completed successfully!"],
    "debug_bos_zero.py": ["Training completed successfully!", "were finite at both factors"],
    "Original tokens": ["Original tokens: ["],
    "yaml.safe_load": ["BOS zero training: True", "LoRA target: all", "LoRA rank: 16"],
    "named_modules": ["Found: model.embed_tokens"],
}


OTHERS = [one for one in BOS.values() if one != DIRECT]
QUICKLY = [
    one for one in OTHERS if any(word in one.text for word in ("yaml.safe_load", "named_modules", "ploting import"))
]


@pytest.mark.parametrize("block", representatives(OTHERS, *QUICKLY), ids=lambda block: f"001-{block.number}")
def test_every_other_command_of_the_bos_document_runs(block, names, scripts, served, trained):
    """Over all blocks, so none is forgotten; those that train do so in the order of the document."""
    left = [name for word, files in LEFT.items() if word in block.text for name in files]
    for name in left:
        for path in scripts.glob(name):
            path.unlink()
    code, said = shell(substituted(block.text, names), scripts, served.environment)
    assert code == 0, said
    assert all(list(scripts.glob(name)) for name in left), left
    for word, lines in SAID.items():
        assert word not in block.text or all(line in said for line in lines), said


@pytest.mark.parametrize("block", list(of_kind("flags", "001")), ids=lambda block: f"001-{block.number}")
def test_the_bos_documents_flags_have_their_effect(block, names):
    words = words_of(substituted(DIRECT.text, names))
    told = [word for line in block.text.splitlines() if not line.startswith("#") for word in line.split()]
    smaller = {"--per_device_train_batch_size", "--gradient_accumulation_steps"}
    assert set(told[::2]) == smaller
    at = words.index("--per_device_train_batch_size")
    without = [*words[:at], *words[at + 4 :]]
    assert set(words[at : at + 4 : 2]) == smaller
    before, after = understood(words)["batch"], understood([*without, *told])["batch"]
    assert (before, after) == ({"size": 8, "micro": 2}, {"size": 8, "micro": 1})


def test_the_documents_are_read():
    assert len(COMMANDS) >= 7
    assert len(FLAGS) >= 7
    assert len(BOS) >= 14
    assert {block.number for block in COMMANDS} >= TRAINED
    words = {*LEFT, *SAID}
    assert all(any(word in block.text for block in BOS.values()) for word in words)
