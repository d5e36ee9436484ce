"""Write trl_reward.json: what TRL's RewardTrainer makes of the pairs of `preference_models`.

Run by hand as make_trl_preference.py is, on the same models (TRL 1.16 when this was last done):

    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_reward.py MODELS
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from make_trl_preference import gradient_norm, padded
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from equality.preference_models import PAIRS

CENTER = 0.05
QUIET: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def recorded(models: Path, output: str, center: float | None) -> dict[str, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(models / "policy", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(models / "policy")
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.3, 0.3, model.config.hidden_size))
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=output, center_rewards_coefficient=center, **QUIET),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    inputs = padded([pair[0] for pair in PAIRS] + [pair[1] for pair in PAIRS])
    inputs.pop("completion_mask")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, model.config.pad_token_id)
    trainer.model.train()
    loss, outputs = trainer.compute_loss(trainer.model, dict(inputs), return_outputs=True)
    kept = ("accuracy", "margin", "mean_reward")
    return {
        "loss": float(loss),
        "scores": outputs.logits.squeeze(-1).tolist(),
        "metrics": {name: trainer._metrics["train"][name][-1] for name in kept},
        "grad_norm": gradient_norm(trainer.model, loss),
    }


if __name__ == "__main__":
    models = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as output:
        found = {
            "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
            "center": CENTER,
            "plain": recorded(models, output, None),
            "centered": recorded(models, output, CENTER),
        }
    path = Path(__file__).parent / "trl_reward.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
