#!/usr/bin/env python3
"""Fine-tune a small chat model with LoRA and compare its answers: `python simple_finetune.py --model M --data D`.

bf16 where the machine computes it fast, else fp32: never fp16 weights under a gradient scaler, which cannot unscale
their gradients. Started again, it goes on where it stopped.
"""

import argparse
import subprocess
import sys

import surefoot
from surefoot.system.errors import SurefootError

MODEL_NAME = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
DATA = "yahma/alpaca-cleaned"
PROMPT = "Explain in one sentence what fine-tuning a language model means."


def answer(*model: str) -> None:
    subprocess.run([sys.executable, "-m", "surefoot", "generate", *model, "--prompt", PROMPT], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL_NAME)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--output", default="./simple-finetuned")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max-samples", type=int, default=500)
    asked = parser.parse_args()
    config = {
        "stage": "sft",
        "model": asked.model,
        "adapter": {"kind": "lora", "rank": 16, "alpha": 32},
        "data": {"train": asked.data, "max_samples": asked.max_samples},
        "batch": {"size": 8},
        "duration": f"{asked.epochs:g} epochs",
        "output": asked.output,
    }
    try:
        finished = surefoot.train(config, resume=True).finished
    except SurefootError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if not finished:
        sys.exit(75)
    print("--- before", flush=True)
    answer(asked.model)
    print("--- after", flush=True)
    answer(asked.output)
