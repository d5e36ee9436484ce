"""Stage grpo with a real vLLM on this machine's CPU that draws beside the update, for a judge behind the same server.

    make grpo-vllm        # after tools/grpo_vllm.py

The judge is an HTTP grader that asks a chat model for its own answer: the quickstart's run, which the same vLLM serves
beside the policy, or the policy itself where all weights train. An answer's score is the share of its words that the
chat model's has. With `grpo.ahead: 1` the run is killed by SIGKILL while answers are drawn, resumed, interrupted by
Ctrl-C while answers are drawn, and resumed. Prints a line for each step; the exit code is 1 where engine and trainer
are further apart than rounding explains, a step or an answer is missing or there twice, a checkpoint asks for nothing,
or the reward does not rise.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import surefoot
from grpo_vllm import APART, BASE, SETTINGS, WORDS, untied
from served import PYTHON, WORK, install, running
from served import trained as quickstart
from surefoot.system.posting import server

FOLDER = WORK / "grpo-ahead"
STEPS, GROUP, ANSWERS = 12, 8, 32
KILLED_AFTER, INTERRUPTED_AFTER = 3, 6  # steps
RESUMABLE = 75
Row = dict[str, Any]


@contextmanager
def judging(address: str, model: str) -> Iterator[tuple[str, list[float]]]:
    """The grader's address, and when it was asked. model: the chat model's name at the server's address."""
    chat, asked = server(address, "judge"), []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(time.monotonic())
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scores = []
            for record, answer in zip(body["records"], body["responses"], strict=True):
                turns = [{"role": "user", "content": record["prompt"]}]
                said = chat.post(
                    "/v1/chat/completions",
                    {"model": model, "messages": turns, "max_tokens": 12, "temperature": 0},
                )["choices"][0]["message"]["content"]
                words, known = answer.split(), said.strip(".").split()
                scores.append({"score": sum(word in known for word in words) / max(1, len(words)), "reason": said})
            raw = json.dumps({"scores": scores}).encode()
            with suppress(BrokenPipeError):  # the run has ended
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    grader = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=grader.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{grader.server_port}", asked
    finally:
        grader.shutdown()


def config_of(name: str, address: str, judge: str, trains: dict[str, Any]) -> dict[str, Any]:
    grpo = {"group": GROUP, "max_new_tokens": 12, "ahead": 1, "engine": "vllm", "vllm_url": address}
    return {
        "stage": "grpo",
        **trains,
        "data": {"train": str(FOLDER / "prompts.jsonl"), "max_length": 64},
        "grpo": {**grpo, "rewards": [judge], "mismatch": "stop", "mismatch_bound": APART},
        "batch": {"size": ANSWERS},
        "precision": "fp32",
        "duration": f"{STEPS} steps",
        "log_every": 1,
        "checkpoint": {"every": "1 steps", "keep": 2, "best": "none"},
        "output": str(FOLDER / name),
    }


def lines_of(run: Path, name: str) -> list[Row]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def steps_of(run: Path) -> list[Row]:
    return [row for row in lines_of(run, "trainer_log.jsonl") if "loss" in row]


def stop(config: dict[str, Any], asked: list[float], number: signal.Signals, after: int, *words: str) -> int:
    """Run until `after` steps are logged and the judge is asked about the next answers, which the server is then still
    drawing, and send the signal. Returns the exit code."""
    run, file = Path(config["output"]), FOLDER / "ahead.yaml"
    file.write_text(json.dumps(config))
    with (FOLDER / "stopped.txt").open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot", "train", file, *words], stdout=stream, stderr=subprocess.STDOUT
        )
        before = None
        while process.poll() is None:
            if before is None and len(steps_of(run)) >= after:
                before = len(asked)
            if before is not None and len(asked) > before:
                process.send_signal(number)
                return process.wait()
            time.sleep(0.005)
    raise SystemExit(f"the run ended by itself: see {stream.name}")


def asks(run: Path) -> list[list[int]]:
    """What the newest checkpoint asks for: step and number of each rollout."""
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((newest / "state.json").read_text())["stage"]["drawing"]


