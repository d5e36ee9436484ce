"""Base beside adapter: what training and a scaled first token change, and that the base stays as it was published.
Norms and attention against a naive computation from transformers' hidden states and attentions, padded or not.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.adapter_runs import CPU, a_plan, a_run
from helpers.plans import choice
from helpers.tiny_models import tiny_llama
from surefoot.evaluate import norms as module
from surefoot.evaluate.norms import measure_model_norms, measure_norms
from surefoot.families.bos_zero import BOS_FILE
from surefoot.models.facts import facts_of
from surefoot.models.generate import left_padded
from surefoot.models.instrument import layer_parts
from surefoot.models.load import load_model

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
    found = measure_model_norms(str(base), data=str(data), max_samples=2).reports["model"]
    other = measure_model_norms(str(base), data=str(data), max_samples=2, template="alpaca").reports["model"]
    assert found.texts == other.texts == 2
    assert found.tokens < other.tokens


def test_files_pictures_and_samples(base, scaled, tmp_path):
    out = tmp_path / "out"
    found = measure_model_norms(str(base), adapter=str(scaled), out=out, generate_samples=True, max_samples=3)
    written = json.loads((tmp_path / "out" / "norms.json").read_text())
    assert written["results"].keys() == {"base", "adapter"}
    assert len(written["results"]["base"]["layers"]) == 3
    assert [sample.keys() for sample in written["samples"]] == [{"prompt", "base", "adapter"}] * 3
    assert found.reports["base"].texts == 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"norms.json", *found.pictures}
    assert len(found.pictures) == 3


CLOSE = 1e-5  # relative; fp32 passes of other batch shapes, summed in float64 here
TEXTS = [[1, 9, 33, 7, 12, 8, 40, 21, 22], [1, 50, 51], [1, 60, 61, 62, 63, 64], [1]]
FAMILIES = ["phi3", "llama3", "gemma3", "opt", "gpt2", "qwen3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("zoo")
    return {name: zoo.ZOO[name](place / name) for name in FAMILIES}


def right_padded(texts):
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])


def measured(folder, batches):
    facts = facts_of(folder)
    model = load_model(
        folder, dtype=torch.float32, attention_implementation="sdpa" if not facts.without_sdpa else "eager", device=CPU
    )
    return measure_norms(model, layer_parts(model, facts), batches, layers=facts.layers)


def naive(folder, texts=TEXTS):
    """[layers + 1] lists of per-token norms by text, and shares of attention, one text at a time, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    streams, shares = [], []
    for text in texts:
        with torch.no_grad():
            out = model(torch.tensor([text]), output_hidden_states=True, output_attentions=True, use_cache=False)
        streams.append([states[0].double().norm(dim=-1).numpy() for states in out.hidden_states[:-1]])
        shares.append([maps[0, :, 1:, 0].double().flatten().numpy() for maps in out.attentions])
    return streams, shares


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_are_the_naive_ones(folders, name):
    found = measured(folders[name], [left_padded(TEXTS[:2], 0, CPU), left_padded(TEXTS[2:], 0, CPU)])
    streams, shares = naive(folders[name])
    assert (found.texts, found.tokens) == (4, 19)
    for layer, facts in enumerate(found.layers):
        per_text = [stream[layer] for stream in streams]
        assert facts.residual_in.first_norm == pytest.approx(np.mean([norms[0] for norms in per_text]), rel=CLOSE)
        rest = np.concatenate([norms[1:] for norms in per_text])
        assert facts.residual_in.rest_norm == pytest.approx(rest.mean(), rel=CLOSE)
        assert facts.residual_in.rest_rms == pytest.approx(rest.mean() / np.sqrt(32), rel=CLOSE)
        assert facts.attention == pytest.approx(np.concatenate([share[layer] for share in shares]).mean(), rel=CLOSE)
        third = [norms[2] for norms in per_text if len(norms) > 2]
        assert found.by_position[layer][2] == pytest.approx(np.mean(third), rel=CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_either_side_changes_nothing(folders, name):
    left = measured(folders[name], [left_padded(TEXTS, 0, CPU)])
    right = measured(folders[name], [right_padded(TEXTS)])
    alone = measured(
        folders[name], [(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long)) for text in TEXTS]
    )
    for other in (left, right):
        np.testing.assert_allclose(other.by_position, alone.by_position, rtol=CLOSE)
        for one, two in zip(other.layers, alone.layers, strict=True):
            assert one.attention == pytest.approx(two.attention, rel=CLOSE)


def test_twin_column_0_in_place_of_the_first_attended_token_is_noticed(folders, monkeypatch):
    right = measured(folders["llama3"], [right_padded(TEXTS)])
    see = module._Meter.see

    def first_column(self, place, tensor):
        self.mask = torch.ones_like(self.mask)
        see(self, place, tensor)

    monkeypatch.setattr(module._Meter, "see", first_column)
    wrong = measured(folders["llama3"], [left_padded(TEXTS, 0, CPU)])
    assert wrong.layers[1].residual_in.first_norm != pytest.approx(right.layers[1].residual_in.first_norm, rel=1e-3)


def test_norms_by_hand(folders):
    """RMSNorm gives its weight times what has rms 1: the rms in and out, and the weight."""
    found = measured(folders["llama3"], [left_padded(TEXTS[:1], 0, CPU)])
    model = AutoModelForCausalLM.from_pretrained(folders["llama3"]).eval()
    with torch.no_grad():
        states = model(torch.tensor(TEXTS[:1]), output_hidden_states=True).hidden_states
    norm, stream = model.model.layers[1].input_layernorm, states[1][0]
    facts = next(one for one in found.norms if one.name == "model.layers.1.input_layernorm")
    rms_in, rms_out = (rows.double().square().mean(dim=-1).sqrt() for rows in (stream, norm(stream).detach()))
    assert facts.weight.mean == pytest.approx(float(norm.weight.double().mean()), rel=CLOSE)
    assert facts.input.first_rms == pytest.approx(float(rms_in[0]), rel=CLOSE)
    assert facts.output.rest_rms == pytest.approx(float(rms_out[1:].mean()), rel=CLOSE)
    assert found.norms[-1].name == "model.norm"
    assert found.norms[-1].layer is None


def test_one_token_has_no_rest(folders):
    found = measured(folders["llama3"], [left_padded([[1]], 0, CPU)])
    assert found.layers[0].residual_in.rest_norm is None
    assert found.layers[0].attention is None
