"""`surefoot evaluate loss` against transformers in fp32 and the eval_loss of a run; `evaluate reward` as typed."""

import itertools
import json
import math
import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.faults import gives, lines_giving
from helpers.tiny_models import tiny_llama
from helpers.zoo import ZOO
from surefoot.commands.main import main
from surefoot.models.convert.source import VALUE_HEAD_FILE
from surefoot.report.intervals import wilson
from surefoot.report.record import read_run
from surefoot.report.views import commands

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
    written = json.loads((tmp_path / "loss.json").read_text())
    assert all(gives(result.stdout, value) for value in (12, 55, written["data"]["cut"]))
    assert written["data"]["cut"] > 0
    assert written["data"]["records"] == 12
    other = call("evaluate", "loss", place / "base", place / "rows.json", "--max-length", 54, "--out", tmp_path)
    assert (other.exit_code, other.stderr.rpartition(" ")[2]) == (2, "[SF-USE-OUTPUT]\n")
    assert "max_length" in other.stderr
    assert json.loads((tmp_path / "loss.json").read_text()) == written


def test_sources_are_those_of_training(place):
    source = f"{{path: {place / 'rows.json'}, max_samples: 2}}"
    assert found(place / "base", source)["data"]["records"] == 2
    assert found(place / "base", f"[{place / 'rows.json'}, {place / 'held.json'}]")["data"]["records"] == 18


