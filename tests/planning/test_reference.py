"""Which stages have a reference, and where it comes from."""

import pytest

from helpers.model_layouts import run_config
from surefoot.config.schema import RunConfig
from surefoot.planning.notes import Notes
from surefoot.planning.reference import MODEL, NONE, plan_reference

REWARDS = {"rewards": ["length"]}


def planned(**sections) -> str | None:
    choice = plan_reference(run_config(adapter=None, **sections), Notes())
    return choice.value if choice else None


def test_grpo_has_a_reference_only_with_a_penalty():
    assert planned(stage="grpo", grpo=REWARDS | {"kl": 0.1}) == MODEL
    assert planned(stage="grpo", grpo=REWARDS) is None
    assert planned(stage="dpo", alignment={"loss": "orpo"}) == NONE  # it is said of the losses that could have one


@pytest.mark.parametrize(
    ("initial", "reference", "said"), [("runs/sft", "auto", True), (None, "auto", False), ("runs/sft", "model", False)]
)
def test_an_adapter_that_training_starts_from_and_the_reference_leaves_out_is_a_caution(initial, reference, said):
    adapter = {"kind": "lora", "rank": 4} | ({"initial": initial} if initial else {})
    notes = Notes()
    plan_reference(run_config(stage="dpo", adapter=adapter, alignment={"reference": reference}), notes)
    assert len(notes.cautions) == said


def test_twin_a_penalty_of_0_that_counts_is_noticed(monkeypatch):
    monkeypatch.setattr(RunConfig, "needs_reference", True)
    with pytest.raises(AssertionError):
        test_grpo_has_a_reference_only_with_a_penalty()
