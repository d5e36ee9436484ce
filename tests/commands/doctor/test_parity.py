"""The run against the plainest way to compute the same examples: right runs of every stage pass, however their rows are
laid out; what is computed wrongly is named, and the examples are the same in both."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers.doctor_runs import ROWS, clean_run
from helpers.faults import gives
from helpers.tiers import representatives
from surefoot.commands.doctor import parity
from surefoot.commands.doctor.parity import is_plain, own_pass, parity_lines, plainest
from surefoot.config.schema import RunConfig
from surefoot.models.forward import causal_model
from surefoot.runs.parity.differences import LIMITS, largest_difference
from surefoot.runs.parity.passes import one_pass
from surefoot.runs.trial import ready

ROUNDING = 1e-5  # of sums in fp32 taken in another order; healthy runs were seen at 2e-6
SCORE = "def vowels(prompts, responses):\n    return [len(text) / 9 for text in responses]\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory, base):
    """Records of every stage: answers of 1 to 9 words, so that packed rows and padded ones hold different examples."""
    folder = tmp_path_factory.mktemp("stages")
    prompts = [row["instruction"] for row in ROWS]
    rows = {
        "sft": ROWS,
        "dpo": [
            {"prompt": text, "chosen": row["output"], "rejected": "heron sky"}
            for text, row in zip(prompts, ROWS, strict=True)
        ],
        "kto": [
            {"prompt": text, "completion": row["output"], "label": place % 3 > 0}
            for place, (text, row) in enumerate(zip(prompts, ROWS, strict=True))
        ],
        "ppo": [{"prompt": text} for text in prompts],
    }
    rows["reward"] = rows["dpo"]
    for stage, records in rows.items():
        (folder / f"{stage}.json").write_text(json.dumps(records))
    (folder / "score.py").write_text(SCORE)
    return folder


@pytest.fixture
def run_of(world, base):
    """Steps of sixteen examples in three micro-batches, as 6, 5 and 5 where rows are packed."""

    def config(stage="sft", packing="on", **changes):
        sections = {
            "stage": stage,
            "data": {"train": str(world / f"{stage}.json"), "max_length": 128, "packing": packing},
            "batch": {"size": 16, "micro": 6},
        }
        if stage == "ppo":
            sections["ppo"] = {"reward": f"{world / 'score.py'}:vowels", "max_new_tokens": 4}
        return clean_run(world, base, **sections | changes)

    return config


def sizes(one):
    return [len(batch.examples) for batch in one.run.task.step_batches(1)]


def parity_line(*args, **how):
    """Of the run as it computes; lines of its formulas come behind."""
    return next(parity_lines(*args, **how))


def all_lines(config, plant=lambda one: None):
    """What doctor says of the run, with something planted in it before its own pass."""
    with ready(config, 1) as one:
        plant(one)
        own, plan = own_pass(one), one.loaded.plan
    return list(parity_lines(config, plan, own, None))


def examined(config, plant=lambda one: None):
    return all_lines(config, plant)[0]


def error_of(line):
    return float(line.value.split("differ by ")[1].split(";")[0])


@pytest.mark.parametrize("stage", representatives(["sft", "reward", "dpo", "kto"], "dpo"))
def test_a_packed_run_is_held_against_padded_rows_of_the_same_examples(run_of, stage):
    config = run_of(stage)
    with ready(config, 1) as one:
        assert len(set(sizes(one))) > 1
        assert len(sizes(one)) >= 3
        own, plan = own_pass(one), one.loaded.plan
        assert one.run.task.step_batches(1)[0].rows.documents
    assert not any(batch.rows.documents for batch in own.padded)
    line = parity_line(config, plan, own, None)
    assert (line.code, line.verdict) == ("FAST-PATH", "ok")
    assert error_of(line) < ROUNDING


@pytest.mark.parametrize("stage", representatives(["sft", "reward", "dpo", "kto", "ppo"], "ppo"))
def test_padded_runs_with_a_micro_batch_of_their_own(run_of, stage):
    line = examined(run_of(stage, "off" if stage != "ppo" else "auto"))
    assert (line.code, line.verdict) == ("FAST-PATH", "ok")
    assert error_of(line) < ROUNDING


def test_sixteen_bits(run_of):
    line = examined(run_of(precision="bf16"))
    assert line.verdict == "ok"
    assert ROUNDING < error_of(line) < LIMITS["bf16"]


def test_dropout_and_noise_are_left_out(run_of):
    """Both are drawn for each micro-batch, and would fall otherwise in packed rows."""
    drawn = {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.3}, "optim": {"lr": 1e-3, "neftune_alpha": 5.0}}
    line = examined(run_of(**drawn))
    assert line.verdict == "ok"
    assert error_of(line) < ROUNDING


def test_a_twin_that_makes_micro_batches_of_its_own_computes_other_examples(run_of):
    """What doctor once did, and called a fault."""
    config = run_of()
    with ready(config, 1) as one:
        seen = own_pass(one)
        own = one_pass(one.loaded, one.run.task, one.run.task.step_batches(1)[:2], 1)
    other = plainest(config).model_copy(update={"batch": config.batch})
    with ready(other, 1) as plain:
        theirs = one_pass(plain.loaded, plain.run.task, plain.run.task.step_batches(1)[:2], 1)
        assert largest_difference(plain.loaded.engine, theirs, own) > LIMITS["bf16"]
    assert parity_line(config, one.loaded.plan, seen, None).verdict == "ok"


def wrong_mlp(one):
    """A layer's MLP gives half as much again."""
    layer = causal_model(one.loaded.policy).model.layers[0]
    layer.mlp.register_forward_hook(lambda module, inputs, out: out * 1.5)


