"""Write swift.json: what ms-swift itself makes of each command in swift_commands.py.

Translations of these commands are held against it. Run by hand, with the interpreter of surefoot's environment and a
folder SITE beside it that has ms-swift 4.6.0, TRL 0.29 and the small packages that they import (modelscope, datasets,
dacite, ... without torch, transformers or peft), on models written before. Nothing is replaced or downloaded:

    PYTHONPATH=tests .venv/bin/python -m equality.swift_commands MODELS
    PYTHONPATH=tests .venv/bin/python tests/equality/make_swift.py MODELS SITE

Per command: ids and labels of every example in the order of the file and the learning rate of every step. Where one
step takes all examples, its loss and gradient norm too.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[2])
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "USE_HF": "1", "MODELSCOPE_OFFLINE": "1"}

import datasets
import transformers
from swift.pipelines.train.pretrain import SwiftPretrain
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.pipelines.train.sft import SwiftSft

from equality.swift_commands import COMMANDS, words_of

HERE = Path(__file__).parent
PIPELINES = {"sft": SwiftSft, "pt": SwiftPretrain, "rlhf": SwiftRLHF}

# On a CPU in fp32, without looking for a newer model.
QUIET = (
    "--report_to none --save_strategy no --torch_dtype float32 --use_cpu true --logging_steps 1 --attn_impl eager "
    "--add_version false --gradient_checkpointing false --check_model false"
)


def reference(name: str, models: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as output:
        verb, *words = words_of(name, models, Path(output))
        pipeline = PIPELINES[verb]([*words, *QUIET.split()])
        kind = getattr(pipeline.args, "rlhf_type", None)
        data, _ = in_order(pipeline)
        examples = [example for row in data for example in encoded(row, kind)]
        rates: list[float] = []
        losses: list[float] = []
        step = transformers.Trainer.training_step

        def recording(self: transformers.Trainer, *given: Any, **named: Any) -> Any:
            if len(losses) % self.args.gradient_accumulation_steps == 0:
                rates.append(float(self.lr_scheduler.get_last_lr()[0]))
            loss = step(self, *given, **named)
            losses.append(float(loss))
            return loss

        transformers.Trainer.training_step = recording
        try:
            pipeline.run()
        finally:
            transformers.Trainer.training_step = step
        history = [row for row in pipeline.train_msg["log_history"] if "loss" in row]
    passes = len(losses) // len(history)
    whole = pipeline.args.per_device_train_batch_size * pipeline.args.gradient_accumulation_steps >= len(data)
    return {
        "examples": examples,
        "learning_rates": rates,
        "first_loss": sum(losses[:passes]) if whole else None,
        "first_grad_norm": history[0]["grad_norm"] if whole else None,
    }


def in_order(pipeline: SwiftSft) -> Any:
    """The data sets in the order of the file, which ms-swift shuffles."""
    shuffle = datasets.Dataset.shuffle
    datasets.Dataset.shuffle = lambda self, *given, **named: self
    try:
        return pipeline._prepare_dataset()
    finally:
        datasets.Dataset.shuffle = shuffle


def encoded(row: dict[str, Any], kind: str | None) -> list[dict[str, list[int]]]:
    """The example, or both of a pair. What KTO calls rejected is the answer to another prompt, for its KL."""
    parts = [""] if "input_ids" in row else ["chosen_"] if kind == "kto" else ["chosen_", "rejected_"]
    # a reward model has no labels
    return [{"ids": list(row[f"{part}input_ids"]), "labels": list(row.get(f"{part}labels", []))} for part in parts]


def main(models: Path) -> None:
    found = {name: reference(name, models) for name in COMMANDS}
    (HERE / "swift.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
