"""The scripts of compat that no document runs, run whole on tiny models; and the hint how to resume, pasted.

The ranks are started by the real `torchrun`; the other programs are served."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest

from helpers import zoo

RECORDS = [
    {"instruction": f"Is {n} even? Answer true or false.", "input": "", "output": f"the correct answer is {word}",
     "answer": word}
    for n, word in zip(range(16), ["true", "false"] * 8, strict=True)
]  # fmt: skip
LONGEST = 180  # seconds until a command counts as hanging


@pytest.fixture(scope="module")
def place(tmp_path_factory, served):
    """With the scripts, which call the Python that is served."""
    folder = tmp_path_factory.mktemp("compat")
    served.write_scripts(folder)
    zoo.llama3(folder / "llama3", chat_template=False, version="3.0")
    (folder / "data.json").write_text(json.dumps(RECORDS))
    (folder / "dataset" / "boolq").mkdir(parents=True)
    (folder / "dataset" / "boolq" / "test.json").write_text(json.dumps(RECORDS[:4]))
    return folder


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def run(place: Path, *words: str, **more: str) -> tuple[int, str]:
    done = subprocess.run(
        words, cwd=place, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LONGEST, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def trained(place):
    """What the launch script makes."""
    settings = {"BASE_MODEL": "llama3", "DATA_PATH": "data.json", "BATCH_SIZE": "8", "VAL_SET_SIZE": "4", "EPOCHS": "1"}
    code, said = run(place, "./llama3_8B_DoRA.sh", "4", "8", "dora-out", **settings)
    assert code == 0, said
    return place / "dora-out"


def test_the_launch_script_trains_as_its_words_say(trained):
    config = json.loads((trained / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, True)
    given = json.loads((trained / "training_args.json").read_text())["given"]
    assert (given["learning_rate"], given["bf16"], given["batch_size"]) == (3e-5, True, 8)


def test_commonsense_evaluate_answers_with_the_adapter(place, trained):
    code, said = run(
        place, "./commonsense_evaluate.py", "--dataset", "boolq", "--model", "LLaMA3-8B", "--adapter", "DoRA",
        "--base_model", "llama3", "--lora_weights", str(trained), "--batch_size", "2",
    )  # fmt: skip
    assert code == 0, said
    (answers,) = (place / "experiment").glob("*boolq.json")
    assert "LLaMA3-8B" in answers.name
    assert len(json.loads(answers.read_text())) == 4


def test_train_sft_trains_and_times_every_step(place):
    code, said = run(
        place, "./train_sft.py", "--model", "llama3", "--data", "data.json", "--out", "sft-out", "--micro-bsz", "2",
        "--accum", "2", "--lora-r", "4", "--lora-alpha", "8", "--epochs", "1", "--max-len", "256",
    )  # fmt: skip
    assert code == 0, said
    rows = [json.loads(line) for line in (place / "sft-out" / "trainer_log.jsonl").read_text().splitlines()]
    assert said.count("[profile] forward") == max(row.get("current_steps", 0) for row in rows) == 4


def test_simple_finetune_answers_before_and_after(place):
    with resources.as_file(resources.files("surefoot.commands.quickstart")) as quickstart:
        code, said = run(
            place, "./simple_finetune.py", "--model", str(quickstart / "base"), "--data", "data.json", "--output",
            "simple-out", "--max-samples", "8", "--epochs", "1",
        )  # fmt: skip
    assert code == 0, said
    assert said.index("--- before") < said.index("--- after")
    assert (place / "simple-out" / "adapter_model.safetensors").is_file()


def test_the_hint_how_to_resume_works_when_it_is_pasted(place, served):
    words = [
        "./finetune.py", "--base_model=llama3", "--data_path=data.json", "--output_dir=stopped", "--val_set_size=0",
        "--batch_size=2", "--per_device_train_batch_size=2", "--num_epochs=10", "--save_step=1000",
        "--target_modules", "q_proj", "v_proj",
    ]  # fmt: skip
    with subprocess.Popen(
        words, cwd=place, env=environment(WANDB_MODE="offline"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as running:  # fmt: skip
        log, until = place / "stopped" / "trainer_log.jsonl", time.monotonic() + LONGEST
        # The log is there before its first row, and Ctrl-C before the first step ends the command by itself.
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < until:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=LONGEST)[0]
    assert running.returncode == 75, said
    hint = said.partition("continue with:\n")[2].splitlines()[0].strip()
    assert hint.startswith("surefoot run --resume -- WANDB_MODE=offline finetune.py --base_model=llama3 ")
    step = int(re.search(r"saved checkpoint-(\d+)", said)[1])
    code, said = run(place, "bash", "-c", hint, PATH=served.environment["PATH"])
    assert code == 0, said
    state = json.loads((place / "stopped" / "trainer_state.json").read_text())
    assert step < state["global_step"] == 80
    code, said = run(
        place, *words
    )  # without --resume the folder is refused, with advice that a script's user can follow
    assert code == 2
    assert "`surefoot run --resume -- finetune.py …`" in said


@pytest.mark.slow
def test_ranks_of_torchrun_make_one_run(place):
    words = ["finetune.py", "--base_model=llama3", "--data_path=data.json", "--output_dir=ranks", "--num_epochs=1",
             "--val_set_size=0"]  # fmt: skip
    code, said = run(place, "torchrun", "--nproc_per_node", "2", *words)
    assert code == 0, said
    ranks = json.loads((place / "ranks" / "environment.json").read_text())["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]


def test_an_environment_prefix_reaches_a_script(place):
    words = ["./llamafactory-cli", "train", "--model_name_or_path=llama3", "--stage=sft", "--do_train",
             "--dataset=d", "--template=alpaca", "--output_dir=prefix"]  # fmt: skip
    code, said = run(place, *words, NPROC_PER_NODE="4", NNODES="2:4")
    assert code == 2
    assert "NNODES: " in said
    assert not (place / "prefix").exists()
