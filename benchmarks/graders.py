"""Steps of stage grpo with a vLLM server and a reward's server that both take a while: are groups scored while others
are drawn?

    python benchmarks/graders.py [--draw 2] [--grade 0.02] [--group 8] [--prompts 16] [--new 16] [--steps 3] [--turns 2]

vLLM is the stub of `ahead.py`, of which 64 answers are asked for at once; the reward's server waits `--grade` for each
answer of a request, and takes one request at a time, so asking in several requests alone is no faster. Sides take
turns: as surefoot does it, and with all answers scored after the last is drawn. A step lasts from one call of a
function, which gets all answers afterwards, to the next.
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
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import ahead
import surefoot
from bases import Shape, build_base
from surefoot.methods.rewards import terms


def grade(seconds: float, told: Any) -> None:
    class Handler(ahead.JsonHandler):
        def do_POST(self) -> None:
            answers = self.asked()["responses"]
            time.sleep(seconds * len(answers))
            self.answer({"scores": [sum(letter in "aeiou" for letter in text) / 9 for text in answers]})

    HTTPServer.request_queue_size = 128
    server = HTTPServer(("127.0.0.1", 0), Handler)
    told.put(server.server_port)
    server.serve_forever()


def seconds_of_steps(world: Path, name: str, ports: tuple[int, int], asked: argparse.Namespace) -> list[float]:
    drawer, grader = (f"http://127.0.0.1:{port}" for port in ports)
    sampling = {"group": asked.group, "max_new_tokens": asked.new, "temperature": 0.9, "engine": "vllm"}
    config = {
        "stage": "grpo",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 8},
        "data": {"train": str(world / "prompts.jsonl"), "max_length": 512 + asked.new},
        "grpo": {**sampling, "vllm_url": drawer, "rewards": [grader]},
        "batch": {"size": asked.group * asked.prompts},
        "precision": "fp32",
        "duration": f"{asked.steps + 1} steps",
        "checkpoint": {"every": "1000 steps"},
        "output": str(world / name),
    }
    at: list[float] = []

    def stamp(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        at.append(time.perf_counter())
        return [0.0] * len(responses)

    surefoot.train(config, reward=stamp, stream=io.StringIO())
    return [after - before for before, after in itertools.pairwise(at)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("draw", 2.0), ("grade", 0.02)):
        parser.add_argument(f"--{name}", type=float, default=value)
    for name, value in (("group", 8), ("prompts", 16), ("new", 16), ("steps", 3), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    told: Any = multiprocessing.Queue()
    ports = []
    for serve, seconds in ((ahead.serve, asked.draw), (grade, asked.grade)):
        multiprocessing.Process(target=serve, args=(seconds, told), daemon=True).start()
        ports.append(told.get())
    at_once = terms._AT_ONCE
    found: dict[str, list[float]] = {"as drawn": [], "afterwards": []}
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        prompts = [f"Say {ahead.WORDS[n % 8]} {n}." for n in range(asked.prompts * (asked.steps + 1))]
        build_base(world / "base", prompts, Shape(2, 64))
        (world / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        for turn in range(asked.turns):
            for side in found:
                terms._AT_ONCE = at_once if side == "as drawn" else 0
                found[side] += seconds_of_steps(world, f"{turn}-{side}", (ports[0], ports[1]), asked)
    for side, seconds in found.items():
        low, high = min(seconds), max(seconds)
        print(f"{side}: {statistics.median(seconds):.2f} s a step ({low:.2f} to {high:.2f}, {len(seconds)} steps)")


if __name__ == "__main__":
    main()
