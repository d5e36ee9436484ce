"""Base beside adapter: what training and a scaled first token change, and that the base stays as it was published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers import zoo
from helpers.adapter_runs import a_plan, a_run
from helpers.plans import choice
from helpers.tiny_models import tiny_llama
from surefoot.evaluate.measure_norms import measure_model_norms
from surefoot.families.bos_zero import BOS_FILE

EXACT = 1e-6  # relative; a product in fp32
SCALE = 0.1


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return zoo.phi3(tmp_path_factory.mktemp("models") / "phi3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def scaled(base):
    plan = a_plan()
    run = a_run(
        base.parent / "scaled",
        base,
        replace(plan, tokenizer=replace(plan.tokenizer, bos_scale=choice(SCALE), bos_id=1)),
    )
    (run / BOS_FILE).write_text(json.dumps({"scaling_factor": SCALE}))
    return run


def test_the_first_norm_before_layer_1_is_scaled_and_the_base_is_not(base, scaled):
    found = measure_model_norms(str(base), adapter=str(scaled)).reports
    ours, plain = (found[side].layers[0].residual_in for side in ("adapter", "base"))
    assert ours.first_norm / plain.first_norm == pytest.approx(SCALE, rel=EXACT)
    assert ours.rest_norm == plain.rest_norm
    assert found["adapter"].layers[2].residual_in.rest_norm != found["base"].layers[2].residual_in.rest_norm


def test_the_base_beside_an_adapter_is_the_base_alone(tmp_path):
    base = tiny_llama(tmp_path / "base")
    run = a_run(tmp_path / "run", base)
    beside = measure_model_norms(str(base), adapter=str(run)).reports
    alone = measure_model_norms(str(base)).reports["model"]
    assert beside["base"].layers == alone.layers
    assert beside["base"].norms == alone.norms
    assert beside["adapter"].layers != alone.layers


def test_records_are_laid_out_as_in_training_or_by_a_template(base, tmp_path):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"instruction": "Where? " * n, "output": "There, by the water."} for n in (1, 3, 5)]))
    found = measure_model_norms(str(base), data=str(data), texts=2).reports["model"]
    other = measure_model_norms(str(base), data=str(data), texts=2, template="alpaca").reports["model"]
    assert found.texts == other.texts == 2
    assert found.tokens < other.tokens


def test_files_pictures_and_samples(base, scaled, tmp_path):
    found = measure_model_norms(str(base), adapter=str(scaled), out=tmp_path / "out", generate_samples=True, texts=3)
    written = json.loads((tmp_path / "out" / "norms.json").read_text())
    assert written["results"].keys() == {"base", "adapter"}
    assert len(written["results"]["base"]["layers"]) == 3
    assert [sample.keys() for sample in written["samples"]] == [{"prompt", "base", "adapter"}] * 3
    assert found.reports["base"].texts == 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"norms.json", *found.pictures}
    assert len(found.pictures) == 3
