"""Write trl.json: what TRL itself makes of each config in trl/, as `trl sft --config` reads and trains it.

Translations of these configs are held against it. Run by hand, with the interpreter of an environment that has TRL
(1.16 when this was last done, with surefoot's versions of torch, transformers and peft), on models written by
surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.models MODELS
    OTHER/bin/python tests/equality/make_trl.py MODELS

Per config: ids and labels of every example in the order of the file, as the trainer's own collator returns them, and
the learning rate of every step. Where one step takes all examples, so that their order does not matter, also the loss
of every step and the gradient norm of the first.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from datasets import load_dataset
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

HERE = Path(__file__).parent
RUN = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}


class Recorded(SFTTrainer):
    """The trainer logs rounded losses. What each of its micro-steps returns is that part of the step's loss."""

    def __init__(self, **more: Any):
        self.micro_losses: list[float] = []
        super().__init__(**more)

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        loss = super().training_step(*arguments, **more)
        self.micro_losses.append(float(loss))
        return loss


def reference(config: Path, models: Path) -> dict[str, Any]:
    words = yaml.safe_load(config.read_text()) | RUN
    words["model_name_or_path"] = str(models / words["model_name_or_path"])
    if "warmup_ratio" in words:  # transformers 5.23 has one key for both
        words["warmup_steps"] = words.pop("warmup_ratio")
    for source in words.get("datasets", []):
        source["data_files"] = str(HERE / source["data_files"])
    for key in ("dataset_name", "chat_template_path"):
        if key in words:
            words[key] = str(HERE / words[key])
    with tempfile.TemporaryDirectory() as output:
        path = Path(output) / "run.yaml"
        path.write_text(yaml.safe_dump(words | {"output_dir": output}))
        trainer = built(path)
        examples = [collated(trainer, index) for index in range(len(trainer.train_dataset))]
        trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    size = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    passes = len(trainer.micro_losses) // len(steps)
    alone = len(examples) == size
    losses = [sum(trainer.micro_losses[at * passes : (at + 1) * passes]) for at in range(len(steps))]
    return {
        "examples": examples,
        "learning_rates": [row["learning_rate"] for row in steps],
        "losses": losses if alone else None,
        "first_grad_norm": steps[0]["grad_norm"] if alone else None,
    }


def built(path: Path) -> Recorded:
    """As trl/scripts/sft.py builds it."""
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, mixture = parser.parse_args_and_config(["--config", str(path)])
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    data = get_dataset(mixture) if mixture.datasets else load_dataset(script.dataset_name)
    return Recorded(
        model=model.model_name_or_path,
        args=training,
        train_dataset=data[script.dataset_train_split],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


def collated(trainer: SFTTrainer, index: int) -> dict[str, list[int]]:
    row = {key: value for key, value in trainer.train_dataset[index].items() if key in ("input_ids", "labels")}
    batch = trainer.data_collator([row])
    kept = batch["attention_mask"][0].bool()
    return {"ids": batch["input_ids"][0][kept].tolist(), "labels": batch["labels"][0][kept].tolist()}


if __name__ == "__main__":
    found = {path.stem: reference(path, Path(sys.argv[1])) for path in sorted((HERE / "trl").glob("*.yaml"))}
    (HERE / "trl.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
