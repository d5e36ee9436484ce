"""A translated torchtune config trains as its recipe does: ids, masks, learning rates, first loss and gradient norm.

`torchtune.json` holds what torchtune made of these configs on the same model; make_torchtune.py says how. Its tokenizer
appends a masked EOS to a conversation, which surefoot leaves out; its header before an answer carries loss even where
the prompt does not.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from equality import torchtune_models
from equality.ours import LOSS, NORM, Ours, changed, fixed_adapter, run_until_step_1, same_examples, same_rates
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

HERE = Path(__file__).parent
REFERENCES = json.loads((HERE / "torchtune.json").read_text())
CONFIGS = sorted(path.stem for path in (HERE / "torchtune").glob("*.yaml"))
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def model_of(name: str, folder: Path) -> Path:
    if name.startswith("qwen2"):
        return torchtune_models.qwen2(folder)
    return torchtune_models.build(folder, base=name.startswith("text"))


def translated(name: str, folder: Path) -> dict[str, Any]:
    model = model_of(name, folder)
    text = (HERE / "torchtune" / f"{name}.yaml").read_text().replace("MODEL", str(model))
    text = re.sub(r"data_files: (.*)", lambda found: f"data_files: {HERE / found[1]}", text)
    options = Options(read=lambda path: Path(path).read_text())
    found = translate_file("t.yaml", text, [f"output_dir={folder / 'runs' / name}"], options)
    config = json.loads(json.dumps(found.config))
    if "adapter" in config:
        config["adapter"]["initial"] = str(fixed_adapter(config["adapter"], model))
    return config


def without_end(example: dict[str, list[int]]) -> dict[str, list[int]]:
    """Leave out a masked token behind the last turn."""
    masked = example["labels"][-1] == -100
    return {name: row[:-1] if masked else row for name, row in example.items()}


def reference(name: str) -> dict[str, Any]:
    theirs = REFERENCES[name]
    return {**theirs, "examples": [without_end(example) for example in theirs["examples"]]}


def close(ours: Ours, theirs: dict[str, Any]) -> bool:
    return ours.first_loss == pytest.approx(theirs["first_loss"], abs=LOSS) and (
        theirs["first_grad_norm"] is None or ours.first_grad_norm == pytest.approx(theirs["first_grad_norm"], abs=NORM)
    )


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("answers")])
def test_the_translated_run_is_the_recipes_own(name: str, folder: Path) -> None:
    theirs = reference(name)
    ours = run_until_step_1(translated(name, folder), step=theirs["first_loss"] is not None)
    assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    assert close(ours, theirs)


def test_answers_alone_carry_loss_and_there_the_header_too(folder: Path) -> None:
    theirs = reference("answers-lora")
    ours = run_until_step_1(translated("answers-lora", folder), step=False)
    assert same_rates(ours, theirs)
    vocabulary = Tokenizer.from_file(str(folder / "llama3" / "tokenizer.json"))
    header = vocabulary.encode(HEADER, add_special_tokens=False).ids
    for mine, other in zip(ours.examples, theirs["examples"], strict=True):
        assert mine["ids"] == other["ids"]
        both = zip(mine["labels"], other["labels"], strict=True)
        more = [place for place, (one, two) in enumerate(both) if one != two]
        assert [other["labels"][place] for place in more] == header
        assert more == list(range(more[0], more[0] + len(header)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("alpaca-full", {"data": {"template": "alpaca"}}),
        ("alpaca-full", {"data": {"template": "llama3"}}),
        ("alpaca-lora", {"data": {"train_on": "responses"}}),
        ("instruct-full", {"data": {"train": {"path": str(HERE / "records.json"), "format": "alpaca"}}}),
        ("chat-lora", {"data": {"train_on": "responses"}}),
        ("text-full", {"optim": {"warmup_from_zero": False}}),
    ],
)
def test_twin_another_choice_is_another_run(name: str, change: dict[str, Any], folder: Path) -> None:
    config = changed(translated(name, folder), change)
    theirs = reference(name)
    ours = run_until_step_1(config, step=False)
    assert not (same_examples(ours, theirs) and same_rates(ours, theirs))


def test_twin_another_adapter_is_another_gradient(folder: Path) -> None:
    config = translated("alpaca-lora", folder)
    del config["adapter"]["initial"]
    theirs = reference("alpaca-lora")
    assert not close(run_until_step_1(config, step=True), theirs)
