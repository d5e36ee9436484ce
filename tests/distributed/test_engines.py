"""Two ranks for real: every engine does on two what one process does alone, and every check of it can fail."""

import functools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distributed import engine_cases
from distributed.engine_cases import ENGINES, KINDS, ONE, RATE, SINGLE, Case, alone, engine_for, tiny
from distributed.two_ranks import on_two_ranks
from helpers.tiers import diagonal, representatives
from surefoot.system.errors import InputError
from surefoot.training.engine import EngineChoice, make_engine
from surefoot.training.ranks import ALONE

# The same sums in another order: gradients differ by some 1e-7 of themselves, and AdamW divides each by its own size,
# so a weight of size 1 may end up to a rate times that apart, plus its own rounding. Measured: 1.5e-7.
WEIGHTS = 1e-6
# Of the largest number of a moment. Measured: 5e-6, in adapters whose gradients are differences of larger numbers.
MOMENTS = 5e-5
HALF = 0.6  # of all elements, at most, on one of two ranks: embeddings and pads do not cut evenly
SHARED = ("fsdp2", "zero3")  # weights too
CHECKPOINTING = Case("dora", dropout=0.1, checkpointing=True)
VARIANTS = {
    "tied head": Case("full", tied=True),
    "bf16 base": Case("lora", base=torch.bfloat16),
    "checkpointing": CHECKPOINTING,
    "sgd": Case("lora", optimizer="sgd"),
    "rmsprop": Case("lora", optimizer="rmsprop"),
    "loss scale": Case("full", scale=1024.0),
    "a part": Case("part"),
    "two rates": Case("lora", factor=8.0),
    "a part, checkpointing": Case("part", dropout=0.1, checkpointing=True),
}


def engines(*chosen: str) -> pytest.MarkDecorator:
    """All engines; of the default tier those that are named, because they do it in a way of their own."""
    return pytest.mark.parametrize("engine", representatives(ENGINES, *chosen))


@functools.cache
def _alone(case: Case):
    return alone(case)


@functools.cache
def _pair(function: str, case: Case, engine: str, *more):
    return on_two_ranks(getattr(engine_cases, function), case, ENGINES[engine], *more)


def furthest(ours: dict, theirs: dict) -> tuple[float, float]:
    """Of weights, the largest distance; of moments, in units of the largest number of each."""
    assert ours.keys() == theirs.keys()
    apart = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}
    weights = max(value for name, value in apart.items() if "/" not in name)
    moments = max(value / float(np.abs(ours[name]).max() or 1) for name, value in apart.items() if "/" in name)
    return weights, moments


def is_same(case: Case, engine: str) -> bool:
    one, (first, second) = _alone(replace(case, broken="", scale=None)), _pair("trained", case, engine)
    weights, moments = furthest(one["state"], first["state"])
    losses = np.allclose(one["losses"], first["losses"], rtol=1e-6) and first["losses"] == second["losses"]
    norms = np.allclose(one["norms"], first["norms"], rtol=1e-5) and first["norms"] == second["norms"]
    return weights <= WEIGHTS and moments <= MOMENTS and losses and norms


def same_bits(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name].view(np.int32), theirs[name].view(np.int32)) for name in ours
    )


@pytest.mark.parametrize(("engine", "kind"), diagonal(ENGINES, KINDS))
def test_two_ranks_are_one_rank(engine, kind):
    """With dropout, whose draws belong to micro-batches, and with three micro-batches for two ranks in the second
    step. Every step clips."""
    assert is_same(Case(kind, dropout=0.1), engine)


@engines("fsdp2")
def test_a_mean_over_ranks_in_place_of_a_sum_is_noticed(engine):
    assert not is_same(Case("lora", dropout=0.1, broken="mean"), engine)


def test_gradients_that_stay_on_their_rank_are_noticed():
    assert not is_same(Case("lora", dropout=0.1, broken="no reduce"), "ddp")


