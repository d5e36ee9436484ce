"""Run a training script as it stands, and write down what its trainer did: SCRIPT OUT.json.

In a process of its own, since the script finds `datasets` in stand_in/, and transformers remembers that it did.
"""

import json
import runpy
import sys
from pathlib import Path

import transformers


def main(script: str, out: str) -> None:
    losses: list[float] = []
    step = transformers.Trainer.training_step

    def recording(*arguments, **more):
        loss = step(*arguments, **more)
        losses.append(float(loss))
        return loss

    transformers.Trainer.training_step = recording
    trainer = runpy.run_path(script, run_name="__main__")["trainer"]
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    found = {
        "examples": [
            {"ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()} for batch in batches
        ],
        "learning_rates": [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row],
        "losses": losses,
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
