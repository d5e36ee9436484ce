"""The sides of `benchmarks/peers.py`, each run in a process (and an environment) of its own.

    python benchmarks/peer_arms.py ARM FOLDER SETTINGS      FOLDER: as peer_world.py makes it; prints one line of JSON

Every side trains the same examples, step by step in the same order, from the same weights, with AdamW at a constant
rate and the mean loss over the supervised tokens of a step. What a side does in a step is timed; peers are spared the
making of their batches, surefoot is not.

SETTINGS has "device", cpu or cuda. On cuda a step begins and ends with the device at rest, and memory is what torch
counts on it, from the start of the process on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from operator_groups import Tracer

Result = dict[str, Any]
_LIBRARIES = (
    *("torch", "transformers", "peft", "accelerate", "trl", "llamafactory"),
    *("liger-kernel", "unsloth", "triton", "flash-attn"),
)


class Clock:
    """Seconds, processor seconds, losses and gradient norms by step. traced: whether the last step is traced by
    operator, which makes it slower. Made after the imports: on a CPU memory is counted from there."""

    def __init__(self, asked: dict[str, Any]):
        gc.collect()
        self._cuda = asked["device"] == "cuda"
        self._before = 0 if self._cuda else _status("VmRSS")
        self._tracer = Tracer(asked["dimensions"]) if asked.get("traced") else None
        self._last = asked["steps"]
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.losses: list[float | None] = []
        self.norms: list[float | None] = []
        self._first = 0.0
        self._earlier = [(0, 0)]  # peaks, allocated and reserved

    def begin(self) -> None:
        if self._tracer and len(self.seconds) + 1 == self._last:
            self._tracer.start()
        self._wait()
        self._clocks = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self._clocks[0])
        self.processor.append(time.process_time() - self._clocks[1])
        self._first = self._first or _age()
        if self._tracer and len(self.seconds) == self._last:
            self._tracer.stop()

    def result(self) -> Result:
        import torch

        if self._cuda:
            self.keep_peak()
            memory = dict(zip(("memory", "reserved"), map(max, zip(*self._earlier, strict=True)), strict=True))
        else:
            memory = {"memory": _status("VmHWM") - self._before}
        return {
            "seconds": self.seconds,
            "processor": self.processor,
            "losses": self.losses,
            "norms": self.norms,
            **memory,
            "first_step": self._first,
            "threads": torch.get_num_threads(),
            "versions": _versions() | (_of_cuda() if self._cuda else {}),
            "operators": self._tracer.groups() if self._tracer else None,
        }

    def keep_peak(self) -> None:
        """Before somebody begins torch's marks anew."""
        if self._cuda:
            import torch

            self._earlier.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    def _wait(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()


def ours(folder: Path, asked: dict[str, Any]) -> Result:
    import peft  # noqa: F401  the imports of a run, so that they are in no side's memory
    import transformers  # noqa: F401

    from surefoot.config.load import load_config
    from surefoot.runs.profiling import Phases, arithmetic_of, product_rate, step_work
    from surefoot.runs.trial import ready
    from surefoot.system import hardware, process

    clock = Clock(asked)
    hardware.forget_peak = _told_first(hardware.forget_peak, clock)
    config = load_config(folder / "run.yaml", asked["overrides"]).config
    needed, phases = [], Phases()
    with ready(config, asked["steps"], phases) as one:
        arithmetic = arithmetic_of(one.plan, config.stage, folder / "base")
        for number in range(1, asked["steps"] + 1):
            clock.begin()
            batches = one.batches(number)
            report = one.step(number, batches)
            clock.end()
            clock.losses.append(report.loss)
            clock.norms.append(report.grad_norm)
            needed.append(arithmetic.flops(step_work(batches)).needed)
        done = clock.result()
        kernels = {name: choice.value for name, choice in vars(one.plan.kernels).items()}
        chosen = {"compute": one.plan.precision.compute.value, "kernels": kernels, "holes": process.holes()}
    return done | {
        "needed": needed,
        "rate": product_rate(arithmetic),
        "chosen": chosen,
        "start": phases.to_json(),
    }


def _told_first(forget: Callable[[str], None], clock: Clock) -> Callable[[str], None]:
    """A run forgets what its probes took at most; beside peers, who have none, it counts."""

    def forget_told(kind: str) -> None:
        clock.keep_peak()
        forget(kind)

    return forget_told


def trainer(folder: Path, asked: dict[str, Any]) -> Result:
    """HF Trainer + PEFT; liger: with Liger's kernels, flattened: rows without padding."""
    import peft  # noqa: F401
    from transformers import (
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
    )

    clock = Clock(asked)
    if asked.get("flattened"):
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    else:
        collator = DataCollatorForSeq2Seq(PreTrainedTokenizerFast.from_pretrained(folder / "base"), padding=True)
    model = _peer_model(folder, asked)
    found = _train(
        Trainer,
        clock,
        model=model,
        args=TrainingArguments(**_arguments(folder, asked), gradient_checkpointing=asked["checkpointing"]),
        train_dataset=_rows(folder, asked),
        data_collator=collator,
    )
    if asked.get("liger") and not _is_by_liger(model):
        raise RuntimeError("Trainer did not put Liger's kernels in: nothing of this side may be called by its name")
    return found


def _is_by_liger(model: Any) -> bool:
    """Whether head and loss are Liger's. HF's Trainer puts its kernels into the base below the adapter when it begins
    to train."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.forward.__module__.startswith("liger_kernel.")


def unsloth(folder: Path, asked: dict[str, Any]) -> Result:
    """HF Trainer as Unsloth patches it, over its own model, with the adapter that surefoot began with."""
    import unsloth  # noqa: F401  before the libraries that it patches

    # isort: split
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Trainer, TrainingArguments
    from unsloth import FastLanguageModel

    clock = Clock(asked)
    base, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder / "base"),
        max_seq_length=asked["length"],
        dtype=torch.bfloat16,
        load_in_4bit=False,
    )
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    model = FastLanguageModel.get_peft_model(base, **unsloth_adapter(config, asked["checkpointing"]))
    told = set_peft_model_state_dict(model, load_file(folder / "adapter" / "adapter_model.safetensors"))
    if told.unexpected_keys:
        raise RuntimeError(f"Unsloth's model has no place for {told.unexpected_keys[:3]} of the first adapter")
    return _train(
        Trainer,
        clock,
        model=model,
        args=TrainingArguments(**_arguments(folder, asked)),
        train_dataset=_rows(folder, asked),
        data_collator=DataCollatorForSeq2Seq(PreTrainedTokenizerFast.from_pretrained(folder / "base"), padding=True),
    )


def unsloth_adapter(config: dict[str, Any], checkpointing: bool) -> dict[str, Any]:
    """What `get_peft_model` is told. config: adapter_config.json."""
    return {
        "r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": config["lora_dropout"],
        "bias": config["bias"],
        "target_modules": sorted({name.rpartition(".")[2] for name in config["target_modules"]}),
        "use_gradient_checkpointing": "unsloth" if checkpointing else False,
        **({"use_dora": True} if config.get("use_dora") else {}),
    }


def trl(folder: Path, asked: dict[str, Any]) -> Result:
    """TRL's SFTTrainer, which masks by completion_mask."""
    import peft  # noqa: F401
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    clock = Clock(asked)
    examples = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in _rows(folder, asked)
    ]
    own = {"max_length": None, "completion_only_loss": True, "gradient_checkpointing": asked["checkpointing"]}
    return _train(
        SFTTrainer,
        clock,
        model=_peer_model(folder, asked),
        args=SFTConfig(**_arguments(folder, asked), **own),
        train_dataset=Dataset.from_list(examples),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "base"),
    )