@pytest.mark.parametrize("engine", representatives(["fsdp2", "zero2", "zero3"], "fsdp2"))
def test_clipping_by_the_norm_of_the_own_share_is_noticed(engine):
    assert not is_same(Case("lora", dropout=0.1, broken="norm of own share"), engine)


@pytest.mark.parametrize(("case", "engine"), diagonal(VARIANTS, ENGINES))
def test_so_they_are_with(case, engine):
    assert is_same(VARIANTS[case], engine)


def test_another_rate_of_a_part_is_noticed():
    other = _alone(Case("lora"))["state"]
    assert furthest(_alone(VARIANTS["two rates"])["state"], other)[0] > RATE


@engines("zero3")
def test_several_passes_through_one_trunk_add_up(engine):
    """Two adapters, of which each pass uses one, and a pass that uses the first of them again."""
    case = Case("lora", limits=None)
    one, (first, second) = engine_cases.shared(ALONE, case, SINGLE), _pair("shared", case, engine)
    weights, moments = furthest(one["state"], first["state"])
    assert (weights <= WEIGHTS, moments <= MOMENTS) == (True, True)
    assert np.allclose(one["losses"], first["losses"], rtol=1e-6)
    assert first["losses"] == second["losses"]
    other = engine_cases.shared(ALONE, case, SINGLE, "critic")  # twin: the last pass is the other's
    assert furthest(other["state"], first["state"])[1] > MOMENTS


@pytest.mark.parametrize("engine", representatives(["ddp", "zero1", "zero2"], "zero2"))
def test_ranks_that_complete_gradients_in_different_orders_add_up_the_same_ones(engine):
    case = Case("lora", limits=None)
    one, (first, _) = engine_cases.shared(ALONE, case, SINGLE, "critic"), _pair("turning", case, engine)
    assert furthest(one["state"], first["state"]) <= (WEIGHTS, MOMENTS)
    if engine == "zero2":  # twin
        first, _ = _pair("turning", replace(case, broken="reduce as they come"), engine)
        assert furthest(one["state"], first["state"])[1] > MOMENTS


TWO = {"limits": (("actor", 0.1), ("critic", None)), "rates": (("actor", RATE), ("critic", 3 * RATE))}


@engines("zero2")
def test_groups_have_their_own_rates_and_clipping(engine):
    case = Case("full", members="two", limits=TWO["limits"], rates=TWO["rates"])
    assert is_same(case, engine)
    one, pair = _alone(case), _pair("trained", case, engine)
    assert pair[0]["metrics"][0]["grad_norm_critic"] == pytest.approx(one["metrics"][0]["grad_norm_critic"], rel=1e-5)
    other = _alone(replace(case, limits=(("actor", None), ("critic", 0.1))))  # twin: each clipped as the other is
    assert furthest(other["state"], pair[0]["state"])[1] > MOMENTS


@engines("zero1", "fsdp2")
def test_a_rank_holds_its_share(engine):
    """Of the weights, gradients and moments of the run that is compared with one process above."""
    for result in _pair("trained", Case("full", dropout=0.1), engine):
        elements, whole = result["elements"], result["whole"]
        assert (elements.parameters <= HALF * whole) == (engine in SHARED)
        assert (elements.gradients <= HALF * whole) == (engine in ("fsdp2", "zero2", "zero3"))
        assert (elements.optimizer <= HALF * whole) == (engine != "ddp")


@pytest.mark.parametrize(
    ("engine", "how"),
    representatives(product(ENGINES, ("nan", "inf")), ("ddp", "inf"), ("fsdp2", "nan")),
)
def test_what_goes_wrong_on_one_rank_is_skipped_on_all(engine, how):
    """nan: gradients too. inf: of the loss alone, with finite gradients that every rank could take a step with."""
    for result in (pair := _pair("skipping", Case("lora"), engine, how)):
        assert result["decisions"] == ["stepped", "non_finite", "stepped"]
    assert same_bits(pair[0]["before"], pair[0]["after"])
    assert not same_bits(pair[0]["after"], pair[0]["end"])