def checks(run: Path, codes: list[int], drawing: list[list[list[int]]]) -> dict[str, bool]:
    rows, third = steps_of(run), STEPS // 3
    first, last = (sum(row["reward"] for row in part) / third for part in (rows[:third], rows[-third:]))
    told = Counter((one["step"], one["group"], one["member"]) for one in lines_of(run, "answers.jsonl"))
    print(f"mean reward {first:.3f} in the first third, {last:.3f} in the last")
    return {
        "killed, then interrupted": codes == [-signal.SIGKILL, RESUMABLE],
        f"both checkpoints ask for rollouts: {drawing}": all(drawing),
        "every step once": [row["current_steps"] for row in rows] == list(range(1, STEPS + 1)),
        # The first two rollouts are both drawn at step 1.
        "every answer once": sum(told.values()) == STEPS * ANSWERS and max(told.values()) <= 2,
        f"engine and trainer within {APART:g} nats": all(row["mismatch"] <= APART for row in rows),
        "the policy moves between a draw and its update": any(abs(row["ratio"] - 1) > 1e-3 for row in rows[1:]),
        "the reward rises": last > first,
    }


def tried(name: str, words: list[str], judge: str, trains: dict[str, Any]) -> bool:
    """words: behind `vllm serve`. judge: the chat model's name there. trains: keys of the config."""
    words = [str(PYTHON.with_name("vllm")), "serve", *words, *WORDS]
    with (
        running(words, WORK / f"grpo-ahead-{name}.log", SETTINGS) as address,
        judging(address, judge) as (grader, asked),
    ):
        config, whole = (config_of(f"{name}-{one}", address, grader, trains) for one in ("cut", "whole"))
        run = Path(config["output"])
        codes, drawing = [], []
        for number, after, how in (
            (signal.SIGKILL, KILLED_AFTER, ()),
            (signal.SIGINT, INTERRUPTED_AFTER, ("--resume",)),
        ):
            codes.append(stop(config, asked, number, after, *how))
            drawing.append(asks(run))
        surefoot.train(config, resume=True, stream=io.StringIO())
        if judge == "judge":
            surefoot.train(whole, stream=io.StringIO())
    print(f"\nahead, {name}\n step  reward  ratio  mismatch  largest  sample size")
    for row in steps_of(run):
        told = f"{row['reward']:7.3f}  {row['ratio']:.3f}  {row['mismatch']:.1e}  {row['mismatch_most']:.1e}"
        print(f"{row['current_steps']:5d} {told}  {row['sample_size']:.4f}")
    if judge == "judge":
        beside(run, Path(whole["output"]))
    found = checks(run, codes, drawing)
    for what, right in found.items():
        print(f"{'ok   ' if right else 'WRONG'} {what}", flush=True)
    return all(found.values())


def beside(run: Path, whole: Path) -> None:
    """Print how near the run came to one in one go, which vLLM does not promise."""
    both = zip(lines_of(run, "answers.jsonl"), lines_of(whole, "answers.jsonl"), strict=True)
    same = sum(one["answer"] == other["answer"] for one, other in both)
    cut, other = (load_file(folder / "adapter_model.safetensors") for folder in (run, whole))
    apart = max(float((cut[name] - other[name]).abs().max()) for name in cut)
    print(
        f"{same} of {STEPS * ANSWERS} answers are those of a run in one go, and weights are at most {apart:.1e} apart"
    )


def main() -> int:
    install()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    things = ("owl", "heron", "trout", "elm", "rose", "tram", "oboe", "harp")
    rows = [json.dumps({"prompt": f"Where is the {thing}?"}) for thing in things]
    (FOLDER / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    chat = json.dumps({"name": "judge", "path": str(quickstart("dense"))})
    adapted = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "3", "--lora-modules", chat]
    adapter = {"model": str(BASE), "adapter": {"kind": "lora", "rank": 8}, "optim": {"lr": 1e-2}}
    right = [tried("adapter", [str(BASE), *adapted], "judge", adapter)]
    right.append(tried("all-weights", [str(untied())], "base", {"model": str(untied()), "optim": {"lr": 1e-3}}))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
