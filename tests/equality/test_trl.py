"""A translated TRL config trains as `trl sft` does: same ids, masks, learning rates and first step.

`trl.json` holds what TRL made of these configs on the same models; make_trl.py says how.
"""

import json
from pathlib import Path

import pytest
import yaml

from equality import models
from equality.ours import LOSS, NORM, run_until_step_1, same_examples, same_rates
from helpers.fork_server import ForkServer
from helpers.tiers import representatives
from surefoot.commands.translate import reading_options
from surefoot.interop.registry import translate_file

HERE = Path(__file__).parent
REFERENCES = json.loads((HERE / "trl.json").read_text())
CONFIGS = sorted(path.stem for path in (HERE / "trl").glob("*.yaml"))


def translated(name, folder):
    path = HERE / "trl" / f"{name}.yaml"
    words = yaml.safe_load(path.read_text())
    base = folder / words["model_name_or_path"]
    words["model_name_or_path"] = str(base if base.is_dir() else models.build(base.name, folder))
    for source in words.get("datasets", []):
        source["data_files"] = str(HERE / source["data_files"])
    for key in ("dataset_name", "chat_template_path"):
        if key in words:
            words[key] = str(HERE / words[key])
    words["output_dir"] = str(folder / "runs" / name)
    found = translate_file(str(path), yaml.safe_dump(words), [], reading_options())
    return found, json.loads(json.dumps(found.config))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_translated_run_is_the_tools_own(name, folder):
    theirs = REFERENCES[name]
    found, config = translated(name, folder)
    assert not [note for note in found.notes if note.outcome == "changed"]
    ours = run_until_step_1(config, step=theirs["losses"] is not None)
    assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    if theirs["losses"] is not None:
        assert ours.first_loss == pytest.approx(theirs["losses"][0], abs=LOSS)
        assert ours.first_grad_norm == pytest.approx(theirs["first_grad_norm"], abs=NORM)


def losses_of_the_run(config, folder, name):
    path = folder / f"{name}.json.yaml"
    path.write_text(json.dumps({**config, "output": str(folder / "whole" / name), "log_every": 1}))
    said = path.with_suffix(".txt")
    with ForkServer() as server:
        assert server.run(["train", str(path)], said) == 0, said.read_text()
    log = (folder / "whole" / name / "trainer_log.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, log) if "loss" in row]


@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_every_step_of_a_run_is_the_tools_own(decay, folder):
    """The config has a weight decay of 0.3, a cosine and a warm-up: the losses of later steps tell of the updates."""
    _, config = translated("completions-qwen2", folder)
    config["optim"]["weight_decay"] = decay
    theirs = pytest.approx(REFERENCES["completions-qwen2"]["losses"], abs=LOSS)
    assert (losses_of_the_run(config, folder, str(decay)) == theirs) == (decay == 0.3)


CHANGES: list[tuple[str, dict[str, dict[str, object]]]] = [
    ("completions-qwen2", {"data": {"encoding": "parts"}}),  # a word across the border
    ("completions-qwen2", {"data": {"template": "tokenizer"}}),
    ("completions-cut", {"data": {"encoding": "parts"}}),
    ("turns-qwen2", {"data": {"train_on": "responses"}}),  # the line end behind an answer
    ("turns-qwen3", {"data": {"encoding": "parts"}}),
    ("messages-qwen3", {"data": {"encoding": "parts"}}),  # earlier answers lose their empty thoughts
    ("messages-phi3", {"bos": {"prepend": "on"}}),
    ("assistant-llama3", {"data": {"train_on": "everything"}}),
    ("completions-lora", {"optim": {"warmup_from_zero": False}}),
    ("messages-remainder", {"batch": {"size": 6}}),
    ("text-steps", {"optim": {"warmup": 0.0}}),
]


@pytest.mark.parametrize(("name", "change"), representatives(CHANGES, CHANGES[0], CHANGES[3], CHANGES[8]))
def test_twin_another_choice_is_another_run(name, change, folder):
    _, config = translated(name, folder)
    for group, keys in change.items():
        config[group] = {**config[group], **keys}
    config["output"] += "-twin"
    ours = run_until_step_1(config, step=False)
    assert not (same_examples(ours, REFERENCES[name]) and same_rates(ours, REFERENCES[name]))