def wrong_scale(one):
    """The adapters' scale is twice what the config says; B is 0 before the first step."""
    for module in one.loaded.policy.modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling.update({name: 2 * scale for name, scale in scaling.items()})


WRONG = product([wrong_mlp, wrong_scale], ["on", "off"], ["fp32", "bf16"])


@pytest.mark.parametrize(
    ("plant", "packing", "precision"),
    representatives(WRONG, (wrong_mlp, "off", "bf16"), (wrong_scale, "on", "fp32")),
)
def test_what_is_computed_wrongly_is_named(run_of, plant, packing, precision):
    line = examined(run_of(packing=packing, precision=precision), plant)
    assert (line.code, line.verdict) == ("FAST-PATH", "fault")
    assert line.exit_code == 3
    assert "data.packing: off" in line.fix


@pytest.mark.parametrize("stage", representatives(["reward", "dpo", "kto", "ppo"], "kto"))
def test_a_wrong_scale_is_named_in_every_stage(run_of, stage):
    packing = "auto" if stage == "ppo" else "on"
    assert examined(run_of(stage, packing), wrong_scale).verdict == "fault"


def test_where_zeros_stay_zeros_a_wrong_scale_does_not_show_in_the_forward_pass(run_of, monkeypatch):
    """The twin: only the gradient of B has it then, and a loss that is right hides the rest."""
    config = run_of()
    monkeypatch.setattr(parity, "nonzero_matrices", lambda parameters: nullcontext())
    with ready(config, 1) as one:
        right = own_pass(one).seen.loss
        wrong_scale(one)
        assert own_pass(one).seen.loss == right
    monkeypatch.undo()
    with ready(config, 1) as one:
        right = own_pass(one).seen.loss
        wrong_scale(one)
        assert own_pass(one).seen.loss != right


def test_the_twin_has_nothing_of_surefoots(run_of):
    config = plainest(run_of())
    with ready(config, 1) as plain:
        plan = plain.loaded.plan
        assert is_plain(plan)
        assert plan.attention.expected.value == "eager"
        assert plan.memory.gradient_checkpointing.value
        own = own_pass(plain)
    line = parity_line(config, plan, own, None)
    assert line.verdict == "ok"
    assert gives(line.value, "fp32")


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": {"adapter": "fast"}},
        {"precision": "bf16"},
        {"attention": "sdpa"},
    ],
)
def test_what_is_not_plain_in_one_thing_is_compared(run_of, changes):
    plain = plainest(run_of(packing="off")).model_dump(mode="json")
    with ready(RunConfig.model_validate(plain | changes), 1) as one:
        assert not is_plain(one.loaded.plan)


def test_a_second_model_without_room_is_not_loaded_and_not_called_right(run_of):
    config = run_of(packing="off")
    with ready(config, 1) as one:
        own, plan = own_pass(one), one.loaded.plan
    line = parity_line(config, plan, own, free=1000)
    assert (line.code, line.verdict, line.exit_code) == ("FAST-PATH", "unknown", 0)


def test_a_quantized_base_is_rounded_on_purpose(run_of):
    config = run_of(packing="off")
    with ready(config, 1) as one:
        own, plan = own_pass(one), one.loaded.plan
    for name in ("nf4", "int8"):
        packed = replace(plan, precision=replace(plan.precision, base=replace(plan.precision.base, value=name)))
        assert name in parity_line(config, packed, own, None).value


def test_the_weights_are_what_they_were(run_of):
    with ready(run_of(), 1) as one:
        before = {name: value.clone() for name, value in one.loaded.engine.parameters.items()}
        own_pass(one)
        assert all(torch.equal(value, before[name]) for name, value in one.loaded.engine.parameters.items())
