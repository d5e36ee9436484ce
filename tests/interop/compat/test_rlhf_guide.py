"""Every block of the guide from OPT to Llama-3.1-8B, run from compat/deepspeed_chat on tiny models of the families.

Substitutions, as docs/deepspeed-chat.md lists them: models, `# ... other params`, comments behind a line's continuation
(bash would end the command there), and each workflow of the last block in a shell of its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers import zoo
from helpers.faults import prints_fault
from helpers.python_on_path import Served
from helpers.tiers import representatives
from interop.compat.seeds import SEEDS, blocks
from surefoot.commands.main import main
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.method_facts.methods import METHODS

pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents do not lie beside this checkout")
BLOCKS = {block.number: block for block in blocks("004")} if SEEDS.is_dir() else {}
STEPS = {
    1: "training/step1_supervised_finetuning",
    2: "training/step2_reward_model_finetuning",
    3: "training/step3_rlhf_finetuning",
}
# block -> (step, family of its model, what `# ... other params` becomes besides the common flags)
MAIN = {
    0: (1, "opt", "--only_optimize_lora --lora_dim 4"),
    1: (1, "llama", "--only_optimize_lora --lora_dim 4"),
    2: (2, "opt350m", "--dropout 0.0"),
    3: (2, "llama", ""),
}
RLHF = {4: ("opt", "run_1.3b.sh"), 5: ("llama", "run_llama_8b.sh")}
SHORT = "--data_path {pairs} --dtype bf16 --max_seq_len 96 --per_device_train_batch_size 4 --num_train_epochs 1"
SHORT_RLHF = (
    "--dtype bf16 --max_prompt_seq_len 64 --max_answer_seq_len 8 --num_warmup_steps 0 "
    "--enable_test_mode --test_stop_step 2"
)
RECORDS = 40
NAMES = {"facebook/opt-1.3b": "opt", "facebook/opt-350m": "opt350m", "meta-llama/Meta-Llama-3.1-8B": "llama"}
LONGEST = 180  # seconds until a command counts as hanging


@pytest.fixture(scope="module")
def place(tmp_path_factory, served):
    folder = tmp_path_factory.mktemp("chat")
    served.write_scripts(folder)
    zoo.opt(folder / "opt")
    zoo.opt(folder / "opt350m", word_embed_proj_dim=16, do_layer_norm_before=False)
    zoo.llama3(folder / "llama", chat_template=False)
    records = [
        {"prompt": f"\n\nHuman: Is {n} even?\n\nAssistant:", "chosen": f" {good}.", "rejected": f" {bad}, I think."}
        for n, (good, bad) in zip(range(RECORDS), [("Yes", "No"), ("No", "Yes")] * (RECORDS // 2), strict=True)
    ]
    (folder / "pairs.json").write_text(json.dumps(records))
    return folder


def shell(served: Served, place: Path, step: int, command: str, **more: str) -> tuple[int, str]:
    """Run by bash in the folder of a step, behind `source activate`."""
    chat = place / "deepspeed_chat"
    environment = {**served.environment, "DATA_PATH": str(place / "pairs.json"), **more}
    done = subprocess.run(
        ["bash", "-c", f"set -e; source '{chat}/activate'; {command}"],
        cwd=chat / STEPS[step], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LONGEST, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def repaired(text: str) -> str:
    """A comment behind a backslash goes: bash would read the blank before it as the continued character."""
    return re.sub(r"\\[ \t]+#.*$", r"\\", text, flags=re.MULTILINE).rstrip().removesuffix("\\")


def filled(number: int, place: Path, output: str) -> str:
    _, _, own = MAIN[number]
    text = BLOCKS[number].text
    for name, used in NAMES.items():
        text = text.replace(name, str(place / used))
    more = f"{SHORT.format(pairs=place / 'pairs.json')} {own} --output_dir {output}"
    assert "# ... other params" in text
    return text.replace("# ... other params", more)


def trained(folder: Path) -> list[dict]:
    assert (folder / "config.json").is_file()  # a whole model: an adapter is merged
    assert list(folder.glob("*.safetensors"))
    assert not (folder / "adapter_config.json").exists()
    rows = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    assert any(row.get("loss") is not None for row in rows)
    return rows


def test_twin_the_blocks_as_they_stand_do_not_run():
    """What the repairs are for."""
    broken = subprocess.run(["bash", "-n", "-c", BLOCKS[4].text + "\necho done"], check=False, capture_output=True)
    words = subprocess.run(
        ["bash", "-c", BLOCKS[4].text.replace("bash run_1.3b.sh", "printf '<%s>'")], check=False, capture_output=True,
        text=True, env={"ACTOR_MODEL_PATH": "A", "CRITIC_MODEL_PATH": "C"},
    )  # fmt: skip
    assert broken.returncode == 0  # no syntax error tells anybody
    assert "<C>" not in words.stdout


@pytest.fixture(scope="module")
def called(served, place):
    """A block of MAIN, run once: its output folder, its exit code, what it said."""

    @functools.cache
    def run(number: int) -> tuple[Path, int, str]:
        output = place / f"out-{number}"
        return output, *shell(served, place, MAIN[number][0], filled(number, place, str(output)))

    return run


LLAMA = [number for number, (_, family, _) in MAIN.items() if family == "llama"]  # the representatives
LLAMA_RLHF = [number for number, (family, _) in RLHF.items() if family == "llama"]


@pytest.mark.parametrize("number", representatives(MAIN, *LLAMA))
def test_main_py_in_the_folder_of_its_step(number, called):
    step, _, _ = MAIN[number]
    if step == 2 and "reward" not in METHODS:
        pytest.skip("this build has no stage reward")
    output, code, said = called(number)
    assert code == 0, said
    trained(output)
    assert ("ppl: " in said) == (step == 1), said
    assert ("acc (higher is better) : " in said) == (step == 2)


def translated(number: int, place: Path):
    step = MAIN[number][0]
    words = repaired(filled(number, place, "out")).replace("\\\n", " ").split()
    return translate_command(words, Options(folder=f"/chat/{STEPS[step]}", read=lambda path: Path(path).read_text()))


@pytest.mark.parametrize("number", MAIN)
def test_what_main_py_is_read_as(number, place):
    step, family, _ = MAIN[number]
    config = translated(number, place).config
    assert config["stage"] == {1: "sft", 2: "reward"}[step]
    assert config["model"]["path"].endswith(family)
    if step == 1:
        assert config["adapter"]["targets"] == [{"opt": "decoder.layers.", "llama": "model.layers."}[family]]
        assert config["optim"]["lr"] == 5e-4  # LoRA's own; the learning rate of the block is for all weights
    else:
        assert config["reward"]["num_padding_at_beginning"] == {"opt350m": 1, "llama": 0}[family]


@pytest.mark.parametrize("number", [0, 1])
def test_a_module_name_of_the_other_family_is_refused_with_the_right_one(number, place, monkeypatch):
    names = {"model.layers.": "decoder.layers.", "decoder.layers.": "model.layers."}
    text = filled(number, place, "never")
    (written,) = [name for name in names if name in text]
    monkeypatch.chdir(place / "deepspeed_chat" / STEPS[1])
    words = repaired(text.replace(written, names[written])).replace("\\\n", " ").split()
    result = CliRunner().invoke(main, ["run", "--", *words])
    assert result.exit_code == 2, result.output
    assert prints_fault(result.output, "SF-ADAPTER-TARGETS", "--lora_module_name", written, names[written])
    assert not Path("never").exists()


@pytest.mark.parametrize("number", representatives(RLHF, *LLAMA_RLHF[:1]))
def test_step_3_from_the_folder_of_its_script(number, served, place, called):
    if "ppo" not in METHODS or "reward" not in METHODS:
        pytest.skip("this build has no stage ppo")
    family, script = RLHF[number]
    sft, reward = {"opt": (0, 2), "llama": (1, 3)}[family]
    models = {"ACTOR_MODEL_PATH": str(called(sft)[0]), "CRITIC_MODEL_PATH": str(called(reward)[0])}
    output = place / f"out-{number}"
    command = f"{repaired(BLOCKS[number].text)} 2 2 {output} {SHORT_RLHF}"
    assert script in command
    code, said = shell(served, place, 3, f"cd training_scripts/single_node; {command}", **models)
    assert code == 0, said
    trained(output / "actor")
    assert "Average reward score: " in said
    assert "Actor Loss: " in (output / "training.log").read_text()


LAST = [part for part in BLOCKS[11].text.split("\n\n") if part.strip()] if BLOCKS else []


@pytest.mark.slow
@pytest.mark.parametrize("part", LAST, ids=["old", "new"][: len(LAST)])
def test_the_quick_example(part, served, place):
    """From the folder above training/, as it says `cd training/…`."""
    more = "--num_train_epochs 1 --max_seq_len 96 --dtype bf16"
    command = "\n".join(f"{line} {more}" if line.startswith("bash ") else line for line in part.splitlines())
    model = place / ("llama" if "llama" in part else "opt")
    more_words = " --lora_dim 4" if "lora" in part else ""
    code, said = shell(served, place, 1, f"cd ../..\n{command}{more_words}", MODEL=str(model))
    assert code == 0, said
    output = place / "deepspeed_chat" / STEPS[1] / re.search(r"(\./\w+) 2", part)[1]
    trained(output)
    assert "ppl: " in (output / "training.log").read_text()
    if "llama" not in part:  # once is enough
        code, again = shell(served, place, 1, f"cd ../..\n{command}{more_words}", MODEL=str(model))
        assert code == 0, again  # as its users were promised: the same command goes on; here there is nothing left


def test_the_scripts_it_names_are_there(place):
    for number in (8, 9):
        for line in BLOCKS[number].text.split():
            assert os.access(place / "deepspeed_chat" / line, os.X_OK), line


def test_its_tokenizer_code_gives_a_pad_that_is_eos_and_surefoot_masks_by_position(place):
    """Both versions of the code run; what they are for is decided by the plan (tokenizer.pad)."""
    from transformers import AutoTokenizer

    found = {}
    for number in (6, 7):
        scope = {"AutoTokenizer": AutoTokenizer}
        exec(BLOCKS[number].text, scope)
        found[number] = scope["load_hf_tokenizer"](str(place / "llama"))
    assert found[7].pad_token is not None


def test_its_login_is_told_in_todays_words_and_not_run():
    page = (Path(__file__).parents[3] / "docs" / "deepspeed-chat.md").read_text()
    assert "huggingface-cli login" in BLOCKS[10].text
    assert "hf auth login" in page


def test_every_block_has_its_test():
    assert set(BLOCKS) == {*MAIN, *RLHF, 6, 7, 8, 9, 10, 11}
