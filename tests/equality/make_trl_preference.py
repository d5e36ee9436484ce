"""Write trl_preference.json: what TRL's own trainers make of one batch of pairs and one of judged answers.

Run by hand, with the interpreter of an environment that has TRL (1.16 when this was last done, with surefoot's versions
of torch and transformers), on models written by surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.preference_models MODELS
    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_preference.py MODELS

DPO's `sigmoid` of TRL 1.16 leaves label_smoothing out; its conservative form is taken from CPO's, given the differences
to the reference, and so is SimPO. Of a batch of one pair TRL's mean over pairs is that pair's loss, which `per_pair`
records.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from equality.preference_models import JUDGED, PAIRS, Answer

BETA = 0.3
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": ["sigmoid"]},
    "ipo": {"loss_type": ["ipo"]},
    "hinge": {"loss_type": ["hinge"]},
    **{name: {"loss_type": [name]} for name in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "discopop")},
    **{name: {"loss_type": [name]} for name in ("apo_zero", "apo_down")},
    **{name: {"loss_type": [name], "label_smoothing": 0.2} for name in ("robust", "exo_pair")},
    "sigmoid and sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
}
QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "beta": BETA}


def padded(answers: list[Answer]) -> dict[str, torch.Tensor]:
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    ids, mask, own = (torch.zeros(len(answers), longest, dtype=torch.long) for _ in range(3))
    for row, (prompt, answer) in enumerate(answers):
        tokens = [*prompt, *answer]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        own[row, len(prompt) : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": own}


def gradient_norm(model: torch.nn.Module, loss: torch.Tensor) -> float:
    model.zero_grad()
    loss.backward()
    return float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))


def recorded(trainer: Any, model: torch.nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    kept = ("rewards/", "logps/", "kl")
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith(kept)}
    return {"loss": float(loss), "grad_norm": gradient_norm(model, loss), "metrics": metrics}


def dpo(models: Path, output: str, words: dict[str, Any]) -> dict[str, Any]:
    policy, reference = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("policy", "reference"))
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(output_dir=output, **QUIET, **words),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(models / "policy"),
    )
    trainer.model.train()

    def loss_of(pairs: list[tuple[Answer, Answer]]) -> torch.Tensor:
        inputs = padded([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
        return trainer._compute_loss(trainer.model, inputs, False)

    alone = [float(loss_of([pair])) for pair in PAIRS]
    return {**recorded(trainer, trainer.model, loss_of(PAIRS)), "per_pair": alone}


def kto(models: Path, output: str, words: dict[str, Any]) -> dict[str, Any]:
    policy, reference = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("policy", "reference"))
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]
    trainer = KTOTrainer(
        model=policy,
        ref_model=reference,
        args=KTOConfig(output_dir=output, per_device_train_batch_size=2, **QUIET, **words),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(models / "policy"),
    )
    trainer.model.train()
    inputs = padded([answer for answer, _, _ in JUDGED])
    inputs |= {f"KL_{name}": value for name, value in padded([other for _, other, _ in JUDGED]).items()}
    inputs["label"] = torch.tensor([good for _, _, good in JUDGED])
    return recorded(trainer, trainer.model, trainer._compute_loss(trainer.model, inputs, False))


def without_reference(models: Path, output: str, kind: str, words: dict[str, Any]) -> dict[str, Any]:
    """orpo: the odds-ratio term and the log-probabilities alone, as TRL's cross entropy counts the prompt's tokens too.
    cpo: CPO or SimPO by its loss_type, with cpo_alpha times the cross entropy of the better answers."""
    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    trainer_class, config = (ORPOTrainer, ORPOConfig) if kind == "orpo" else (CPOTrainer, CPOConfig)
    trainer = trainer_class(
        model=policy,
        args=config(output_dir=output, **QUIET, **words),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(models / "policy"),
    )

    def parts_of(pairs: list[tuple[Answer, Answer]]) -> tuple[torch.Tensor, ...]:
        """The loss and, for each pair, the rewards of both answers."""
        found = padded([pair[0] for pair in pairs] + [pair[1] for pair in pairs])  # to one length
        found["labels"] = found["input_ids"].masked_fill(found.pop("completion_mask") == 0, -100)
        sides = {"chosen": slice(len(pairs)), "rejected": slice(len(pairs), None)}
        batch = {f"{side}_{name}": held[rows] for side, rows in sides.items() for name, held in found.items()}
        chosen, rejected, _, _, entropy = trainer.concatenated_forward(trainer.model, batch)[:5]
        if kind == "orpo":
            ratio, *rewards = trainer.odds_ratio_loss(chosen, rejected)[:3]
            return -ratio.mean(), *rewards
        losses, *rewards = trainer.cpo_loss(chosen, rejected)
        return losses.mean() + words["cpo_alpha"] * entropy, *rewards

    loss, chosen_rewards, rejected_rewards = parts_of(PAIRS)
    metrics = {"rewards/chosen": float(chosen_rewards.mean()), "rewards/rejected": float(rejected_rewards.mean())}
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    alone = [float(parts_of([pair])[0]) for pair in PAIRS]
    norm = gradient_norm(trainer.model, loss)
    return {"loss": float(loss), "grad_norm": norm, "metrics": metrics, "per_pair": alone}


def smoothed(models: Path, output: str, smoothing: float) -> dict[str, Any]:
    """CPO's loss on what DPO compares: differences to the reference in place of log-probabilities."""
    words = {"loss_type": "sigmoid", "label_smoothing": smoothing}
    trainer = CPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(models / "policy"),
        args=CPOConfig(output_dir=output, **QUIET, **words),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(models / "policy"),
    )
    chosen, rejected = torch.tensor([1.5, -2.0, 0.25, 30.0]), torch.tensor([0.5, 1.0, 0.25, -40.0])
    losses = trainer.cpo_loss(chosen, rejected)[0]
    return {"chosen_ratio": chosen.tolist(), "rejected_ratio": rejected.tolist(), "per_pair": losses.tolist()}


if __name__ == "__main__":
    models = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as output:
        found = {
            "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
            "beta": BETA,
            "pairs": {name: dpo(models, output, words) for name, words in DPO.items()},
            "simpo": without_reference(
                models, output, "cpo", {"loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0}
            ),
            "cpo": without_reference(
                models, output, "cpo", {"loss_type": "sigmoid", "label_smoothing": 0.2, "cpo_alpha": 0}
            ),
            "cpo and sft": without_reference(models, output, "cpo", {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
            "orpo": without_reference(models, output, "orpo", {}),
            "smoothing": {"label_smoothing": 0.2, **smoothed(models, output, 0.2)},
            "kto": kto(models, output, {"desirable_weight": 1.3, "undesirable_weight": 0.6}),
        }
    path = Path(__file__).parent / "trl_preference.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
