"""Stage grpo with turns and a real vLLM on this machine's CPU: the calculator of examples/calculator.py, killed once.

    make grpo-vllm        # after tools/grpo_vllm.py

Pre-trains the example's base (50 processor seconds), serves it, and trains an adapter on answers of
one and two turns. The run is killed by SIGKILL inside a rollout and resumed. Prints a line for each step; the exit code
is 1 where engine and trainer are further apart than rounding explains, a request holds anything but token ids, a second
turn does not go on from the very ids of the first, a step is missing or taken twice, or a stored reply is asked for
again.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import surefoot
from grpo_vllm import APART, SETTINGS, WORDS
from served import PYTHON, ROOT, WORK, install, running
from surefoot.system.posting import Server

sys.path.insert(0, str(ROOT / "examples"))
import arithmetic
import calculator

FOLDER = WORK / "grpo-turns"
RUN = FOLDER / "run"
STEPS, KILLED_AFTER, ANSWERS = 8, 3, 32
GENERATE = "/inference/v1/generate"
Ids = tuple[int, ...]


def base() -> Path:
    """The example's base, with heads of 32 channels, which vLLM's kernels want."""
    if not (FOLDER / "base" / "MANIFEST.json").is_file():
        arithmetic.make_base(FOLDER / "random", "*?[]", calculator.TEMPLATE)
        calculator.write_data(FOLDER)
        config = LlamaConfig.from_pretrained(FOLDER / "random")
        config.head_dim = 32
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(FOLDER / "random")
        surefoot.train(arithmetic.base_config(FOLDER, 5, calculator.LONGEST), overwrite=True, stream=io.StringIO())
    return FOLDER / "base"


def config_of(address: str) -> dict[str, Any]:
    config = calculator.grpo_config(FOLDER, "reward", 1)
    config["grpo"] |= {"group": 8, "eval_answers": 0, "engine": "vllm", "vllm_url": address}
    config["grpo"] |= {"mismatch": "stop", "mismatch_bound": APART}
    config["data"] |= {"eval": "none"}
    for key in ("eval_every", "eval_at_start", "samples"):
        del config[key]
    return config | {
        "adapter": {"kind": "lora", "rank": 8},
        "batch": {"size": ANSWERS},
        "optim": {"lr": 3e-3, "schedule": "constant"},
        "duration": f"{STEPS} steps",
        "log_every": 1,
        "checkpoint": {"every": "1 steps", "keep": 2, "best": "none"},
        "output": str(RUN),
    }


def lines_of(name: str) -> list[dict[str, Any]]:
    path = RUN / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def kill_inside_a_rollout(config: dict[str, Any]) -> int:
    """Start the run and kill it where replies to turns of an unfinished step are stored. Returns how many there are."""
    file = FOLDER / "turns.yaml"
    file.write_text(json.dumps(config))
    words = [sys.executable, "-m", "surefoot", "train", file, "--overwrite"]
    with (FOLDER / "killed.txt").open("w") as stream:
        run = subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT)
        while run.poll() is None:
            stored = sum(one["step"] == KILLED_AFTER for one in lines_of("turns-0.jsonl"))
            if stored > ANSWERS:  # each begins with a reset
                run.kill()
                run.wait()
                return sum(one["step"] == KILLED_AFTER for one in lines_of("turns-0.jsonl")) - ANSWERS
            time.sleep(0.01)
    raise SystemExit(f"the run ended by itself: see {stream.name}")


def resume(config: dict[str, Any]) -> list[tuple[dict[str, Any], Ids]]:
    """Resume the run. Returns its requests to the engine, each with the ids that it was answered with."""
    seen: list[tuple[dict[str, Any], Ids]] = []
    post = Server.post

    def told(server: Server, path: str, body: Any) -> Any:
        said = post(server, path, body)
        if path == GENERATE:
            seen.append((body, tuple(said["choices"][0]["token_ids"])))
        return said

    Server.post = told
    try:
        surefoot.train(config, resume=True, stream=io.StringIO())
    finally:
        Server.post = post
    return seen


def second_turns(requests: list[tuple[dict[str, Any], Ids]], stop: int) -> list[Ids] | None:
    """The ids that the environment gave between two turns. None where a prompt with an earlier answer in it does not
    begin with the ids of a request and those that it was answered with. stop: the token that ends an answer."""
    drawn = {(*body["token_ids"], *answer) for body, answer in requests}
    given: list[Ids] = []
    for prompt in {tuple(body["token_ids"]) for body, _ in requests}:
        if stop in prompt:
            before = prompt[: prompt.index(stop) + 1]
            if before not in drawn:
                return None
            given.append(prompt[len(before) :])
    return given


def checks(requests: list[tuple[dict[str, Any], Ids]], stored: int) -> dict[str, bool]:
    """What must hold, in words."""
    rows = [row for row in lines_of("trainer_log.jsonl") if "loss" in row]
    calls = lines_of("turns-0.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "base")
    given = second_turns(requests, tokenizer.eos_token_id)
    replies = ["".join(tokenizer.batch_decode(ids)) for ids in given or ()]
    once = ANSWERS * (1 + rows[KILLED_AFTER]["turns"])  # calls that the interrupted step needs
    again = sum(one["step"] == KILLED_AFTER for one in calls) - round(once)
    print(
        f"{len(requests)} requests after the resume, {len(replies)} second turns among them; of {stored} replies that "
        f"the killed step had stored, the answers drawn again needed {stored - again}"
    )
    return {
        "every step once": [row["current_steps"] for row in rows] == list(range(1, STEPS + 1)),
        f"engine and trainer within {APART:g} nats": all(row["mismatch"] <= APART for row in rows),
        "requests hold token ids and no text": all(
            set(body) == {"model", "token_ids", "sampling_params"}
            and not body["sampling_params"]["detokenize"]
            and all(type(token) is int for token in body["token_ids"])
            for body, _ in requests
        ),
        "second turns go on from the ids of the first": bool(given),
        "and from the calculator's reply": all(
            text.startswith("[") and text.endswith("]") and text[1:-1].isdigit() for text in replies
        ),
        "no call is made twice": len({one["key"] for one in calls}) == len(calls),
        "adapters have a new name each step": len({body["model"] for body, _ in requests}) > STEPS - KILLED_AFTER,
    }


def main() -> int:
    install()
    FOLDER.mkdir(parents=True, exist_ok=True)
    words = [str(PYTHON.with_name("vllm")), "serve", str(base()), "--enable-lora", "--max-lora-rank", "16"]
    words += ["--max-loras", "2", *WORDS, "--max-model-len", "64"]
    with running(words, WORK / "grpo-turns.log", SETTINGS) as address:
        config = config_of(address)
        stored = kill_inside_a_rollout(config)
        requests = resume(config)
    print("\nturns\n step  reward  turns  mismatch  largest")
    for row in lines_of("trainer_log.jsonl"):
        if "loss" in row:
            told = f"{row['reward']:7.3f}  {row['turns']:.3f}  {row['mismatch']:.1e}  {row['mismatch_most']:.1e}"
            print(f"{row['current_steps']:5d} {told}")
    found = checks(requests, stored)
    for what, right in found.items():
        print(f"{'ok   ' if right else 'WRONG'} {what}", flush=True)
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
