"""Write axolotl.json: what Axolotl itself makes of each config in axolotl/.

Translations of these configs are held against it. Run by hand, on models written by surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.models MODELS
    PYTHONPATH=tests:OTHER/site-packages AXOLOTL_DO_NOT_TRACK=1 .venv/bin/python tests/equality/make_axolotl.py MODELS

OTHER/site-packages has Axolotl (0.19.0 when this was last done) and what it imports and surefoot's environment lacks,
each installed with `pip install --no-deps --target`: accelerate, addict, art, axolotl-contribs-lgpl,
axolotl-contribs-mit, datasets, fastcore, fire, numba, posthog, schedulefree, torchao, trl 1.8.0, and what these ask
for. torch, transformers and peft are surefoot's own. triton (kernels) and evaluate (scores) are empty: nothing that is
compared passes through them.

Per config: ids and labels of every example in the order of the file, as Axolotl loads, tokenizes and filters them, and
the learning rate of every step of its trainer. Where one step takes all examples, so that their order does not matter,
its loss and gradient norm, and of each of its forward passes the loss and the number of learned tokens. With
sample_packing the rows of examples of each batch of its sampler. LoRA's A is a function of layer and module.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch._inductor  # noqa: F401 - before triton is empty
import transformers
import yaml

HERE = Path(__file__).parent
EMPTY = ("triton", "evaluate")
RUN = {
    "logging_steps": 1,
    "save_strategy": "no",
    "shuffle_merged_datasets": False,  # the order of the file
    "dataset_num_proc": 1,
    # kernels of a GPU that an adapter would switch on, in the classes of all models that follow
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
}


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules for kernels on a GPU, and for scores, that Axolotl imports and does not use here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in EMPTY else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, Empty())

from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import load_datasets  # noqa: E402
from axolotl.train import setup_model_and_trainer  # noqa: E402

from equality.fixed_adapter import a_values  # noqa: E402


def reference(config: Path, models: Path) -> dict[str, Any]:
    words = yaml.safe_load(config.read_text()) | RUN
    words["base_model"] = str(models / words["base_model"])
    for source in words["datasets"]:
        source["path"] = str(HERE / source["path"])
    with tempfile.TemporaryDirectory() as output, recorded_passes() as passes:
        path = Path(output) / "run.yaml"
        path.write_text(yaml.safe_dump(words | {"output_dir": output, "dataset_prepared_path": f"{output}/data"}))
        cfg = load_cfg(str(path))
        data = load_datasets(cfg=cfg)
        examples = [{"ids": row["input_ids"], "labels": row["labels"]} for row in data.train_dataset]
        trainer, model, *_ = setup_model_and_trainer(cfg, data)
        set_adapter(model)
        batches = packed_batches(trainer) if cfg.sample_packing else None
        trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    number = words["gradient_accumulation_steps"]
    first = passes[:number] if len(examples) == words["micro_batch_size"] * number else None
    return {
        "examples": examples,
        "learning_rates": [row["learning_rate"] for row in steps],
        "first_loss": sum(loss for loss, _ in first) / number if first else None,
        "first_grad_norm": steps[0]["grad_norm"] if first else None,
        "first_passes": first,
        "batches": batches,
    }


def set_adapter(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            _, _, _, _, layer, _, module, *_ = name.split(".")
            parameter.data.copy_(a_values(int(layer), module, *parameter.shape))


def packed_batches(trainer: Any) -> list[list[list[int]]]:
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    return [[[int(index) for index in row] for row in batch] for batch in sampler.generate_batches()]


@contextmanager
def recorded_passes() -> Iterator[list[tuple[float, int]]]:
    """The trainer logs rounded losses. What each of its passes returns is the loss divided by the number of passes."""
    found: list[tuple[float, int]] = []
    step = transformers.Trainer.training_step

    def recording(trainer: Any, model: Any, inputs: Any, *more: Any) -> Any:
        learned = int((inputs["labels"][:, 1:] != -100).sum())
        loss = step(trainer, model, inputs, *more)
        found.append((float(loss) * trainer.args.gradient_accumulation_steps, learned))
        return loss

    transformers.Trainer.training_step = recording
    try:
        yield found
    finally:
        transformers.Trainer.training_step = step


if __name__ == "__main__":
    found = {path.stem: reference(path, Path(sys.argv[1])) for path in sorted((HERE / "axolotl").glob("*.yaml"))}
    (HERE / "axolotl.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
