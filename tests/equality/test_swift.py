"""A translated command of ms-swift trains as it does itself: ids, labels, learning rates, first loss and gradient norm.

`swift.json` holds what ms-swift made of these commands on the same models; make_swift.py says how. Of `rm`, whose head
is random, ids and rates are compared alone, and of dpo and kto, whose losses begin at one value, labels besides.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from equality.ours import LOSS, NORM, Ours, changed, learnt, run_until_step_1, same_examples, same_rates
from equality.swift_commands import COMMANDS, MODELS, words_of
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.interop.translation import Translation

REFERENCES = json.loads((Path(__file__).parent / "swift.json").read_text())
WITHOUT_STEP = ("dpo", "dpo-messages", "kto", "reward", "sharegpt")
# Commands of which the translation tells a difference, where it tells it, and the examples that differ.
TOLD = {
    "all-tokens": ("empty thoughts", [0, 1, 2]),
    "last-thought": ("earlier answers", [0, 2]),
    "cut": ("--truncation_strategy right", [0, 2, 3]),
    "raw": ("--use_chat_template false", [3, 4]),
    "orpo": ("earlier answers of a pair", [4, 5]),
}


def translation(name: str, folder: Path) -> Translation:
    words = words_of(name, folder, folder / "runs" / name)
    model = Path(words[words.index("--model") + 1])
    if not model.is_dir():
        MODELS[model.name](model)
    return translate_command(["swift", *words], Options(read=lambda path: Path(path).read_text()))


def translated(name: str, folder: Path) -> dict[str, Any]:
    return json.loads(json.dumps(translation(name, folder).config))


def close(ours: Ours, theirs: dict[str, Any]) -> bool:
    return (ours.first_loss, ours.first_grad_norm) == (
        pytest.approx(theirs["first_loss"], abs=LOSS),
        pytest.approx(theirs["first_grad_norm"], abs=NORM),
    )


def without_labels(found: list[dict[str, list[int]]]) -> list[list[int]]:
    return [row["ids"] for row in found]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in TOLD])
def test_the_translated_run_is_the_tools_own(name: str, folder: Path) -> None:
    theirs, step = REFERENCES[name], name not in WITHOUT_STEP
    ours = run_until_step_1(translated(name, folder), step=step)
    if name == "reward":
        assert without_labels(ours.examples) == without_labels(theirs["examples"])
    else:
        assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    assert not step or close(ours, theirs)


@pytest.mark.parametrize("name", TOLD)
def test_what_differs_is_told(name: str, folder: Path) -> None:
    where, differing = TOLD[name]
    found = translation(name, folder)
    assert where in [note.word for note in found.notes if note.outcome in ("changed", "assumed")]
    theirs = REFERENCES[name]
    ours = run_until_step_1(json.loads(json.dumps(found.config)), step=False)
    assert same_rates(ours, theirs)
    both = zip(learnt(ours.examples), learnt(theirs["examples"]), strict=True)
    assert [place for place, (one, two) in enumerate(both) if one != two] == differing


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queries", {"data": {"template": "chatml"}}),
        ("messages-lora", {"data": {"template": "llamafactory-qwen3"}}),
        ("last-round", {"data": {"train_on": "responses"}}),
        ("old-system", {"optim": {"warmup_from_zero": False}}),
    ],
)
def test_twin_another_choice_is_another_run(name: str, change: dict[str, Any], folder: Path) -> None:
    config = changed(translated(name, folder), change)
    theirs = REFERENCES[name]
    ours = run_until_step_1(config, step=False)
    assert not (same_examples(ours, theirs) and same_rates(ours, theirs))


def test_twin_another_adapter_is_another_gradient(folder: Path) -> None:
    config = translated("messages-lora", folder)
    config["seed"] = 43
    assert not close(run_until_step_1(config, step=True), REFERENCES["messages-lora"])
