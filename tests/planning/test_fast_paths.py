"""Which of surefoot's own kernels a run uses, and what is said where it does not."""

import dataclasses

import pytest
import torch

from helpers.architectures import PHI3
from helpers.experts import moe_facts
from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning import fast_paths as module
from surefoot.planning.fast_paths import open_parts
from surefoot.planning.measurements import (
    Measurements,
    PointwiseSizes,
    PointwiseTrial,
    measurements_from_json,
    measurements_to_json,
)
from surefoot.planning.parallel import RanksFacts
from surefoot.planning.plan import KernelsPlan
from surefoot.planning.resolve import resolve
from surefoot.runs.measured import pointwise_sizes
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware, preset
from surefoot.system.messages import size_text

LORA = {"kind": "lora", "rank": 4}
HERE = Hardware("this CPU", "cpu", 2**40, None, False, True, False, 2, preset=False)
GPU = dataclasses.replace(preset("h100"), memory=2**40, preset=False)


FSDP = {"parallel": {"engine": "fsdp2"}}
ZERO2, ZERO3 = ({"parallel": {"engine": "deepspeed", "zero_stage": stage}} for stage in (2, 3))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """What the plan says of a key of `kernels:`."""
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))

    def kernel(key, asked=None, *, machine=GPU, seen=None, layer_norm=False, **request):
        facts = dataclasses.replace(model, layer_norm=layer_norm)
        measured = None if seen is None else Measurements(pointwise=seen)
        config = run_config(**request, **({"kernels": {key: asked}} if asked else {}))
        return getattr(resolve(config, facts, tokenizer, machine, measurements=measured, environment={}).kernels, key)

    return kernel


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_is_fast_where_weights_are_whole(kernel, kind):
    choice = kernel("adapter", adapter=LORA | {"kind": kind})
    assert (choice.value, choice.source) == ("fast", "default")


@pytest.mark.parametrize(
    "request_", [{}, {"adapter": LORA}, {"stage": "reward"}, {"precision": {"base": "nf4"}, "adapter": LORA}], ids=str
)
def test_rows_that_nobody_reads_are_left_out_by_default(kernel, request_):
    choice = kernel("last_block", **request_)
    assert (choice.value, choice.source) == ("pruned", "default")
    assert kernel("last_block", "plain", **request_).source == "user"


def trials(norm=(0.020, 0.005), turn=(0.010, 0.010), failure=""):
    return (PointwiseTrial("norm", *norm, failure), PointwiseTrial("rotary", *turn, ""))


TIMED = {"machine": HERE, "seen": trials()}
OBSTACLES = {
    ("adapter", "fast"): [
        ({"adapter": LORA, "precision": {"base": "nf4"}}, "nf4"),
        ({"adapter": LORA, "precision": {"base": "int8"}}, "int8"),
        ({"adapter": LORA} | FSDP, "fsdp2"),
        ({"adapter": LORA} | ZERO3, "deepspeed"),
        ({"adapter": LORA, "compile": "default"}, "torch.compile"),
        ({"adapter": None}, "no adapter"),
    ],
    ("last_block", "pruned"): [  # other rows matter
        ({"stage": "pretrain"}, "all positions"),
        (FSDP, "fsdp2"),
        (ZERO3, "deepspeed"),
        ({"compile": "default"}, "torch.compile"),
        ({"adapter": LORA | {"dropout": 0.1}}, "dropout"),
        ({"model": {"path": "base", "dropout": 0.1}}, "dropout"),
        ({"bos": {"scale": 0.5}}, "bos.scale"),
    ],
    ("pointwise", "fused"): [
        (TIMED | {"compile": "default"}, "torch.compile"),
        (TIMED | FSDP, "fsdp2"),
        (TIMED | {"machine": dataclasses.replace(GPU, liger=False)}, "liger-kernel"),
        (TIMED | {"machine": dataclasses.replace(GPU, kind="mps")}, "CPU"),
        (TIMED | {"machine": GPU} | FSDP, "fsdp2"),
        (TIMED | {"layer_norm": True}, "LayerNorm"),
    ],
    ("rotary", "fused"): [(TIMED, "kernels.pointwise"), ({"machine": GPU} | FSDP, "fsdp2")],
    ("gated", "fused"): [(TIMED, "CPU"), ({"compile": "default"}, "torch.compile")],
}


