"""Tiny runs of every stage, adapter and precision, for the harness of random kills and signals."""

import json
from pathlib import Path
from typing import Any

import yaml

from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama

STAGES = ("sft", "reward", "dpo", "ppo", "grpo")
ADAPTERS = ("lora", "dora", "full")
PRECISIONS = ("fp32", "bf16", "fp16")
COMBINATIONS = [(stage, adapter, precision) for stage in STAGES for adapter in ADAPTERS for precision in PRECISIONS]
STEPS = 6  # of two micro-batches; an epoch has two, the second one short
SAVE_EVERY = 2
SAVED = STEPS // SAVE_EVERY
SCORE = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]
"""


class Runs:
    """Makes configs in its folder, and of each combination one run that nothing disturbs."""

    def __init__(self, folder: Path, server: ForkServer):
        self.folder, self.server = folder, server
        self._straight: dict[tuple[str, str, str], Path] = {}
        tiny_llama(folder / "base", pad=True, attention_dropout=0.1)
        (folder / "score.py").write_text(SCORE)
        rows: dict[str, list[dict[str, str]]] = {"sft": [], "pairs": [], "ppo": []}
        for k in range(1, 9):
            prompt, answer = f"Say sky {k} times.", " ".join(["sky"] * (1 + k % 4))
            rows["sft"].append({"instruction": prompt, "output": answer})
            rows["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": "heron"})
            rows["ppo"].append({"prompt": prompt})
        for name, found in rows.items():
            (folder / f"{name}.json").write_text(json.dumps(found[:7]))
            (folder / f"{name}-eval.json").write_text(json.dumps(found[6:]))

    def config(self, combination: tuple[str, str, str], output: Path) -> str:
        stage, adapter, precision = combination
        data = {"sft": "sft", "ppo": "ppo", "grpo": "ppo"}.get(stage, "pairs")
        config: dict[str, Any] = {
            "stage": stage,
            "model": {"path": str(self.folder / "base"), "dropout": "own"},
            "data": {key: str(self.folder / f"{data}{end}.json") for key, end in (("train", ""), ("eval", "-eval"))},
            "precision": precision,
            "batch": {"size": 4, "micro": 2},
            "optim": {"lr": 3e-3},
            "duration": f"{STEPS} steps",
            "eval_every": "3 steps",
            "checkpoint": {"every": f"{SAVE_EVERY} steps", "keep": 2, "best": "none"},
            "output": str(output),
        }
        if adapter != "full":
            config["adapter"] = {"kind": adapter, "rank": 2, "alpha": 4}
        if stage == "ppo":
            score = f"{self.folder / 'score.py'}:vowels"
            config["ppo"] = {"reward": score, "max_new_tokens": 4, "rollout_batches": 2, "ema": 0.9}
        if stage == "grpo":
            score = f"{self.folder / 'score.py'}:vowels"
            config["grpo"] = {"rewards": [score, {"name": "json", "weight": 0}], "group": 2, "max_new_tokens": 4}
            config["grpo"] |= {"rollout_batches": 2, "redraw": 1, "kl": 0.1}
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def straight(self, combination: tuple[str, str, str]) -> Path:
        """The folder of the undisturbed run."""
        if combination not in self._straight:
            output = self.folder / "-".join(("straight", *combination))
            log = output.with_suffix(".txt")
            assert self.server.run(["train", self.config(combination, output)], log) == 0, log.read_text()[-3000:]
            self._straight[combination] = output
        return self._straight[combination]