@engines("ddp")
def test_a_refused_step_that_is_taken_is_noticed(engine):
    first, _ = _pair("skipping", Case("lora", broken="step that was refused"), engine, "inf")
    assert not same_bits(first["before"], first["after"])


@engines("zero2", "zero3")
def test_a_pass_that_is_discarded_leaves_weights_as_they_are_and_nothing_behind(engine):
    """Also weights that are not the optimizer's: two passes are compared on those."""
    case, undisturbed = Case("lora", dropout=0.1), _pair("trained", Case("lora", dropout=0.1), engine)[0]
    first, second = _pair("discarding", case, engine)
    for result in (first, second):
        assert same_bits(result["other"], result["kept"])
    assert same_bits(first["state"], undisturbed["state"])


@pytest.mark.parametrize("engine", representatives(["zero1", "zero2", "zero3"], "zero2", "zero3"))
def test_twin_a_step_without_update_writes_weights(engine):
    first, _ = _pair("discarding", Case("lora", dropout=0.1, broken="step without update"), engine)
    assert not same_bits(first["other"], first["kept"])


@engines("fsdp2", "zero3")
def test_zeros_that_are_filled_give_every_matrix_a_gradient(engine):
    """While B is zero, A has none, and a comparison of two passes sees nothing of it."""
    results = _pair("off_zero", Case("lora"), engine)
    for result in results:
        new, (first, second) = result["new"], result["filled"]
        assert new[1] == 0 < first[1]
        assert first == second != new == result["again"]
    assert same_bits(results[0]["before"], results[0]["after"])


@pytest.mark.parametrize("broken", ["empty tensors", "step without update"])
def test_twin_zeros_that_are_not_seen_or_written_back_stay_zero(broken):
    for result in _pair("off_zero", Case("lora", broken=broken), "zero3"):
        filled = [smallest for _, smallest in result["filled"]]
        assert filled[1] == 0
        assert (filled[0] == 0) == (broken == "empty tensors")


def test_ranks_that_decide_by_their_own_loss_are_noticed():
    first, second = _pair("skipping", Case("lora", broken="own totals"), "ddp", "inf")
    assert first["decisions"] != second["decisions"]


@engines("fsdp2")
def test_state_by_name_goes_out_and_in_again_bit_for_bit(engine):
    first, _ = _pair("through_a_checkpoint", Case("lora", dropout=0.1), engine)
    assert same_bits(first["written"], first["taken"])
    assert same_bits(first["on"], first["again"])


@engines("zero3")
def test_one_process_goes_on_from_what_two_ranks_wrote(engine, tmp_path):
    """The files are those of a run in one process, and of the frozen weights only what is written was gathered."""
    case = Case("dora")
    first, _ = on_two_ranks(engine_cases.written, case, ENGINES[engine], tmp_path)
    state = load_file(tmp_path / "checkpoint-3" / "optimizer.safetensors")
    single = engine_for(case, SINGLE, ALONE)
    single.load_state(state)
    moments = {name: value for name, value in first["state"].items() if "/" in name}
    assert same_bits(moments, {name: tensor.numpy() for name, tensor in single.gather_state().items()})
    adapter = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    weights = {name.replace(".default", ""): value for name, value in first["state"].items()}
    assert adapter
    assert all(np.array_equal(weights[_plain(name)], tensor.numpy()) for name, tensor in adapter.items())
    frozen = [name for name in first["gathered"] if "lora" not in name]
    assert (not frozen) == (engine in SHARED)


def _plain(name: str) -> str:
    """PEFT's files call DoRA's magnitude by its module alone."""
    return name if name.endswith(".weight") else f"{name}.weight"


