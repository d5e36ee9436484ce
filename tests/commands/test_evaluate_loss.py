"""`surefoot evaluate loss`: against transformers in fp32, against the run's own eval_loss, and what goes wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.zoo import ZOO
from surefoot.commands.main import main

RELATIVE = 1e-5  # fp32 sums in batches of other shapes
ROWS = [
    {"instruction": f"Say sky {n} times{'.' * (5 * n % 13)}", "input": "", "output": " ".join(["sky"] * n)}
    for n in range(1, 13)
]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def found(*arguments: object) -> dict:
    result = call("evaluate", "loss", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("loss")
    ZOO["llama3"](root / "base")
    (root / "rows.json").write_text(json.dumps(ROWS))
    (root / "held.json").write_text(json.dumps(ROWS[3:9]))
    return root


@pytest.fixture(scope="module")
def run(place) -> Path:
    """A LoRA run that evaluates on held.json, cut at 60 tokens."""
    config = {
        "stage": "sft",
        "model": str(place / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(place / "rows.json"), "eval": str(place / "held.json"), "max_length": 60},
        "batch": {"size": 4},
        "optim": {"lr": 1e-2},
        "duration": "6 steps",
        "eval_every": "6 steps",
        "output": str(place / "run"),
    }
    (place / "run.yaml").write_text(json.dumps(config))
    result = call("train", place / "run.yaml", "--quiet")
    assert result.exit_code == 0, result.output
    return place / "run"


def logged(run: Path) -> dict:
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row][-1]


def reference(base: Path, rows: list[dict]) -> tuple[float, float, int]:
    """Loss, accuracy and supervised tokens by transformers alone, one example at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    total, right, count = 0.0, 0, 0
    for row in rows:
        chat = [{"role": "user", "content": row["instruction"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        answer = row["output"] + "<|eot_id|>"
        head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tail = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1].double()
        targets = torch.tensor(tail)
        total -= float(logits.log_softmax(-1).gather(1, targets[:, None]).sum())
        right += int((logits.argmax(-1) == targets).sum())
        count += len(tail)
    return total / count, right / count, count


def test_a_base_model_is_what_transformers_finds(place):
    report = found(place / "base", place / "rows.json")["results"]["model"]
    loss, accuracy, count = reference(place / "base", ROWS)
    assert report["loss"] == pytest.approx(loss, rel=RELATIVE)
    assert report["perplexity"] == pytest.approx(math.exp(loss), rel=RELATIVE * 10)
    assert (report["token_accuracy"], report["supervised_tokens"]) == (pytest.approx(accuracy), count)


def test_twin_another_record_is_noticed(place):
    report = found(place / "base", place / "held.json")["results"]["model"]
    assert report["loss"] != pytest.approx(reference(place / "base", ROWS)[0], rel=RELATIVE)


def test_a_run_has_the_loss_that_it_logged(place, run):
    measured = found(run, place / "held.json")
    assert measured["results"]["adapter"]["loss"] == pytest.approx(logged(run)["eval_loss"], rel=RELATIVE)
    assert measured["results"]["adapter"]["token_accuracy"] == pytest.approx(logged(run)["eval_accuracy"])
    assert measured["max_length"] == 60


def test_twin_another_template_or_length_is_another_loss(place, run):
    for other in (("--template", "plain"), ("--max-length", "55")):
        measured = found(run, place / "held.json", *other)
        assert measured["results"]["adapter"]["loss"] != pytest.approx(logged(run)["eval_loss"], rel=RELATIVE)


def test_the_base_beside_an_adapter_is_the_base_alone(place, run):
    both = found(run, place / "held.json")["results"]
    alone = found(place / "base", place / "held.json", "--max-length", 60)["results"]["model"]
    assert both["base"]["loss"] == pytest.approx(alone["loss"], rel=RELATIVE)
    assert both["base"]["loss"] > both["adapter"]["loss"]
    named = found(place / "base", place / "held.json", "--adapter", run, "--only", "adapter")["results"]
    assert list(named) == ["adapter"]
    assert named["adapter"]["loss"] == both["adapter"]["loss"]


def test_batches_change_no_more_than_rounding(place):
    one, all_ = (
        found(place / "base", place / "rows.json", "--batch-size", size)["results"]["model"]["loss"] for size in (1, 12)
    )
    assert one == pytest.approx(all_, rel=RELATIVE)


def test_table_file_and_counts(place, tmp_path):
    result = call("evaluate", "loss", place / "base", place / "rows.json", "--max-length", 55, "--out", tmp_path)
    assert result.exit_code == 0
    assert "12 records" in result.stdout
    assert "cut at 55 tokens" in result.stdout
    written = json.loads((tmp_path / "loss.json").read_text())
    assert written["data"]["cut"] > 0
    assert written["data"]["records"] == 12
    other = call("evaluate", "loss", place / "base", place / "rows.json", "--max-length", 54, "--out", tmp_path)
    assert other.exit_code == 2
    assert "holds other findings (not the same: max_length)" in other.stderr
    assert json.loads((tmp_path / "loss.json").read_text()) == written


def test_sources_are_those_of_training(place):
    source = f"{{path: {place / 'rows.json'}, max_samples: 2}}"
    assert found(place / "base", source)["data"]["records"] == 2
    assert found(place / "base", f"[{place / 'rows.json'}, {place / 'held.json'}]")["data"]["records"] == 18


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("row.json", (), "error: DATA: file {root}/row.json does not exist; did you mean {root}/rows.json?"),
        ("rows.json", ("--template", "alpacca"), "did you mean alpaca?"),
        ("rows.json", ("--max-length", "9999"), "error: --max-length: 9999 is more than the model's 512 positions"),
        ("rows.json", ("--only", "adapter"), "error: --only: asks for an adapter, and there is none"),
    ],
)
def test_a_wrong_input_is_one_line(place, data, options, message):
    result = call("evaluate", "loss", place / "base", place / data, *options)
    assert result.exit_code == 2
    assert message.format(root=place) in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_a_mapping_that_is_none_is_one_line(place):
    result = call("evaluate", "loss", place / "base", "{pathh: x.json}")
    assert result.exit_code == 2
    assert all(line.startswith("error: DATA") for line in result.stderr.splitlines())
