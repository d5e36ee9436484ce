"""Stage grpo with a real vLLM on this machine's CPU, which an adapter and then all weights are brought to.

    make grpo-vllm

Installs vLLM into build/vllm at the first call (some 3 GB, as `make served` does), serves the quickstart's model, and
trains it there by GRPO for answers with many vowels: with an adapter, with all weights, and with an adapter among the
tokens that top_p and top_k leave. Prints a line for each step; the exit code is 1 where engine and trainer are further
apart than rounding explains, the reward does not rise, or the server answers with other weights than it was sent. Some
5 minutes on two cores, without the installation.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from served import PYTHON, ROOT, WORK, install, running
from surefoot.models.generate import Decoding
from surefoot.models.vllm import VllmRollouts
from surefoot.system.errors import EnvironmentFault
from surefoot.system.posting import server

BASE = ROOT / "src" / "surefoot" / "commands" / "quickstart" / "base"
APART = 1e-4  # nats; both compute in fp32, summed in another order
STEPS = 12
WORDS = ["--served-model-name", "base", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
WORDS += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SETTINGS |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
RUNS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": {"kind": "lora", "rank": 8}, "optim": {"lr": 1e-2}},
    "all weights": {"optim": {"lr": 1e-3}},
    "adapter, top_p and top_k": {
        "adapter": {"kind": "lora", "rank": 8},
        "optim": {"lr": 1e-2},
        "grpo": {"top_p": 0.9, "top_k": 20, "temperature": 0.9, "correction": "token_truncate"},
    },
}


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in responses]


def untied() -> Path:
    """The quickstart's model with a head of its own: of one that is shared with the embedding, vLLM 0.32 on a CPU keeps
    the old copy where all weights are loaded."""
    folder = WORK / "grpo" / "untied"
    if not (folder / "model.safetensors").is_file():
        model = AutoModelForCausalLM.from_pretrained(BASE, tie_word_embeddings=False)
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def trained(name: str, base: Path, address: str) -> list[dict[str, Any]]:
    """The log's rows of a run whose answers the server writes."""
    folder = WORK / "grpo"
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    rows = [
        json.dumps({"prompt": f"Where is the {thing}?"}) for thing in ("owl", "heron", "trout", "elm", "rose", "tram")
    ]
    prompts.write_text("\n".join(rows) + "\n")
    asked = RUNS[name]
    output = folder / name.replace(" ", "-").replace(",", "")
    config = {
        "stage": "grpo",
        "model": str(base),
        "data": {"train": str(prompts), "max_length": 64},
        "batch": {"size": 32},
        "precision": "fp32",
        "duration": f"{STEPS} steps",
        "output": str(output),
        **asked,
    }
    shared = {"group": 8, "max_new_tokens": 12, "engine": "vllm", "vllm_url": address, "mismatch": "stop"}
    config["grpo"] = {**shared, "mismatch_bound": APART, **asked.get("grpo", {})}
    surefoot.train(config, reward=vowels, overwrite=True, stream=io.StringIO())
    lines = map(json.loads, (output / "trainer_log.jsonl").read_text().splitlines())
    return [row for row in lines if "loss" in row]


def shown(name: str, rows: list[dict[str, Any]]) -> bool:
    print(f"\n{name}\n step  reward  mismatch  largest   seconds")
    for row in rows:
        numbers = f"{row['reward']:7.3f}  {row['mismatch']:.1e}  {row['mismatch_most']:.1e}"
        print(f"{row['current_steps']:5d} {numbers}  {row['elapsed_time']}")
    third = len(rows) // 3
    first, last = (sum(row["reward"] for row in part) / third for part in (rows[:third], rows[-third:]))
    right = last > first and all(row["mismatch"] <= APART for row in rows)
    print(
        f"{'ok   ' if right else 'WRONG'} mean reward {first:.3f} in the first third, {last:.3f} in the last",
        flush=True,
    )
    return right


def refuses_other_weights(address: str) -> bool:
    """Somebody gives the server's weights another name: what it then draws is refused."""
    asked = Decoding(4, frozenset(), 0, temperature=1.0)
    client = VllmRollouts(server(address, "grpo.vllm_url"))
    client.answer([[5, 6]], asked)
    server(address, "grpo.vllm_url").post("/update_weight_version", {"new_version": "another-run"})
    try:
        client.answer([[5, 6]], asked)
    except EnvironmentFault as fault:
        print(f"\nok    {fault}")
        return True
    print("\nWRONG: an answer by other weights was taken")
    return False


def main() -> int:
    install()
    WORK.mkdir(parents=True, exist_ok=True)
    right = []
    for names, base, more in (
        (("adapter", "adapter, top_p and top_k"), BASE, ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]),
        (("all weights",), untied(), []),
    ):
        words = [str(PYTHON.with_name("vllm")), "serve", str(base), *more, *WORDS]
        with running(words, WORK / "grpo.log", SETTINGS) as address:
            right += [shown(name, trained(name, base, address)) for name in names]
            right.append(refuses_other_weights(address))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