@pytest.mark.parametrize(("key", "fast"), OBSTACLES)
def test_where_it_cannot_run_auto_is_plain_and_a_request_is_refused(kernel, key, fast):
    for request_, why in OBSTACLES[key, fast]:
        choice = kernel(key, **request_)
        assert choice.value == "plain"
        assert why in choice.reason
        with pytest.raises(InputError) as caught:
            kernel(key, fast, **request_)
        assert f"kernels.{key}" in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("key", "asked", "request_"),
    [
        *(("adapter", asked, {"adapter": LORA}) for asked in ("plain", "fast")),
        *(
            ("pointwise", asked, {"machine": HERE, "seen": seen})
            for asked in ("plain", "fused")
            for seen in (None, trials(norm=(0.01, 0.02)))
        ),
    ],
)
def test_a_request_is_honoured(kernel, key, asked, request_):
    choice = kernel(key, asked, **request_)
    assert (choice.value, choice.source) == (asked, "user")


def test_what_is_clearly_faster_is_taken(kernel):
    """A layer has two norms and one turn: 50 ms against 20."""
    choice = kernel("pointwise", **TIMED)
    assert (choice.value, choice.source) == ("fused", "measured")
    assert "plain 50, fused 20" in choice.reason


@pytest.mark.parametrize(
    ("seen", "value", "why"),
    [
        (trials(norm=(0.020, 0.016)), "plain", "plain 50, fused 42"),
        (trials(norm=(0.020, 0.015)), "fused", "plain 50, fused 40"),
        (trials(failure="wrong"), "plain", "norm: wrong"),
        (None, "plain", ""),
    ],
)
def test_norms_and_rotations_follow_what_was_measured(kernel, seen, value, why):
    choice = kernel("pointwise", machine=HERE, seen=seen)
    assert choice.value == value
    assert why in choice.reason


LIGER = dataclasses.replace(GPU, liger=True)
KEYS = {"pointwise": "norm", "rotary": "rotary", "gated": "gated"}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("times", "value"), [((0.020, 0.005, ""), "fused"), ((0.020, 0.018, ""), "plain"), ((0, 0, "wrong"), "plain")]
)
def test_on_a_gpu_each_of_liger_kernels_parts_follows_what_was_measured_of_it(kernel, key, times, value):
    """The others say the contrary."""
    other = (0.020, 0.005, "") if value == "plain" else (0, 0, "wrong")
    seen = tuple(PointwiseTrial(part, *(times if name == key else other)) for name, part in KEYS.items())
    assert kernel(key, machine=LIGER, seen=seen).value == value
    assert kernel(key, machine=LIGER, seen=None).value == "plain"
    assert kernel(key, machine=dataclasses.replace(LIGER, liger=False), seen=seen).value == "plain"


def test_what_is_open_is_measured(tmp_path):
    facts = model_facts(tmp_path, LLAMA31_8B)

    def parts(machine, facts=facts, **kernels):
        return open_parts(run_config(kernels=kernels), facts, machine)

    assert parts(HERE) == ("norm", "rotary")
    assert parts(LIGER) == ("norm", "rotary", "gated")
    assert parts(LIGER, rotary="plain", gated="fused") == ("norm", "gated")
    assert parts(dataclasses.replace(LIGER, liger=False)) == ()
    assert parts(LIGER, dataclasses.replace(facts, layer_norm=True)) == ("rotary", "gated")
    for other in ({"gated": False}, {"activation": "gelu"}):
        assert parts(LIGER, dataclasses.replace(facts, **other)) == ("norm", "rotary")
    joined = model_facts(tmp_path / "phi3", PHI3)
    assert joined.gated
    assert parts(LIGER, joined) == ("norm", "rotary")
    sizes = pointwise_sizes(dataclasses.replace(facts, activation="gelu_pytorch_tanh"))
    assert sizes == PointwiseSizes(4096, 32, 128, 8, 14336, "gelu")


