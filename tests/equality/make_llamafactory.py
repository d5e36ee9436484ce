"""Write llamafactory.json: what LLaMA-Factory itself makes of each config in llamafactory/.

Translations of these configs are held against it. Run by hand, with the interpreter of an environment that has
LLaMA-Factory: 0.9.5 when this was last done, with surefoot's versions of torch and transformers (5.23; it asks for
5.6 or older, which read the files of some tokenizers otherwise), on models written by surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.models MODELS
    DISABLE_VERSION_CHECK=1 OTHER/bin/python tests/equality/make_llamafactory.py MODELS

Per config: ids and labels of every example in the order of the file and the learning rate of every step. Where one step
takes all examples, so that their order does not matter, its loss and gradient norm too.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
import yaml
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from llamafactory.train.tuner import run_exp

HERE = Path(__file__).parent


def reference(config: Path, models: Path) -> dict[str, Any]:
    words = yaml.safe_load(config.read_text())
    words |= {
        "model_name_or_path": str(models / words["model_name_or_path"]),
        "dataset_dir": str(HERE),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "overwrite_cache": True,
        "use_cpu": True,
        "disable_gradient_checkpointing": True,
    }
    if "warmup_ratio" in words:  # transformers 5.23 has one key for both
        words["warmup_steps"] = words.pop("warmup_ratio")
    with tempfile.TemporaryDirectory() as output, unrounded_losses() as micro_losses:
        words["output_dir"] = output
        examples = tokenized(dict(words))
        run_exp(dict(words))
        history = json.loads((Path(output) / "trainer_state.json").read_text())["log_history"]
    steps = [row for row in history if "loss" in row]
    first = micro_losses[: len(micro_losses) // len(steps)] if len(examples) == batch_size(words) else None
    return {
        "examples": examples,
        "learning_rates": [row["learning_rate"] for row in steps],
        "first_loss": sum(first) if first else None,
        "first_grad_norm": steps[0]["grad_norm"] if first else None,
    }


def batch_size(words: dict[str, Any]) -> int:
    return words["per_device_train_batch_size"] * words["gradient_accumulation_steps"]


@contextmanager
def unrounded_losses() -> Iterator[list[float]]:
    """The trainer logs four decimals. What each of its micro-steps returns is that part of the step's loss."""
    found: list[float] = []
    step = transformers.Trainer.training_step

    def recording(*arguments: Any, **more: Any) -> Any:
        loss = step(*arguments, **more)
        found.append(float(loss))
        return loss

    transformers.Trainer.training_step = recording
    try:
        yield found
    finally:
        transformers.Trainer.training_step = step


def tokenized(words: dict[str, Any]) -> list[dict[str, list[int]]]:
    model_args, data_args, training_args, _, _ = get_train_args(words)
    module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
    data = get_dataset(template, model_args, data_args, training_args, stage="sft", **module)["train_dataset"]
    return [{"ids": row["input_ids"], "labels": row["labels"]} for row in data]


if __name__ == "__main__":
    found = {path.stem: reference(path, Path(sys.argv[1])) for path in sorted((HERE / "llamafactory").glob("*.yaml"))}
    (HERE / "llamafactory.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