def llamafactory(folder: Path, asked: dict[str, Any]) -> Result:
    """LLaMA-Factory, given the tokenized examples; the type of the weights is its own choice."""
    from datasets import Dataset, DatasetDict

    from llamafactory.train.tuner import run_exp  # isort: skip

    clock = Clock(asked)
    examples = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in _rows(folder, asked)]
    tokenized = folder / f"tokenized-{os.getpid()}"
    DatasetDict({"train": Dataset.from_list(examples)}).save_to_disk(str(tokenized))
    adapter = folder / "adapter"
    run_exp(
        {
            **_arguments(folder, asked),
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": str(folder / "base"),
            "dataset": "alpaca_en_demo",  # it asks for a name; what is tokenized already is what it reads
            "tokenized_path": str(tokenized),
            "template": "empty",
            "finetuning_type": "lora" if adapter.is_dir() else "full",
            **({"adapter_name_or_path": str(adapter)} if adapter.is_dir() else {}),
            "disable_shuffling": True,
            "disable_gradient_checkpointing": not asked["checkpointing"],
            "flash_attn": "sdpa",
            "report_to": "none",
        },
        callbacks=[_callback(clock)],
    )
    return clock.result()


def _train(trainer: Any, clock: Clock, **arguments: Any) -> Result:
    """trainer: HF's, or one derived from it; it takes the examples in the order in which they come."""
    from torch.utils.data import SequentialSampler

    class InOrder(trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(train_dataset or self.train_dataset)

    InOrder(**arguments, callbacks=[_callback(clock)]).train()
    return clock.result()


def _callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Told(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.end()

        def on_log(self, *args, logs=None, **kwargs):
            if logs and "loss" in logs:
                clock.losses.append(float(logs["loss"]))
                clock.norms.append(float(logs["grad_norm"]))

    return Told()


def _peer_model(folder: Path, asked: dict[str, Any]) -> Any:
    """The base with the adapter that surefoot began with. weights: the type it is held in."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[asked["weights"]]
    attention = "flash_attention_2" if asked.get("flattened") else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, attn_implementation=attention)
    if (folder / "adapter").is_dir():
        return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return model


def _arguments(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What every trainer on top of HF's is told."""
    micro = asked["micro"]
    return {
        "output_dir": str(folder / f"peer-{os.getpid()}"),
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
        "use_cpu": asked["device"] == "cpu",
        "remove_unused_columns": False,
        "dataloader_drop_last": False,
        **({"use_liger_kernel": True} if asked.get("liger") else {}),
        **({"torch_compile": True} if asked.get("compiled") else {}),
    }


def _rows(folder: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """grouped: within a step, examples of like lengths are together, so that its micro-batches are padded less; a step
    has the same examples either way."""
    steps = json.loads((folder / "examples.json").read_text())[: asked["steps"]]
    if asked["grouped"]:
        steps = [sorted(step, key=lambda row: len(row["input_ids"]), reverse=True) for step in steps]
    return [row for step in steps for row in step]


def _status(field: str) -> int:
    """Bytes of this process: VmRSS, resident now, or VmHWM, at the peak."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _of_cuda() -> dict[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu": properties.name, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


def _age() -> float:
    """Seconds since this process was started, however often it began another program."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


ARMS: dict[str, Callable[[Path, dict[str, Any]], Result]] = {
    "ours": ours,
    "trainer": trainer,
    "unsloth": unsloth,
    "trl": trl,
    "llamafactory": llamafactory,
}


def begin(arm: str, asked: dict[str, Any]) -> None:
    """surefoot begins again as `surefoot train` does, unless it is to be as a run from Python is."""
    if arm == "ours" and not asked.get("from_python"):
        from surefoot.system import process

        process.restart_without_thread_cache()


def main() -> None:
    arm, folder, asked = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    begin(arm, asked)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    found = ARMS[arm](folder, asked)
    with os.fdopen(answers, "w") as out:
        out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
