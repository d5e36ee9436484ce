"""`surefoot train` on real instruction files with models of five families; every label mask against the raw records.

The files are read here with `json` alone: what an answer is, is decided twice.
"""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from helpers.tiers import diagonal
from helpers.zoo import ZOO
from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Example
from surefoot.report.console import Console
from surefoot.runs.custom import NOTHING
from surefoot.runs.prepare import prepare
from surefoot.runs.run import train_run
from surefoot.runs.run_folder import inspect_folder

DATA = Path(__file__).parents[3] / "shared" / "data"
FAMILIES = ["llama3", "phi3", "qwen2", "opt", "gpt2"]
FILES = [
    "instruct/alpaca_en_demo.json",
    "instruct/identity.json",
    "instruct/sharegpt_multiturn_200.json",
    "commonsense/commonsense_train_2k.json",
    "commonsense/commonsense_extra_750.json",
]
DIALOGUES = "instruct/sharegpt_multiturn_200.json"
SAMPLES = 4
POSITIONS = 4096  # room for the longest of them: a cut answer would not be a whole one
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not beside this checkout")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    # Attention dropout leaves a CPU only the slow kernel: seconds for the dialogues. The conformance table has it on.
    keys: dict[str, dict[str, Any]] = {family: {"max_position_embeddings": POSITIONS} for family in FAMILIES}
    keys["gpt2"] = {"n_positions": POSITIONS, "attn_pdrop": 0.0}
    return {family: ZOO[family](root / family, **keys[family]) for family in FAMILIES}


def run_config(model: Path, file: str, output: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "stage": "sft",
            "model": str(model),
            "adapter": {"kind": "lora", "rank": 4},
            "data": {
                "train": str(DATA / file),
                "max_samples": SAMPLES,
                "max_length": POSITIONS,
            },
            "precision": "fp32",
            "batch": {"size": 1},
            "duration": "2 steps",
            "output": str(output),
        }
    )


def answers(record: dict[str, Any]) -> list[str | dict[str, Any]]:
    """What the model is to learn to say: texts, and calls as objects."""
    if "conversations" not in record:
        return [record["output"]]
    said = [(turn["from"], turn["value"]) for turn in record["conversations"]]
    spoken = [(who, text) for who, text in said if who in ("gpt", "function_call")]
    return [json.loads(text) if who == "function_call" else text for who, text in spoken]


def learned(example: Example) -> list[list[int]]:
    """Ids of each unbroken stretch that carries loss."""
    pairs = zip(example.supervised.tolist(), example.ids.tolist(), strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [[number for _, number in group] for supervised, group in groups if supervised]


def check_masks(
    examples: list[Example], records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]
) -> None:
    """Each answer of each record is learned, whole and with a stop token behind it, and nothing else is."""
    assert len(examples) == len(records)
    for example, record in zip(examples, records, strict=True):
        stretches = learned(example)
        assert len(stretches) == len(answers(record))
        for ids, answer in zip(stretches, answers(record), strict=True):
            assert ids[-1] in stops
            assert not set(ids[:-1]) & set(stops)
            text = str(tokenizer.decode(ids[:-1])).strip()
            if isinstance(answer, str):
                assert text == answer.strip()
            else:
                assert json.dumps(answer["name"]) in text
                assert json.dumps(answer["arguments"], ensure_ascii=False) in text


@needs_data
@pytest.mark.parametrize(("family", "file"), diagonal(FAMILIES, FILES))
def test_trains_and_learns_exactly_the_answers(models, family, file, tmp_path):
    config = run_config(models[family], file, tmp_path / "run")
    console = Console(io.StringIO())
    run = prepare(config, inspect_folder(config, "new"), console, NOTHING)
    data = run.task.data
    records = json.loads((DATA / file).read_text(encoding="utf-8"))[:SAMPLES]
    check_masks([data.train[n] for n in range(len(data.train))], records, run.tokenizer, data.template.stop_ids)
    assert train_run(config, "new", console) == 0
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


@needs_data
def test_twin_a_mask_that_is_off_by_one_is_seen(models, tmp_path):
    config = run_config(models["qwen2"], DIALOGUES, tmp_path / "run")
    run = prepare(config, inspect_folder(config, "new"), Console(io.StringIO()), NOTHING)
    data = run.task.data
    records = json.loads((DATA / DIALOGUES).read_text(encoding="utf-8"))[:SAMPLES]
    examples = [data.train[n] for n in range(len(data.train))]
    check_masks(examples, records, run.tokenizer, data.template.stop_ids)
    shifted = [replace(e, supervised=np.append(e.supervised[1:], False)) for e in examples]
    with pytest.raises(AssertionError):
        check_masks(shifted, records, run.tokenizer, data.template.stop_ids)
