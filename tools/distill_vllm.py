"""Stage distill with a real vLLM on this machine's CPU as the teacher, and as what draws the student's answers.

    make grpo-vllm        # after tools/grpo_vllm_turns.py

The teacher is the quickstart's run, merged, and the student the quickstart's model with an adapter. Prints a line for
each comparison; the exit code is 1 where losses are not those of the same teacher in memory, those of the likeliest
tokens not those of a stored teacher, a teacher that is the student teaches anything, or a killed run goes on with other
losses or asks about an example again.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import surefoot
from grpo_vllm import BASE, SETTINGS, WORDS
from served import PYTHON, WORK, install, running
from served import trained as quickstart

FOLDER = WORK / "distill"
TEACHER = FOLDER / "teacher"
STEPS, SIZE = 6, 8
SAME = 1e-3  # of a step's loss: server and trainer sum in another order, and the rest is 1 less the others
NOTHING = 1e-5  # nats, of a teacher that is the student: the rounding of its log-probabilities, and of the rest
ALL = 1912  # every token of the model's vocabulary but one, which is the rest
Losses = list[float]


def config_of(name: str, teacher: str, **distill: Any) -> dict[str, Any]:
    return {
        "stage": "distill",
        "model": str(BASE),
        "adapter": {"kind": "lora", "rank": 8},
        "data": {"train": str(FOLDER / "asked.jsonl"), "eval": 8, "max_length": 64},
        "distill": {"teacher": teacher, **distill},
        "batch": {"size": SIZE, "micro": 4},
        "optim": {"lr": 5e-3, "schedule": "constant"},
        "precision": "fp32",
        "duration": f"{STEPS} steps",
        "log_every": 1,
        "checkpoint": {"every": "1 steps", "keep": 2, "best": "none"},
        "output": str(FOLDER / name),
    }


def losses(config: dict[str, Any], **how: Any) -> Losses:
    """Of the steps, and of the evaluation at the end."""
    surefoot.train(config, stream=io.StringIO(), **(how or {"overwrite": True}))
    rows = [json.loads(line) for line in (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "eval_loss") if key in row]


def surefoot_command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "surefoot", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def prepare() -> None:
    run = quickstart("dense")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not TEACHER.exists():
        surefoot_command("export", run, "--merge", "--dtype", "fp32", "--out", TEACHER)
    records = json.loads(next(run.with_name("run-data").glob("train-*.json")).read_text())[: SIZE * STEPS]
    (FOLDER / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def told(what: str, right: bool, found: str) -> bool:
    print(f"{'ok   ' if right else 'WRONG'} {what}: {found}", flush=True)
    return right


def near(what: str, found: Losses, wanted: Losses) -> bool:
    apart = max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))
    return told(what, apart <= SAME, f"losses {found[0]:.4f} to {found[-1]:.4f}, at most {apart:.1e} of them apart")


def as_in_memory(address: str) -> list[bool]:
    """The served teacher beside the same in memory, over all tokens and over the likeliest."""
    right = []
    for beta in (0.0, 0.5, 1.0):
        local = losses(config_of("local", str(TEACHER), beta=beta))
        right.append(near(f"beta {beta}, all tokens", losses(config_of("all", address, beta=beta, top=ALL)), local))
        few = losses(config_of("few", address, beta=beta, top=20))
        right.append(told("20 tokens are a lower bound", few[0] <= local[0], f"{few[0]:.4f} of {local[0]:.4f}"))
        kept = config_of("kept", str(FOLDER / "stored"), beta=beta)
        right.append(near("20 tokens, as a stored teacher of 20", few, losses(kept)))
    return right


def killed_and_resumed(address: str, name: str) -> list[bool]:
    """SIGKILL inside the run, once the teacher has been asked about half of the steps."""
    config, record = config_of("cut", address, top=20), FOLDER / "cut" / "teacher-0.jsonl"
    config["distill"]["teacher_name"] = name
    whole = losses({**config, "output": str(FOLDER / "whole")})
    (FOLDER / "cut.yaml").write_text(json.dumps(config))
    record.unlink(missing_ok=True)
    words = [sys.executable, "-m", "surefoot", "train", str(FOLDER / "cut.yaml"), "--overwrite"]
    with (FOLDER / "killed.txt").open("w") as stream:
        run = subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT)
        while run.poll() is None:
            if record.is_file() and record.read_bytes().count(b"\n") > SIZE * STEPS // 2:
                run.kill()
            time.sleep(0.01)
    done = sum("loss" in line for line in (FOLDER / "cut" / "trainer_log.jsonl").read_text().splitlines())
    found = losses(config, resume=True)
    keys = [one["key"] for one in map(json.loads, record.read_text().splitlines()) if "key" in one]
    return [
        told("killed", run.returncode == -9 and done < STEPS, f"after {done} of {STEPS} steps"),
        near("resumed, as in one go", found, whole),
        told("asked about once", len(keys) == len(set(keys)), f"{len(keys)} examples"),
    ]


def main() -> int:
    install()
    prepare()
    vllm, run, right = str(PYTHON.with_name("vllm")), quickstart("dense"), []
    words = [vllm, "serve", str(TEACHER), *WORDS, "--max-logprobs", "-1"]
    with running(words, WORK / "distill.log", SETTINGS) as address:
        shutil.rmtree(FOLDER / "stored", ignore_errors=True)
        surefoot_command("teach", write(config_of("unused", str(TEACHER))), "--out", FOLDER / "stored", "--top", 20)
        right += as_in_memory(address) + killed_and_resumed(address, "base")
    adapted = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "3"]
    adapted += ["--lora-modules", json.dumps({"name": "large", "path": str(run)})]
    words = [vllm, "serve", str(BASE), *WORDS, "--max-logprobs", "-1", *adapted]
    with running(words, WORK / "distill-adapters.log", SETTINGS) as address:
        local = losses(config_of("local", str(run)))
        served = config_of("adapter", address, top=ALL, teacher_name="large")
        right.append(near("a teacher that is an adapter, all tokens", losses(served), local))
        # Of a gradient that is rounding, Adam makes steps as large as of any other.
        still = {"optim": {"lr": 1e-9}}
        same = losses(config_of("same", address, top=20, teacher_name="base") | still)
        most = max(map(abs, same))
        right.append(
            told("a teacher that is the student teaches nothing", most <= NOTHING, f"losses within {most:.1e}")
        )
        own = {"on_policy": 0.5, "max_new_tokens": 12, "engine": "vllm", "vllm_url": address, "beta": 1.0}
        drawn = losses(config_of("own", address, top=20, teacher_name="large", **own))
        found = f"losses {drawn[0]:.3f} to {drawn[-1]:.3f}"
        right.append(told("half of the answers drawn by the student's server", drawn[-1] < 0.9 * drawn[0], found))
    return int(not all(right))


def write(config: dict[str, Any]) -> Path:
    file = FOLDER / "config.yaml"
    file.write_text(json.dumps(config))
    return file


if __name__ == "__main__":
    sys.exit(main())
