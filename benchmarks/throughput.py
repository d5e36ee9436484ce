"""surefoot against HF Trainer + PEFT: same model, same examples in the same order, same dtype, in one run, in turns.

Parity comes first: the losses of all steps must agree before a time is printed. Times are per step without the first
two of each turn; the ratio is taken turn by turn, so that a machine that drifts slows both.

    python benchmarks/throughput.py [--data FILE.json] [--steps 12] [--turns 3] [--precision bf16] [--adapter lora]
                                    [--processor-time]

surefoot's side has the fast paths of its plan. --processor-time counts the processor seconds of this process instead of
the clock's, for a machine that is shared.

A random Llama (12 layers would take an hour here: 6 x 384) with a tokenizer trained on the data; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from bases import Shape, build_base
from surefoot.config.load import load_config
from surefoot.data.batching.order import step_examples
from surefoot.methods.examples import prepare_examples, sft_task
from surefoot.runs.load_models import load_models, planned_tokenizer
from surefoot.runs.make_plan import make_plan
from surefoot.runs.parity.fast_paths import planned_paths
from surefoot.runs.plan_with_data import lengths_of
from surefoot.training.step import train_step

WARM_UP = 2  # steps of each turn that are not counted
# The two sides add the same numbers in another order, in bf16 with other roundings in between, and drift apart as they
# train; a wrong mask or a wrong shift is off by tenths.
PARITY = {"fp32": 2e-4, "bf16": 2e-2}
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StepClock(TrainerCallback):
    """Seconds and loss of every optimizer step of HF's Trainer."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._started = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = self.now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(self.now() - self._started)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class InOrder(Trainer):
    """Examples in the order given, so that both sides see the same ones at the same step."""

    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)


def theirs(base: Path, rows: list[dict], config, precision: str, folder: Path, now: Callable[[], float]):
    """A Trainer over `rows`, ready to train; a fresh model each turn."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPE[precision], attn_implementation="sdpa")
    if config.adapter:
        torch.manual_seed(config.seed)
        model = get_peft_model(
            model,
            LoraConfig(
                r=config.adapter.rank,
                lora_alpha=int(config.adapter.alpha),
                target_modules="all-linear",
                use_dora=config.adapter.kind == "dora",
                task_type="CAUSAL_LM",
            ),
        )
    clock = StepClock(now)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch.size,
        max_steps=len(rows) // config.batch.size,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        max_grad_norm=config.optim.max_grad_norm,
        bf16=precision == "bf16",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=config.seed,
        remove_unused_columns=False,
        gradient_checkpointing=False,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        callbacks=[clock],
    )
    return trainer, clock


def ours(config, plan, base: Path, task, steps: int, now: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Seconds and losses of `steps` optimizer steps, batches included; a fresh model each turn."""
    loaded = load_models(config, plan, base, None)
    for path in planned_paths(plan):
        path.install(loaded.engine.model)
    seconds, losses = [], []
    for step in range(1, steps + 1):
        started = now()
        batches = task.step_batches(step)
        report = train_step(
            loaded.engine,
            task.objective,
            batches,
            step=step,
            lr=config.optim.lr,
            scale=None,
            settings=loaded.settings,
        )
        seconds.append(now() - started)
        losses.append(report.loss)
    return seconds, losses


def examples_in_order(config, task, steps: int) -> tuple[list[dict], int]:
    """The examples of our first steps as rows for HF's collator, and their real tokens from step WARM_UP on."""
    rows, tokens = [], 0
    for step in range(1, steps + 1):
        _, indices = step_examples(config.seed, step - 1, task.data.mixture, config.batch.size)
        for index in indices:
            example = task.data.train[int(index)]
            labels = example.ids.copy()
            labels[~example.supervised] = -100
            rows.append({"input_ids": example.ids.tolist(), "labels": labels.tolist()})
            tokens += len(example.ids) if step > WARM_UP else 0
    return rows, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/instruct/alpaca_en_demo.json"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--precision", choices=sorted(PARITY), default="bf16")
    parser.add_argument("--adapter", choices=["lora", "dora", "full"], default="lora")
    parser.add_argument("--processor-time", action="store_true", help="count processor seconds, not the clock's")
    options = parser.parse_args()
    if not options.data.is_file():
        sys.exit(f"{options.data}: no such file; name an alpaca .json with --data")
    texts = [" ".join(str(v) for v in row.values()) for row in json.loads(options.data.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build_base(folder / "base", texts, Shape(options.layers, options.hidden))
        compare(options, folder)


def compare(options: argparse.Namespace, folder: Path) -> None:
    base = folder / "base"
    (folder / "run.yaml").write_text(
        f"stage: sft\nmodel: {base}\noutput: {folder / 'run'}\nprecision: {options.precision}\nattention: sdpa\n"
        f"data: {{train: {options.data}, max_length: 512, template: alpaca}}\n"
        f"batch: {{size: {options.batch}}}\noptim: {{lr: 2e-4, schedule: constant, warmup: 0.0}}\n"
        + ("" if options.adapter == "full" else f"adapter: {{kind: {options.adapter}, rank: 32, alpha: 64}}\n")
    )
    config = load_config(folder / "run.yaml").config
    draft = make_plan(config, measure=False)
    tokenizer = planned_tokenizer(base, draft.tokenizer)
    data = prepare_examples(config, draft.tokenizer, tokenizer)
    plan = make_plan(config, lengths=lengths_of(config, data))
    task = sft_task(config, plan, data)
    rows, tokens = examples_in_order(config, task, options.steps)
    ratios, peer_rates, our_rates = [], [], []
    now = time.process_time if options.processor_time else time.perf_counter
    for turn in range(options.turns):
        trainer, clock = theirs(base, rows, config, options.precision, folder / "peer", now)
        trainer.train()
        seconds, losses = ours(config, plan, base, task, options.steps, now)
        worst = max(abs(a - b) for a, b in zip(losses, clock.losses, strict=True))
        if worst > PARITY[options.precision]:
            sys.exit(f"no parity, so no times: losses differ by up to {worst:.3g}\n{losses}\n{clock.losses}")
        peer, own = sum(clock.seconds[WARM_UP:]), sum(seconds[WARM_UP:])
        peer_rates.append(tokens / peer)
        our_rates.append(tokens / own)
        ratios.append(peer / own)
        print(
            f"turn {turn + 1}: losses agree to {worst:.1e}; HF + PEFT {tokens / peer:,.0f} tok/s, "
            f"surefoot {tokens / own:,.0f} tok/s, ratio {peer / own:.2f}",
            flush=True,
        )
    print(
        f"{options.adapter} {options.precision}, {options.layers} x {options.hidden}, batch {options.batch}: median "
        f"{statistics.median(peer_rates):,.0f} -> {statistics.median(our_rates):,.0f} real tokens/s, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
