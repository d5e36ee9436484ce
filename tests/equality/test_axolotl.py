"""A translated Axolotl config trains as the tool itself does: same ids, masks, learning rates and first step.

`axolotl.json` holds what Axolotl made of these configs on the same models; make_axolotl.py says how.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from equality import models
from equality.ours import LOSS, NORM, Ours, changed, fixed_adapter, run_until_step_1, same_examples, same_rates
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

HERE = Path(__file__).parent
REFERENCES = json.loads((HERE / "axolotl.json").read_text())
CONFIGS = sorted(path.stem for path in (HERE / "axolotl").glob("*.yaml"))
# name -> learned here alone, learned there alone
OTHER_LABELS = {
    "chat-gemma2": ({"<end_of_turn>"}, set()),  # without eot_tokens
    "chat-llama2": ({"▁"}, set()),  # blanks that the template puts around an answer
    "chat-phi3": ({"<|end|>"}, {"<|endoftext|>"}),  # without eot_tokens, and the end of the whole text
    "told-inputs": ({"<|im_start|>", "user", "assistant", "system", "\n"}, set()),  # headers, and what follows a turn
}
OTHER_LOSS, OTHER_PIECES, OTHER_WARM_UP = "alpaca-passes", "completion-long", "warm-up"
OTHERWISE = (*OTHER_LABELS, OTHER_LOSS, OTHER_PIECES, OTHER_WARM_UP)


def model_of(name: str, folder: Path) -> Path:
    text = (HERE / "axolotl" / f"{name}.yaml").read_text()
    model = next(line.removeprefix("base_model: ") for line in text.splitlines() if line.startswith("base_model"))
    return folder / model if (folder / model).is_dir() else models.build(model, folder)


def translated(name: str, folder: Path) -> dict[str, Any]:
    path, base = HERE / "axolotl" / f"{name}.yaml", model_of(name, folder)
    text = re.sub(r"path: (.*)", lambda found: f"path: {HERE / found[1]}", path.read_text())
    paths = [f"base_model={base}", f"output_dir={folder / 'runs' / name}"]
    found = translate_file(str(path), text, paths, Options(read=lambda path: Path(path).read_text()))
    config = json.loads(json.dumps(found.config))
    if "adapter" in config:
        config["adapter"]["initial"] = str(fixed_adapter(config["adapter"], base))
    return config


def close(ours: Ours, theirs: dict[str, Any]) -> bool:
    return ours.first_loss == pytest.approx(theirs["first_loss"], abs=LOSS) and ours.first_grad_norm == pytest.approx(
        theirs["first_grad_norm"], abs=NORM
    )


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OTHERWISE])
def test_the_translated_run_is_the_tools_own(name: str, folder: Path) -> None:
    theirs = REFERENCES[name]
    ours = run_until_step_1(translated(name, folder), step=theirs["first_loss"] is not None)
    assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    assert close(ours, theirs)
    if theirs["batches"]:
        assert ours.places == [[place for row in batch for place in row] for batch in theirs["batches"]]


@pytest.mark.parametrize("name", OTHER_LABELS)
def test_the_same_ids_with_labels_that_differ_at_known_tokens(name: str, folder: Path) -> None:
    ours, theirs = run_until_step_1(translated(name, folder), step=False), REFERENCES[name]
    vocabulary = Tokenizer.from_file(str(model_of(name, folder) / "tokenizer.json"))
    here: set[int] = set()
    there: set[int] = set()
    for mine, other in zip(ours.examples, theirs["examples"], strict=True):
        assert mine["ids"] == other["ids"]
        both = [*zip(mine["labels"], other["labels"], strict=True)][1:]
        here |= {one for one, two in both if two == -100 != one}
        there |= {two for one, two in both if one == -100 != two}
    expected = [{number for text in texts for number in ids_of(vocabulary, text)} for texts in OTHER_LABELS[name]]
    assert [here, there] == expected
    assert same_rates(ours, theirs)


def ids_of(vocabulary: Tokenizer, text: str) -> list[int]:
    number = vocabulary.token_to_id(text)
    return vocabulary.encode(text, add_special_tokens=False).ids if number is None else [number]


def test_every_token_of_a_step_weighs_alike_where_passes_do_there(folder: Path) -> None:
    ours, theirs = run_until_step_1(translated(OTHER_LOSS, folder), step=True), REFERENCES[OTHER_LOSS]
    assert same_examples(ours, theirs)
    assert same_rates(ours, theirs)
    weighed = sum(loss * tokens for loss, tokens in theirs["first_passes"])
    assert ours.first_loss == pytest.approx(weighed / sum(tokens for _, tokens in theirs["first_passes"]), abs=LOSS)
    assert not close(ours, theirs)


def test_pieces_of_a_long_text_begin_with_the_token_before_them(folder: Path) -> None:
    ours = run_until_step_1(translated(OTHER_PIECES, folder), step=False)
    most = max(len(one["ids"]) for one in ours.examples)
    texts: list[int] = []
    for before, piece in zip([None, *ours.examples], ours.examples, strict=False):
        continued = before is not None and len(before["ids"]) == most and before["ids"][-1] == piece["ids"][0]
        texts += piece["ids"][continued:]
    theirs = REFERENCES[OTHER_PIECES]["examples"]
    assert texts == [number for one in theirs for number in one["ids"]]
    assert sum(len(one["labels"][1:]) for one in theirs) < sum(len(one["labels"][1:]) for one in ours.examples)


def test_a_share_of_warm_up_is_rounded_up_and_down_there(folder: Path) -> None:
    """0.03 of 20 steps."""
    ours, theirs = run_until_step_1(translated(OTHER_WARM_UP, folder), step=False), REFERENCES[OTHER_WARM_UP]
    assert [rates.index(max(rates)) for rates in (ours.learning_rates, theirs["learning_rates"])] == [1, 0]
    assert len(ours.learning_rates) == len(theirs["learning_rates"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("alpaca-llama2", {"data": {"template": "alpaca"}}),  # whose answer is not a text of its own
        ("alpaca-phi", {"data": {"template": "phi3"}}),
        ("told-llama3", {"data": {"train_on": "everything"}}),
        ("alpaca-full", {"optim": {"warmup_from_zero": False}}),
    ],
)
def test_twin_another_choice_is_another_run(name: str, change: dict[str, Any], folder: Path) -> None:
    config = changed(translated(name, folder), change)
    ours, theirs = run_until_step_1(config, step=False), REFERENCES[name]
    assert not (same_examples(ours, theirs) and same_rates(ours, theirs))
