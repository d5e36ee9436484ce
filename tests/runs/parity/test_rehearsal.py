"""What is compared before step 1 has a slope: a stage that is held to a reference is compared against itself."""

import json

import pytest

from helpers.doctor_runs import clean_base, clean_run
from surefoot.commands.doctor.parity import own_pass, parity_lines
from surefoot.models.forward import causal_model
from surefoot.runs.parity import passes as module
from surefoot.runs.trial import ready

WORDS = 60  # of an answer: far less likely than a reference of zeros would have it, so that the sigmoid has no slope
GRADIENT = 1e-3  # of a loss that has a slope; without one it is 0 or nearly so


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    rows = [{"prompt": f"Say {n}.", "completion": "heron " * WORDS, "label": n % 2 == 0} for n in range(8)]
    (folder / "kto.json").write_text(json.dumps(rows))
    clean_base(folder / "base")
    return folder


def asked(workplace):
    data = {"train": str(workplace / "kto.json"), "max_length": 256}
    return clean_run(workplace, workplace / "base", stage="kto", data=data, precision="bf16")


def largest(own):
    return max(float(one.norm()) for one in own.seen.gradients.values())


def test_judged_answers_have_a_gradient_to_compare(workplace):
    config = asked(workplace)
    with ready(config, 1) as one:
        right = own_pass(one)
        hook = causal_model(one.loaded.policy).model.layers[0].mlp.register_forward_hook(lambda m, i, out: out * 3)
        wrong = own_pass(one)
        hook.remove()
        plan = one.loaded.plan
    assert largest(right) > GRADIENT
    assert [next(parity_lines(config, plan, own, None)).verdict for own in (right, wrong)] == ["ok", "fault"]


def test_twin_a_reference_of_zeros_has_none(workplace, monkeypatch):
    monkeypatch.setattr(module, "_own_reference", lambda objective: objective)
    with ready(asked(workplace), 1) as one:
        assert largest(own_pass(one)) < GRADIENT