def test_twin_by_its_activation_alone_gates_in_one_matrix_would_be_planned(tmp_path, monkeypatch):
    joined = model_facts(tmp_path, PHI3)
    monkeypatch.setattr(module, "_named_gates", lambda model: True)
    assert open_parts(run_config(), joined, LIGER) == ("norm", "rotary", "gated")


def test_of_a_machine_elsewhere_the_plan_says_what_would_happen(kernel):
    machine = dataclasses.replace(preset("cpu"), memory=2**40)
    choice = kernel("pointwise", machine=machine)
    assert (choice.value, choice.source) == ("plain", "default")
    assert [gives(choice.reason, one) for one in ("plain", "fused", 1.2)] == [True] * 3
    assert kernel("pointwise", "fused", machine=machine).value == "fused"  # nobody knows of an obstacle


def test_what_was_measured_is_kept_in_the_plan_and_plans_of_before_are_plain():
    """Plans of before may have timed gates on a GPU, too."""
    seen = Measurements(pointwise=(*trials(), PointwiseTrial("gate", 0.05, 0.01, "")))
    assert measurements_from_json(measurements_to_json(seen)) == seen
    assert measurements_from_json({}).pointwise == ()
    assert KernelsPlan().pointwise.value == "plain"


@pytest.mark.parametrize(
    ("request_", "world", "kernel"),
    [
        ({}, 1, "fast"),
        ({"parallel": {"engine": "ddp"}}, 2, "fast"),
        (ZERO2, 2, "fast"),
        (FSDP, 2, "experts"),
        (ZERO3, 2, "experts"),
        (FSDP | {"compile": "default"}, 2, "lost"),
        (FSDP | {"kernels": {"adapter": "plain"}}, 2, "lost"),
        ({"kernels": {"adapter": "plain"}}, 1, "lost"),
        (FSDP | {"kernels": {"adapter": "plain"}, "precision": {"base": "fp32"}}, 2, "plain"),
        (FSDP | {"adapter": {**LORA, "experts": False}}, 2, "plain"),
    ],
    ids=str,
)
def test_experts_to_which_changes_are_added_in_16_bits_are_a_caution(tmp_path, request_, world, kernel):
    facts = moe_facts(tmp_path / "model", "mixtral", vocab_size=128_256)
    tokenizer = read_tokenizer_facts(llama3_tokenizer(tmp_path))
    plan = resolve(
        run_config(**{"adapter": LORA} | request_),
        facts,
        tokenizer,
        GPU,
        measurements=None,
        environment={},
        ranks=RanksFacts(world=world),
    )
    cautions = [caution for caution in plan.cautions if "experts.gate_up_proj" in caution]
    assert plan.kernels.adapter.value == ("plain" if kernel == "lost" else kernel)
    assert len(cautions) == (kernel == "lost")
    experts = sum(one.numbers for module in facts.modules for one in module.matrices if not module.routes)
    assert all(size_text(2 * experts // facts.layers) in caution for caution in cautions)


@pytest.mark.parametrize(("base", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_below_that_share_of_a_weight_a_change_is_lost(base, dtype):
    share, one = float(module._LOST[base].removesuffix(" %")) / 100, torch.ones((), dtype=dtype)
    assert one + torch.tensor(0.95 * share, dtype=dtype) == one
    assert one + torch.tensor(1.05 * share, dtype=dtype) > one
