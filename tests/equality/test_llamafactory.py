"""A translated LLaMA-Factory config trains as the tool itself does: same ids, masks, learning rates and first step.

`llamafactory.json` holds what LLaMA-Factory made of these configs on the same models; make_llamafactory.py says how.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equality import models
from equality.ours import LOSS, NORM, run_until_step_1, same_examples, same_rates
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.system.errors import InputError

HERE = Path(__file__).parent
REFERENCES = json.loads((HERE / "llamafactory.json").read_text())
CONFIGS = sorted(path.stem for path in (HERE / "llamafactory").glob("*.yaml"))


def translated(name, folder):
    path = HERE / "llamafactory" / f"{name}.yaml"
    words = [line.split(": ") for line in path.read_text().splitlines()]
    model = dict(words)["model_name_or_path"]
    base = folder / model if (folder / model).is_dir() else models.build(model, folder)
    paths = [f"model_name_or_path={base}", f"dataset_dir={HERE}", f"output_dir={folder / 'runs' / name}"]
    found = translate_file(str(path), path.read_text(), paths, Options(read=lambda path: Path(path).read_text()))
    return json.loads(json.dumps(found.config))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_translated_run_is_the_tools_own(name, folder):
    theirs = REFERENCES[name]
    ours = run_until_step_1(translated(name, folder), step=theirs["first_loss"] is not None)
    assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    if theirs["first_loss"] is not None:
        assert ours.first_loss == pytest.approx(theirs["first_loss"], abs=LOSS)
        assert ours.first_grad_norm == pytest.approx(theirs["first_grad_norm"], abs=NORM)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("phi3-dialogues", {"data": {"template": "phi3"}}),  # the publisher's layout of the same model
        ("llama3-history", {"data": {"train_on": "responses"}}),
        ("llama3-lora", {"optim": {"warmup_from_zero": False}}),
        ("llama2-full", {"duration": "3 epochs"}),
        ("qwen2-full", {"batch": {"size": 6}}),
    ],
)
def test_twin_another_choice_is_another_run(name, change, folder):
    config = translated(name, folder)
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    theirs = REFERENCES[name]
    ours = run_until_step_1(config, step=False)
    assert not (same_examples(ours, theirs) and same_rates(ours, theirs))


def test_a_template_that_labels_a_token_with_another_is_refused(folder):
    path = HERE / "llamafactory" / "gemma2-full.yaml"
    options = replace(Options(), read=lambda path: Path(path).read_text())
    with pytest.raises(InputError) as caught:
        translate_file(str(path), path.read_text(), ["template=gemma2", "output_dir=out"], options)
    assert caught.value.faults[0].where == "template=gemma2"
