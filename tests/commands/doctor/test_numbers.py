"""Examples that go through the model together: as if each went alone, in packed rows and in padded ones, and a document
that hears another one is named wherever in the run's row it stands."""

import json
from contextlib import contextmanager

import pytest
import torch

from helpers.doctor_runs import clean_run, plant_in_loss, with_task
from helpers.faults import gives
from surefoot.commands.doctor.numbers import gradient_line, leak_line, split_line
from surefoot.commands.doctor.passes import in_micro_batches
from surefoot.commands.doctor.steps import STEPS
from surefoot.models import forward
from surefoot.models.forward import causal_model
from surefoot.runs.trial import ready

LONG, SHORT = "heron " * 40, "sky"


@pytest.fixture
def skewed(tmp_path, base):
    """A long example and seven short ones, of which packing leaves the long one alone where a row has room for two."""

    def config(packing="on", **changes):
        rows = [{"instruction": f"Say {n}.", "input": "", "output": LONG if n % 8 == 0 else SHORT} for n in range(24)]
        (tmp_path / "skewed.json").write_text(json.dumps(rows))
        data = {"train": str(tmp_path / "skewed.json"), "max_length": 128, "packing": packing}
        return clean_run(tmp_path, base, **{"data": data, "batch": {"size": 24, "micro": 10}} | changes)

    return config


def test_the_split_into_micro_batches(one):
    line = split_line(one)
    assert line.verdict == "ok"
    assert line.value.startswith("4 examples")
    mean = plant_in_loss(one, lambda loss, batch: loss / batch.weight)
    line = split_line(mean)
    assert (line.code, line.verdict) == ("MICRO-BATCH-SUM", "fault")


def test_the_split_of_a_step_whose_first_packed_row_is_one_example(skewed):
    with ready(skewed(), STEPS) as one:
        rows = in_micro_batches(one, 4)
        assert len(rows[0].examples) < max(len(row.examples) for row in rows)
        assert split_line(one).verdict == "ok"
        mean = plant_in_loss(one, lambda loss, batch: loss / batch.weight)
        assert split_line(mean).verdict == "fault"


def test_training_mode_is_put_back(one):
    before = {name: module.training for name, module in one.loaded.engine.model.named_modules()}
    split_line(one)
    leak_line(one)
    assert {name: module.training for name, module in one.loaded.engine.model.named_modules()} == before


def test_what_trains_and_gets_no_gradient(tmp_path, base):
    with ready(clean_run(tmp_path, base, adapter={"kind": "lora", "rank": 4}), STEPS) as one:
        line = gradient_line(one)
        assert (line.code, line.verdict) == ("GRAD-NONE", "ok")
        mlp = causal_model(one.loaded.policy).model.layers[0].mlp
        around = mlp.down_proj.base_layer.weight
        mlp.forward = lambda x: torch.nn.functional.linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), around)
        line = gradient_line(one)
    assert (line.code, line.verdict) == ("GRAD-NONE", "caution")
    assert line.value.startswith("2 of ")
    assert "mlp.down_proj" in line.value


@contextmanager
def mixed_documents(model):
    """Every token gets a tenth of the mean of all tokens of all rows."""
    hook = (
        causal_model(model)
        .get_input_embeddings()
        .register_forward_hook(lambda module, inputs, out: out + 0.1 * out.mean((0, 1), keepdim=True))
    )
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("packing", ["on", "off"])
def test_one_document_that_reaches_another(folder, base, packing):
    data = {"train": str(folder / "train.json"), "max_length": 128, "packing": packing}
    with ready(clean_run(folder, base, data=data), STEPS) as one:
        assert leak_line(one).verdict == "ok"
        with mixed_documents(one.loaded.policy):
            line = leak_line(one)
    assert (line.code, line.verdict) == ("PACK-LEAK", "fault")


def joined_at(place):
    """Attention that takes a document and the one behind it for one."""
    real = forward.documents_of

    def joined(lengths, device):
        pair = (sum(lengths[place : place + 2]),)
        return real((*lengths[:place], *pair, *lengths[place + 2 :]), device)

    return joined


def test_the_runs_own_row_is_looked_at_all_of_it(skewed, monkeypatch):
    with ready(skewed(), STEPS) as one:
        documents = one.run.task.step_batches(1)[0].rows.documents
        assert len(documents) >= 8
        clean = leak_line(one)
        assert clean.verdict == "ok"
        assert gives(clean.value, len(documents))
        for place in range(len(documents) - 1):
            with monkeypatch.context() as patched:
                patched.setattr(forward, "documents_of", joined_at(place))
                line = leak_line(one)
            assert (line.code, line.verdict) == ("PACK-LEAK", "fault"), place
        assert leak_line(one).verdict == "ok"


def test_a_first_micro_batch_of_one_example_is_passed_over(skewed):
    """Three long examples, each alone in its padded row, and short ones behind them."""
    with ready(skewed("off", batch={"size": 24, "micro": 23}), STEPS) as one:
        batches = one.run.task.step_batches(1)
        alone = [batch for batch in batches if len(batch.examples) == 1]
        assert alone
        changed = plant_batches(one, [*alone, *(batch for batch in batches if len(batch.examples) > 1)])
        with mixed_documents(one.loaded.policy):
            assert leak_line(changed).verdict == "fault"
        assert gives(leak_line(changed).value, 23)


def plant_batches(one, batches):
    return with_task(one, step_batches=lambda step: batches)


def test_where_every_micro_batch_has_one_document_there_is_nothing_to_leak(skewed):
    with ready(skewed("off", batch={"size": 2, "micro": 1}), STEPS) as one:
        line = leak_line(one)
    assert line.verdict == "ok"
    assert gives(line.value, "micro-batch")


def test_documents_that_were_not_met_are_not_called_right(skewed):
    with ready(skewed("on", batch={"size": 1, "micro": 1}), STEPS) as one:
        line = leak_line(one)
    assert (line.code, line.verdict, line.exit_code) == ("PACK-LEAK", "unknown", 0)


def test_numbers_that_are_none_are_a_leak(one):
    hook = causal_model(one.loaded.policy).model.layers[0].register_forward_hook(lambda *call: call[2] * float("nan"))
    line = leak_line(one)
    hook.remove()
    assert line.verdict == "fault"
