"""Steps of stage grpo with a vLLM server that takes a while, with `grpo.ahead` 0 and 1: does it draw while the trainer
trains?

    python benchmarks/ahead.py [--seconds 2] [--layers 6] [--hidden 256] [--group 8] [--prompts 4] [--new 48]
                               [--steps 8] [--turns 3]

The server is a stub in a process of its own that waits `--seconds` before each answer and tells no log-probabilities,
so it takes no processor time. Sides take turns; a step lasts from one call of the reward to the next, and the first two
calls are not counted.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import surefoot
from bases import Shape, build_base

WORDS = ("heron", "river", "stone", "cloud", "lamp", "bridge", "apple", "garden")
WARM_UP = 2  # rollouts that are not counted


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, and says nothing on the screen."""

    def asked(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")

    def answer(self, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(seconds: float, told: Any) -> None:
    """Answer as vLLM 0.32 without processed log-probabilities; puts the port into `told`."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "base"}]})

        def do_POST(self) -> None:
            body = self.asked()
            if self.path != "/inference/v1/generate":
                self.answer("Success")
                return
            sampling = body["sampling_params"]
            ids = [20 + (sampling["seed"] >> place % 24) % 200 for place in range(sampling["max_tokens"])]
            if len(ids) > 1:  # the one that asks for a single token finds out which log-probabilities are told
                time.sleep(seconds)
            content = [{"token_id": one, "logprob": -1.0, "top_logprobs": []} for one in ids]
            spans = [{"version": "default", "start": 0, "end": len(ids)}]
            choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}
            self.answer({"model": body["model"], "choices": [choice]})

    ThreadingHTTPServer.request_queue_size = 128  # all answers of a rollout are asked for at once
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.put(server.server_port)
    server.serve_forever()


def rollouts_of(steps: int) -> int:
    """How many rollouts have so many counted steps between them."""
    return WARM_UP + steps + 1


def seconds_of_steps(world: Path, name: str, ahead: int, port: int, asked: argparse.Namespace) -> list[float]:
    config = {
        "stage": "grpo",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 16},
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 512 + asked.new},
        "grpo": {
            "group": asked.group,
            "max_new_tokens": asked.new,
            "temperature": 0.9,
            "engine": "vllm",
            "vllm_url": f"http://127.0.0.1:{port}",
            "ahead": ahead,
        },
        "batch": {"size": asked.group * asked.prompts},
        "precision": "fp32",
        "duration": f"{rollouts_of(asked.steps)} steps",
        "checkpoint": {"every": "1000 steps"},
        "output": str(world / name),
    }
    at: list[float] = []

    def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        at.append(time.perf_counter())
        return [sum(letter in "aeiou" for letter in text) / 9 for text in responses]

    surefoot.train(config, reward=score, stream=io.StringIO())
    return [after - before for before, after in itertools.pairwise(at[WARM_UP:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=2.0)
    for name, value in (("layers", 6), ("hidden", 256), ("group", 8), ("prompts", 4), ("new", 48), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error("--steps: at least 1 is needed for a median")
    told: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(asked.seconds, told), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        world, port = Path(folder), told.get()
        prompts = [
            f"Say {WORDS[n % 8]} {WORDS[n * 3 % 8]} {n}." for n in range(asked.prompts * rollouts_of(asked.steps))
        ]
        build_base(world / "base", prompts, Shape(asked.layers, asked.hidden))
        (world / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        found: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(asked.turns):
            for ahead in found:
                found[ahead] += seconds_of_steps(world, f"{turn}-{ahead}", ahead, port, asked)
    server.terminate()
    for ahead, seconds in found.items():
        low, high = min(seconds), max(seconds)
        print(
            f"ahead {ahead}: {statistics.median(seconds):.2f} s a step ({low:.2f} to {high:.2f}, {len(seconds)} steps)"
        )


if __name__ == "__main__":
    main()