@engines("fsdp2")
def test_every_way_into_the_model_finds_it_whole(engine):
    case = Case("dora")
    one, (first, _) = engine_cases.paths(ALONE, case, SINGLE), _pair("paths", case, engine)
    assert np.array_equal(one["found"]["answers"], first["found"]["answers"])
    for name in ("hidden", "logits", "norm"):
        assert np.allclose(one["found"][name], first["found"][name], rtol=1e-5, atol=1e-5), name
    assert furthest(one["state"], first["state"]) <= (WEIGHTS, MOMENTS)


@engines("ddp")
def test_all_ranks_name_the_module_where_one_went_wrong(engine):
    said = _pair("origin", Case("lora"), engine)
    assert said[0] == said[1]
    assert "rank 1" in said[0]
    assert "layers.1.mlp.down_proj" in said[0]
    assert "30, 31" in said[0]  # the second micro-batch of rank 1 is the fourth of all


def test_replicas_that_differ_by_a_bit_are_noticed_and_equal_ones_let_be():
    for when, name in (("beginning", "lora_A"), ("later", "/exp_avg"), ("never", "")):
        for fault in on_two_ranks(engine_cases.replicas, ENGINES["ddp"], when):
            assert (fault is None) == (when == "never"), when
            assert fault is None or (fault[0] == "SF-RANKS-DIFFER" and name in fault[1])


OFFLOADED = {
    "fsdp2": EngineChoice("fsdp2", offload="all"),
    "zero2": EngineChoice("deepspeed", 2, "optimizer"),
    "zero3": EngineChoice("deepspeed", 3, "all"),
}


@pytest.mark.parametrize("engine", representatives(OFFLOADED, "fsdp2"))
def test_offloaded_ranks_are_one_rank(engine):
    case = Case("lora", dropout=0.1)
    first, _ = on_two_ranks(engine_cases.trained, case, OFFLOADED[engine])
    assert furthest(_alone(case)["state"], first["state"]) <= (WEIGHTS, MOMENTS)


@pytest.mark.parametrize("engine", representatives(OFFLOADED, "zero2"))
def test_gradients_in_host_memory_are_those_of_their_own_step(engine):
    """A layer that a micro-batch does not use has no gradient there, not that of the step before."""
    case = Case("full", optimizer="sgd", limits=None, counts=(4, 4), rates=0.1)
    one = engine_cases.sparing(ALONE, case, SINGLE)["state"]
    first, _ = on_two_ranks(engine_cases.sparing, case, OFFLOADED[engine])
    assert furthest(one, first["state"]) <= (WEIGHTS, MOMENTS)
    if engine == "zero2":  # twin
        first, _ = on_two_ranks(engine_cases.sparing, replace(case, broken="old gradients"), OFFLOADED[engine])
        assert furthest(one, first["state"])[0] > WEIGHTS


def test_what_an_engine_cannot_do_is_refused():
    for choice in (EngineChoice("fsdp2", offload="optimizer"), EngineChoice("deepspeed", 2, "all")):
        with pytest.raises(InputError) as caught:
            make_engine(choice, tiny("lora"), ONE, lambda groups: None, ALONE, torch.device("cpu"))
        assert caught.value.faults[0].where == "parallel.offload"


@pytest.mark.parametrize("engine", representatives(["fsdp2", "zero2"], "fsdp2"))
@pytest.mark.parametrize("optimizer", representatives(["muon", "adafactor"], "muon"))
def test_optimizers_of_whole_matrices_are_refused_where_ranks_hold_shares(engine, optimizer):
    for fault in on_two_ranks(engine_cases.refusal, Case("full", optimizer=optimizer), ENGINES[engine]):
        assert fault == ("SF-CONFIG-CONFLICT", "optim.name")


@pytest.mark.parametrize("optimizer", representatives(["muon", "adafactor"], "muon"))
def test_optimizers_of_whole_matrices_work_where_ranks_hold_everything(optimizer):
    assert is_same(Case("full", optimizer=optimizer, limits=None), "ddp")