def test_a_wrong_input_is_one_line(place):
    """Flags that the model cannot take: tests/commands/test_refused_before_torch.py."""
    for source in (place / "row.json", "{pathh: x.json}"):
        result = call("evaluate", "loss", place / "base", source)
        assert (result.exit_code, result.stdout) == (2, "")
        assert all(line.startswith("error: DATA") for line in result.stderr.splitlines())


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    tiny_llama(folder / "base")
    rows = [{"prompt": f"Say {n}.", "chosen": "good " * (n % 3 + 1), "rejected": "bad"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = {
        "stage": "reward",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {
            "train": str(folder / "pairs.jsonl"),
            "eval": str(folder / "pairs.jsonl"),
            "max_length": 96,
            "template": "plain",
        },
        "duration": "2 steps",
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder, typed(folder, "train", str(folder / "run.yaml"))


def typed(folder: Path, *words: str) -> str:
    """What a command that has to succeed says, typed in this folder."""
    with chdir(folder):
        result = call(*words)
    assert result.exit_code == 0, result.output
    return result.output


def asked(opened, *words: str) -> str:
    return typed(opened[0], "evaluate", "reward", *words)


def test_lines_json_and_files(opened):
    folder, _ = opened
    said = asked(opened, "run", "pairs.jsonl", "--out", "measured")
    found = json.loads((folder / "measured" / "reward.json").read_text())
    assert found["data"]["pairs"] == 12
    assert gives(said, 12)
    for name in ("accuracy", "margin"):
        assert re.search(rf"\b{name}\b", said), said
    assert f"{found['calibration']['expected_error']:.1%}" in said
    assert (folder / "measured" / "calibration.png").read_bytes().startswith(b"\x89PNG")
    said = asked(opened, "run", "pairs.jsonl", "--json", "--batch-size", "1")
    printed = json.loads(said[said.index("{\n") :])
    assert printed["accuracy"] == found["accuracy"]
    assert printed["margin"] == pytest.approx(found["margin"], abs=1e-6)  # another batch: rounding
    typed(folder, "verify", "run")


def test_what_the_run_offers_at_its_end_can_be_pasted(opened):
    folder, said = opened
    (line,) = [line for line in said.splitlines() if "surefoot evaluate reward" in line]
    (told,) = [one for _, one in commands(read_run(folder / "run"), "finished") if "evaluate reward" in one]
    assert shlex.split(line) == shlex.split(told) == ["surefoot", "evaluate", "reward", str(folder / "run")]
    assert found_by(opened, "run") == found_by(opened, "run", "pairs.jsonl")


def test_what_an_export_of_it_offers_can_be_pasted(opened):
    folder, _ = opened
    said = typed(folder, "export", "run", "--merge", "--out", "exported")
    (line,) = said.partition("next:")[2].split("\n")[1:-1]
    tool, *words, data = shlex.split(line)
    assert (tool, data) == ("surefoot", "DATA")
    typed(folder, *words, "pairs.jsonl")
    twin = shutil.copytree(folder / "exported", folder / "headless")
    (twin / VALUE_HEAD_FILE).unlink()
    typed(folder, "generate", "headless", "--prompt", "Hello", "--max-new-tokens", "4")


def test_pairs_that_were_split_off_are_measured_as_the_run_evaluated_them(opened):
    folder, _ = opened
    said = typed(folder, "train", "run.yaml", "data.eval=4", "output=split", "duration=6 steps", "optim.lr=0.02")
    results = json.loads((folder / "split" / "all_results.json").read_text())
    found = found_by(opened, "split")
    assert found["data"]["pairs"] == results["eval_pairs"] == 4
    assert found["accuracy"] == results["eval_reward_accuracy"]
    assert found["margin"] == pytest.approx(results["eval_reward_margin"], rel=1e-5)
    assert results["eval_reward_accuracy"] == 1
    assert not cautions(said)  # twin of the next test: all of four are more than a coin's
    everything = found_by(opened, "split", "pairs.jsonl")  # twin: no command could name those four
    assert everything["data"]["pairs"] == 12
    assert everything["margin"] != pytest.approx(results["eval_reward_margin"], rel=1e-5)


@pytest.mark.parametrize("held_out", ["alike.jsonl", "none"])
def test_a_reward_model_that_is_no_better_than_a_coin_says_so_at_its_end(opened, held_out):
    folder, _ = opened
    rows = [{"prompt": f"Say {n}.", "chosen": "good", "rejected": "good"} for n in range(30)]
    (folder / "alike.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = typed(folder, "train", "run.yaml", f"data.eval={held_out}", f"output=coin-{held_out}")
    (caution,) = cautions(said)
    if held_out == "none":
        assert "data.eval" in caution
        assert "evaluate reward" not in said  # there is nothing that it could measure
    else:
        low, high = wilson(0.5, 30)
        assert all(gives(caution, value) for value in ("50.0%", 30, f"{low:.1%}", f"{high:.1%}"))


def cautions(said: str) -> list[str]:
    """What is said of the reward model: between the last checkpoint and the time that the run took."""
    lines = said.partition(" checkpoint-")[2].splitlines()[1:]
    return list(itertools.takewhile(lambda line: not gives(line, "set-up"), lines))


def test_how_sure_the_accuracy_is(opened):
    found = found_by(opened, "run")
    low, high = found["accuracy_interval"]
    assert low <= found["accuracy"] <= high
    assert high - low > 0.2  # of twelve
    assert lines_giving(asked(opened, "run"), f"{low:.1%}", f"{high:.1%}")


def found_by(opened, *words: str) -> dict:
    said = asked(opened, *words, "--json")
    found = json.loads(said[said.index("{\n") :])
    del found["seconds"], found["data"]["file"]
    return found


def test_refusals(opened):
    folder, _ = opened
    # A reward model that no run of surefoot left.
    shutil.copytree(folder / "run", folder / "scored", ignore=shutil.ignore_patterns("plan.json", "checkpoint-*"))
    for words, code in (
        ("evaluate reward base pairs.jsonl", "SF-MODEL-KIND"),
        ("evaluate reward run missing.jsonl", "SF-FILE-MISSING"),
        ("evaluate reward run --max-samples 2", "SF-USE-FLAG"),
        ("evaluate reward scored", "SF-USE-FLAG"),
        ("generate run --prompt Hello", "SF-MODEL-KIND"),
        ("generate scored --prompt Hello", "SF-MODEL-KIND"),
        ("evaluate loss run pairs.jsonl", "SF-MODEL-KIND"),
    ):
        with chdir(folder):
            result = call(*words.split())
        assert result.exit_code == 2, words
        assert result.output.rstrip().endswith(f"[{code}]"), (words, result.output)
