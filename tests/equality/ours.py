"""What surefoot makes of a config, in the terms in which the other tools' references are written, and how near it must
come to them."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from equality.fixed_adapter import a_values
from surefoot.config.load import check_config
from surefoot.methods.sources import settled
from surefoot.report.console import open_console
from surefoot.runs.custom import NOTHING
from surefoot.runs.load_models import load_models
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import make_schedule
from surefoot.runs.run_folder import inspect_folder
from surefoot.system.process import TerminalWishes
from surefoot.training import step as training_step

RATE = 1e-12  # float64 arithmetic of a handful of operations, on rates around 1e-3
LOSS = 5e-6  # of losses around 7: fp32 sums over a few hundred tokens, in another order
NORM = 1e-5  # of norms around 3; the tools log them in fp32


@dataclass(frozen=True)
class Ours:
    """labels: the ids that carry loss, -100 elsewhere. first_loss, first_grad_norm: of step 1, None where not asked.
    places: the examples of each step of the first epoch.
    """

    examples: list[dict[str, list[int]]]
    learning_rates: list[float]
    first_loss: float | None
    first_grad_norm: float | None
    places: list[list[int]]


def run_until_step_1(config: dict, *, step: bool) -> Ours:
    checked = settled(check_config(config))
    prepared = prepare(
        checked, inspect_folder(checked, "new"), open_console(io.StringIO(), TerminalWishes(True, False, True)), NOTHING
    )
    train = prepared.task.data.train
    examples = []
    for index in range(len(train)):
        example = train[index]
        ids = [int(token) for token in example.ids]
        labels = [token if learnt else -100 for token, learnt in zip(ids, example.supervised, strict=True)]
        examples.append({"ids": ids, "labels": labels})
    schedule = make_schedule(checked, prepared.task, prepared.timetable)
    rates = [schedule.rate(number) for number in range(prepared.timetable.total_steps)]
    places = [prepared.task.step_places(1 + step).tolist() for step in range(prepared.timetable.steps_per_epoch)]
    if not step:
        return Ours(examples, rates, None, None, places)
    loaded = load_models(checked, prepared.plan, prepared.base, None)
    batches = prepared.task.step_batches(1)
    weight = sum(batch.weight for batch in batches)
    sums = training_step.accumulate_gradients(
        loaded.engine, prepared.task.objective, batches, weight=weight, step=1, scale=None, settings=loaded.settings
    )
    loss = float(sums[training_step.LOSS]) / weight
    return Ours(examples, rates, loss, float(loaded.engine.grad_norms()["all"]), places)


def same_examples(ours: Ours, theirs: Mapping[str, Any]) -> bool:
    return learnt(ours.examples) == learnt(theirs["examples"])


def changed(config: dict[str, Any], change: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The config with other keys in some of its groups."""
    return config | {key: {**config[key], **value} for key, value in change.items()}


def learnt(examples: Sequence[Mapping[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels; a label on the first token, which nothing predicts, does not count."""
    return [(row["ids"], row["labels"][1:]) for row in examples]


def same_rates(ours: Ours, theirs: Mapping[str, Any]) -> bool:
    return ours.learning_rates == pytest.approx(theirs["learning_rates"], abs=RATE)


def fixed_adapter(adapter: dict[str, Any], model: Path) -> Path:
    """The adapter with which the recipe begins too: fixed values in A, B zero."""
    place = model.with_name(f"{model.name}-adapter")
    if place.is_dir():
        return place
    shape = {"r": adapter["rank"], "lora_alpha": adapter["alpha"], "target_modules": adapter["targets"]}
    LoraConfig(**shape, task_type="CAUSAL_LM").save_pretrained(str(place))
    weights = load_file(model / "model.safetensors")
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in adapter["targets"] and name.endswith(".weight"):
            rows, columns = weight.shape
            before = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{before}.lora_A.weight"] = a_values(int(name.split(".")[2]), module, shape["r"], columns)
            found[f"{before}.lora_B.weight"] = torch.zeros(rows, shape["r"])
    save_file(found, place / "adapter_model.safetensors")
    return place
