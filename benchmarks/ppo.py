"""Stage ppo beside an older TRL's PPOv2Trainer: prompt and response tokens per second through rollout and update.

    python -m venv trl11                         # TRL 0.11.4 needs transformers before 4.47
    trl11/bin/pip install trl==0.11.4 transformers==4.46.3 accelerate==0.34.2
    python benchmarks/ppo.py --trl trl11/bin/python [--layers 6] [--hidden 384] [--batch 32] [--new 64] [--turns 3]

Same random Llama with its own tokenizer, same reward model (that base with a head), same prompts, full fine-tuning,
AdamW, one pass over every rollout, answers of the same greatest length at temperature 1. Both sides learn with
a policy, a reference, a critic and a reward model in memory. Sides take turns, each in a fresh process; the first two
updates of a process are not counted. TRL's answers always have the greatest length; of surefoot's, which may stop, only
the tokens that are there are counted. Beside wall time stands the processor time of the process, which other programs
on the machine stretch much less. --precision bf16 is each side's own: surefoot computes all passes in it, TRL 0.11 the
update's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fresh import told_by

Stamp = tuple[float, float]  # wall and processor seconds, or a rate of each
WARM_UP = 2  # updates of each process that are not counted
WORDS = ("heron", "river", "stone", "cloud", "lamp", "bridge", "apple", "garden", "window", "paper", "silver")
SHAPES = ("layers", "hidden", "batch", "micro", "prompt", "new", "updates", "precision")


def write_world(folder: Path, asked: argparse.Namespace) -> None:
    """Base, reward model in both layouts, prompts."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from bases import Shape, build_base

    prompts = [
        " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(asked.prompt))
        for number in range(asked.batch * (asked.updates + WARM_UP))
    ]
    build_base(folder / "base", prompts, Shape(asked.layers, asked.hidden))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    head = torch.randn(1, asked.hidden, generator=torch.Generator().manual_seed(1))
    shutil.copytree(folder / "base", folder / "reward")
    save_file(
        {"v_head.summary.weight": head, "v_head.summary.bias": torch.zeros(1)},
        folder / "reward" / "value_head.safetensors",
    )
    classifier = folder / "classifier"
    shutil.copytree(folder / "base", classifier)
    weights = load_file(classifier / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights | {"score.weight": head}, classifier / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((classifier / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"}}
    (classifier / "config.json").write_text(json.dumps(config))


def clocks() -> Stamp:
    return time.perf_counter(), time.process_time()


def rates(tokens: list[float], stamps: list[Stamp]) -> list[Stamp]:
    """Of every update its tokens per second of either clock."""
    return [
        (count / (end[0] - start[0]), count / (end[1] - start[1]))
        for count, start, end in zip(tokens, stamps, stamps[1:], strict=False)
    ]


def ours(folder: Path, asked: argparse.Namespace) -> list[Stamp]:
    import io

    import surefoot
    from surefoot.training import loop

    stamps, train_step = [clocks()], loop.train_step

    def timed(*arguments: Any, **keywords: Any) -> Any:
        report = train_step(*arguments, **keywords)
        stamps.append(clocks())
        return report

    loop.train_step = timed

    config: dict[str, Any] = {
        "stage": "ppo",
        "model": str(folder / "base"),
        "data": {"train": str(folder / "prompts.jsonl"), "template": "raw", "max_length": 512},
        "ppo": {"reward": str(folder / "reward"), "max_new_tokens": asked.new, "whiten": True, "critic_lr": 1e-5},
        "batch": {"size": asked.batch, "micro": asked.micro},
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "precision": asked.precision,
        "gradient_checkpointing": "off",
        "duration": f"{asked.updates + WARM_UP} steps",
        "checkpoint": {"every": "1000 steps", "best": "none"},
        "output": str(folder / "run"),
    }
    surefoot.train(config, overwrite=True, stream=io.StringIO())
    rows = map(json.loads, (folder / "run" / "trainer_log.jsonl").read_text().splitlines())
    return rates([row["step_tokens"] for row in rows if "loss" in row], stamps)


def theirs(folder: Path, asked: argparse.Namespace) -> list[Stamp]:
    """By TRL, in the interpreter that has it."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl import PPOv2Config, PPOv2Trainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base", padding_side="left")
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ids = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "base") for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(folder / "classifier", num_labels=1) for _ in range(2)
    )
    stamps: list[Stamp] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            stamps.append(clocks())

    config = PPOv2Config(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=asked.micro,
        gradient_accumulation_steps=asked.batch // asked.micro,
        local_rollout_forward_batch_size=asked.batch,
        bf16=asked.precision == "bf16",
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=asked.batch * (asked.updates + WARM_UP),
        response_length=asked.new,
        temperature=1.0,
        learning_rate=1e-5,
        num_sample_generations=0,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": ids})
    trainer = PPOv2Trainer(
        config=config,
        tokenizer=tokenizer,
        policy=policy,
        ref_policy=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        callbacks=[Clock()],
    )
    stamps.append(clocks())
    trainer.train()
    return rates([asked.batch * (statistics.mean(map(len, ids)) + asked.new)] * len(stamps), stamps)


def versions(python: str, names: list[str]) -> str:
    code = f"import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in {names}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def measure(python: str, side: str, folder: Path, asked: argparse.Namespace) -> Stamp:
    words = [python, __file__, "--side", side, "--folder", str(folder)]
    words += [f"--{name}={getattr(asked, name)}" for name in SHAPES]
    wall, processor = zip(*told_by(words)[WARM_UP:], strict=True)
    return statistics.median(wall), statistics.median(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="python of an environment with TRL 0.11")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=48, help="words of a prompt")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", choices=["surefoot", "trl"])
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps((ours if asked.side == "surefoot" else theirs)(asked.folder, asked)))
        return
    print(versions(sys.executable, ["torch", "transformers"]), "beside", versions(asked.trl, ["trl", "transformers"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder, asked)
        ratios: list[Stamp] = []
        for turn in range(asked.turns):
            own = measure(sys.executable, "surefoot", folder, asked)
            other = measure(asked.trl, "trl", folder, asked)
            ratios.append((own[0] / other[0], own[1] / other[1]))
            for name, one, two, ratio in zip(("wall", "processor"), own, other, ratios[-1], strict=True):
                told = f"surefoot {one:,.0f} tokens/s, TRL {two:,.0f}, ratio {ratio:.2f}"
                print(f"turn {turn + 1}, {name} time: {told}", flush=True)
        for name, found in zip(("wall", "processor"), zip(*ratios, strict=True), strict=True):
            print(f"{name} time: median {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
