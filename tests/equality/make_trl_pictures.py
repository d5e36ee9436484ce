"""Write trl_pictures.json: what TRL's SFTTrainer and DPOTrainer make of one batch of records with pictures.

Run by hand as make_trl_preference.py is, on models written by surefoot's environment (TRL 1.16 when this was last
done):

    PYTHONPATH=src:tests .venv/bin/python -m equality.picture_models MODELS
    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_pictures.py MODELS

Per model: ids and labels as TRL's collators make them from the records and pictures, the batch's loss, and the norm of
each gradient of the language model, whose vision tower is frozen here as it is in surefoot's run.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl import Qwen3VLProcessor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from equality.picture_models import MODELS, prompts

BETA = 0.3
QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None}


def processor_of(folder: Path, name: str) -> ProcessorMixin:
    """The model's own. Its half for videos needs torchvision, and is not asked."""
    kind = Qwen2_5_VLProcessor if name == "qwen2_5_vl" else Qwen3VLProcessor
    kind.check_argument_for_proper_class = lambda *given: None
    video = type("NoVideo", (), {"merge_size": 2, "temporal_patch_size": 2, "model_input_names": ()})()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eye = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return kind(eye, tokenizer, video, chat_template=tokenizer.chat_template)


def opened(folder: Path) -> torch.nn.Module:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    return model


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def sft(models: Path, name: str, pictures: Path, output: str) -> dict[str, Any]:
    rows = [
        {"prompt": asked, "completion": answer(better), "images": [Image.open(pictures / one) for one in shown]}
        for asked, shown, better, _ in prompts()
    ]
    trainer = SFTTrainer(
        model=opened(models / name / "policy"),
        args=SFTConfig(output_dir=output, remove_unused_columns=False, **QUIET),
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "images": []}]),
        processing_class=processor_of(models / name / "policy", name),
    )
    trainer.model.train()
    batch = trainer.data_collator(rows)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    return {**tokens(batch, batch["labels"]), **measured(trainer.model, loss)}


def dpo(models: Path, name: str, pictures: Path, output: str) -> dict[str, Any]:
    rows = [
        {
            "prompt": asked,
            "chosen": answer(better),
            "rejected": answer(worse),
            "images": [Image.open(pictures / one) for one in shown],
        }
        for asked, shown, better, worse in prompts()
    ]
    trainer = DPOTrainer(
        model=opened(models / name / "policy"),
        ref_model=opened(models / name / "reference"),
        args=DPOConfig(output_dir=output, remove_unused_columns=False, beta=BETA, **QUIET),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c", "images": []}]),
        processing_class=processor_of(models / name / "policy", name),
    )
    trainer.model.train()
    batch = trainer.data_collator(rows)
    loss = trainer._compute_loss(trainer.model, batch, False)
    kept = ("rewards/", "logps/")
    metrics = {key: values[-1] for key, values in trainer._metrics["train"].items() if key.startswith(kept)}
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    return {**tokens(batch, labels), **measured(trainer.model, loss), "metrics": metrics}


def tokens(batch: dict[str, torch.Tensor], labels: torch.Tensor) -> dict[str, list[list[int]]]:
    rows = list(zip(batch["input_ids"], labels, batch["attention_mask"].bool(), strict=True))
    return {
        "ids": [ids[kept].tolist() for ids, _, kept in rows],
        "labels": [wanted[kept].tolist() for _, wanted, kept in rows],
    }


def measured(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    loss.backward()
    norms = {name: float(one.grad.norm()) for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": float(loss), "gradients": norms}


if __name__ == "__main__":
    models = Path(sys.argv[1])
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("trl", "transformers", "torch")}}
    with tempfile.TemporaryDirectory() as output:
        for name in MODELS:
            where = (models, name, models / "pictures", output)
            found[name] = {"sft": sft(*where), "dpo": dpo(*where)}
    path = Path(__file__).parent / "trl_pictures.json"
    path.write_text(json.dumps(found | {"beta": BETA}, separators=(",", ":")) + "\n")
