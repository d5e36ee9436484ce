"""The sides of `benchmarks/peers.py`, each run in a process (and an environment) of its own.

    python benchmarks/peer_arms.py ARM FOLDER      FOLDER: as peers.py writes it; prints one line of JSON

Every side trains the same examples, step by step in the same order, from the same weights, with AdamW at a constant
rate and the mean loss over the supervised tokens of a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def peak_memory() -> int:
    """Bytes at the peak of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ours(folder: Path, asked: dict[str, Any], started: float) -> Result:
    from surefoot.config.load import load_config
    from surefoot.stages.trial import ready

    before = resident()
    config = load_config(folder / "run.yaml", asked["overrides"]).config
    steps = asked["steps"]
    seconds, processor, losses = [], [], []
    with ready(config, steps) as one:
        for number in range(1, steps + 1):
            clocks = time.perf_counter(), time.process_time()
            losses.append(one.step(number, one.batches(number)).loss)
            seconds.append(time.perf_counter() - clocks[0])
            processor.append(time.process_time() - clocks[1])
            if number == 1:
                first = time.perf_counter() - started
    return result(seconds, processor, losses, before, first)


def trainer(folder: Path, asked: dict[str, Any], started: float) -> Result:
    """HF Trainer + PEFT."""
    import torch
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments

    before = resident()
    torch.set_num_threads(asked["threads"])
    clock = step_clock(started)

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "base")
    InOrder(
        model=peer_model(folder, asked),
        args=TrainingArguments(**arguments(folder, asked), gradient_checkpointing=asked["checkpointing"]),
        train_dataset=rows(folder, asked),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        callbacks=[clock],
    ).train()
    return result(clock.seconds, clock.processor, clock.losses, before, clock.first)


def trl(folder: Path, asked: dict[str, Any], started: float) -> Result:
    """TRL's SFTTrainer, which masks by completion_mask."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    before = resident()
    torch.set_num_threads(asked["threads"])
    clock = step_clock(started)

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    examples = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in rows(folder, asked)
    ]
    InOrder(
        model=peer_model(folder, asked),
        args=SFTConfig(
            **arguments(folder, asked),
            gradient_checkpointing=asked["checkpointing"],
            max_length=None,
            completion_only_loss=True,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "base"),
        callbacks=[clock],
    ).train()
    return result(clock.seconds, clock.processor, clock.losses, before, clock.first)


def llamafactory(folder: Path, asked: dict[str, Any], started: float) -> Result:
    """LLaMA-Factory, given the tokenised examples; the type of the weights is its own choice."""
    import torch
    from datasets import Dataset, DatasetDict

    from llamafactory.train.tuner import run_exp  # isort: skip

    before = resident()
    torch.set_num_threads(asked["threads"])
    clock = step_clock(started)
    examples = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows(folder, asked)]
    tokenised = folder / f"tokenised-{os.getpid()}"
    DatasetDict({"train": Dataset.from_list(examples)}).save_to_disk(str(tokenised))
    adapter = folder / "adapter"
    run_exp(
        {
            **arguments(folder, asked),
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": str(folder / "base"),
            "tokenized_path": str(tokenised),
            "template": "empty",
            "finetuning_type": "lora" if adapter.is_dir() else "full",
            **({"adapter_name_or_path": str(adapter)} if adapter.is_dir() else {}),
            "disable_shuffling": True,
            "disable_gradient_checkpointing": not asked["checkpointing"],
            "flash_attn": "sdpa",
            "report_to": "none",
        },
        callbacks=[clock],
    )
    return result(clock.seconds, clock.processor, clock.losses, before, clock.first)


def peer_model(folder: Path, asked: dict[str, Any]) -> Any:
    """The base with the adapter that surefoot began with. weights: the type it is held in."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[asked["weights"]]
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, attn_implementation="sdpa")
    if (folder / "adapter").is_dir():
        return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return model


def arguments(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    micro = asked["micro"]
    return {
        "output_dir": str(folder / "peer"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": asked["batch"] // micro,
        "max_steps": asked["steps"],
        "learning_rate": asked["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": asked["autocast"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "dataloader_drop_last": False,
    }


def rows(folder: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """grouped: within a step, examples of like lengths are together, so that its micro-batches are padded less; a step
    has the same examples either way."""
    steps = json.loads((folder / "examples.json").read_text())[: asked["steps"]]
    if asked["grouped"]:
        steps = [sorted(step, key=lambda row: len(row["input_ids"]), reverse=True) for step in steps]
    return [row for step in steps for row in step]


def step_clock(started: float) -> Any:
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        """Seconds, processor seconds and loss of every optimizer step; reading the batch is not among them."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.processor: list[float] = []
            self.losses: list[float] = []
            self.first = 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            self._clocks = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds.append(time.perf_counter() - self._clocks[0])
            self.processor.append(time.process_time() - self._clocks[1])
            self.first = self.first or time.perf_counter() - started

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                self.losses.append(float(logs["loss"]))

    return StepClock()


def result(seconds: list[float], processor: list[float], losses: list[Any], before: int, first: float) -> Result:
    return {
        "seconds": seconds,
        "processor": processor,
        "losses": losses,
        "memory": peak_memory() - before,
        "first_step": first,
    }


ARMS: dict[str, Callable[[Path, dict[str, Any], float], Result]] = {
    "ours": ours,
    "trainer": trainer,
    "trl": trl,
    "llamafactory": llamafactory,
}


def main() -> None:
    started = time.perf_counter()
    arm, folder, asked = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    found = ARMS[arm](folder, asked, started)
    with os.fdopen(answers, "w") as out:
        out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
