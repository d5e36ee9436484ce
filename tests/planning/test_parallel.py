"""Which engine several processes use, and what of the forecast each of them holds."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from helpers.faults import gives
from helpers.plans import adapter_plan, precision_plan
from surefoot.config.sections import ParallelConfig
from surefoot.models.facts import facts_of
from surefoot.planning.notes import Notes
from surefoot.planning.parallel import (
    RanksFacts,
    caution_loading,
    check_average,
    check_server,
    check_shareable,
    frees_casts,
    gathered_bytes,
    per_rank,
    plan_parallel,
    shared_words,
)
from surefoot.planning.plan import Choice, MemoryPlan, ParallelPlan
from surefoot.system.hardware import GIB

OFF = Choice(False, "", "default")


def states(size: int, available: int = 80) -> MemoryPlan:
    """Weights, gradients and optimizer of so many GiB each."""
    return MemoryPlan(size * GIB, size * GIB, size * GIB, 0, 0, available * GIB, OFF)


def plan(world: int, size: int = 1, **asked) -> tuple[ParallelPlan, Notes]:
    notes = Notes()
    return plan_parallel(ParallelConfig(**asked), RanksFacts(world, world), states(size), notes), notes


def test_one_process_is_single():
    found, notes = plan(1)
    assert (found.engine.value, found.ranks.value, notes.faults) == ("single", 1, [])


def test_several_take_ddp_where_the_states_fit_and_fsdp2_where_they_do_not():
    assert plan(8)[0].engine.value == "ddp"
    found, _ = plan(8, size=40)
    assert found.engine.value == "fsdp2"
    assert all(gives(found.engine.reason, one) for one in (120.0, 8, "weights", "gradients", "optimizer"))


def test_single_is_refused_for_several():
    assert [fault.where for fault in plan(2, engine="single")[1].faults] == ["parallel.engine"]


def test_offload_needs_an_engine_that_has_it():
    assert [fault.where for fault in plan(2, engine="ddp", offload="all")[1].faults] == ["parallel.offload"]
    assert plan(2, engine="fsdp2", offload="all")[1].faults == []


def test_one_process_keeps_its_optimizer_in_host_memory_and_its_weights_on_the_device():
    for engine in ("auto", "single"):
        found, notes = plan(1, engine=engine, offload="optimizer")
        assert (found.engine.value, found.offload, notes.faults) == ("single", "optimizer", [])
        assert [fault.where for fault in plan(1, engine=engine, offload="all")[1].faults] == ["parallel.offload"]
    found, _ = plan(1, offload="optimizer")
    notes = Notes()
    check_average(found, 0.9, notes)
    assert [fault.where for fault in notes.faults] == ["ppo.ema"]


def test_a_rank_holds_its_share():
    for engine, stage, shares in [
        ("ddp", None, (8, 8, 8)),
        ("fsdp2", None, (2, 2, 2)),
        ("deepspeed", 1, (8, 8, 2)),
        ("deepspeed", 2, (8, 2, 2)),
        ("deepspeed", 3, (2, 2, 2)),
    ]:
        parallel = ParallelPlan(Choice(engine, "", "user"), Choice(4, "", "user"), stage)
        found = per_rank(states(8), parallel, 0, 1)
        assert (found.weights, found.gradients, found.optimizer) == tuple(size * GIB for size in shares)


def sharded(engine: str = "fsdp2", stage: int | None = None, checkpointing: bool = False) -> MemoryPlan:
    """One of four ranks: 8 GiB of weights, 4 GiB of which are casts, and 3 GiB gathered at a time."""
    whole = replace(states(8), cast=4 * GIB, gradient_checkpointing=replace(OFF, value=checkpointing))
    parallel = ParallelPlan(Choice(engine, "", "user"), Choice(4, "", "user"), stage)
    return per_rank(whole, parallel, 3 * GIB, 2)


def test_what_a_rank_has_whole_is_not_divided():
    found = sharded()
    assert (found.weights, found.gathered, found.total) == (5 * GIB, 3 * GIB, (5 + 3 + 2 + 2) * GIB)
    assert sharded(checkpointing=True).weights == 1 * GIB  # the casts are made again
    assert sharded("deepspeed", 3).gathered == 3 * GIB + 2 * 2 * 10**9
    assert sharded("ddp").gathered == sharded("deepspeed", 2).gathered == 0


@pytest.mark.parametrize(
    ("engine", "stage", "checkpointing", "frees"),
    [
        ("fsdp2", None, True, True),
        ("deepspeed", 3, True, True),
        ("fsdp2", None, False, False),
        ("ddp", None, True, False),
    ],
)
def test_casts_are_freed_where_weights_are_sharded_and_layers_computed_again(engine, stage, checkpointing, frees):
    parallel = ParallelPlan(Choice(engine, "", "user"), Choice(4, "", "user"), stage)
    memory = replace(states(8), gradient_checkpointing=replace(OFF, value=checkpointing))
    assert frees_casts(parallel, memory) == frees


def test_units_that_are_gathered(tmp_path):
    """Three layers of a narrow model, counted by hand, with and without an adapter."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    AutoConfig.for_model(
        "llama", vocab_size=500, num_hidden_layers=3, tie_word_embeddings=False, **sizes
    ).save_pretrained(tmp_path)
    model, layer, rest = facts_of(tmp_path), 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64, 2 * 500 * 64 + 64
    full = gathered_bytes(model, precision_plan(), None)
    assert full == 4 * (4 * layer + rest) + 4 * rest // 2
    lora = gathered_bytes(model, precision_plan(compute="bf16", base="bf16"), adapter_plan(("q_proj",)))
    assert lora == 2 * (2 * layer + rest)


def test_what_lies_in_host_memory_counts_nowhere():
    parallel = ParallelPlan(Choice("fsdp2", "", "user"), Choice(4, "", "user"), None, "all")
    found = per_rank(states(8), parallel, 0, 1)
    assert (found.weights, found.optimizer) == (0, 0)
    # A quarter each of weights and moments, and of what gradients are counted with: they and the weights that train.
    assert found.host == (2 + 2 + 2 + 2) * GIB


@pytest.mark.parametrize(
    ("engine", "stage", "shared"),
    [
        ("ddp", None, []),
        ("deepspeed", 1, ["optimizer"]),
        ("deepspeed", 2, ["gradients", "optimizer"]),
        ("fsdp2", None, ["weights", "gradients", "optimizer"]),
    ],
)
def test_what_is_shared_is_named(engine, stage, shared):
    words = shared_words(engine, stage, 4)
    assert [part for part in ("weights", "gradients", "optimizer") if gives(words, part)] == shared
    assert gives(words, 4) == bool(shared)


@pytest.mark.parametrize(
    ("engine", "asked"), [("fsdp2", {"offload": "optimizer"}), ("deepspeed", {"offload": "all", "zero_stage": 2})]
)
def test_an_offload_that_an_engine_does_not_have_is_refused(engine, asked):
    assert [fault.where for fault in plan(2, engine=engine, **asked)[1].faults] == ["parallel.offload"]


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_what_cannot_be_cut_into_shares_is_refused(engine):
    asked, _ = plan(2, engine=engine)
    for optimizer, packed, keys in [
        ("adamw", False, []),
        ("sgd", False, []),
        ("rmsprop", False, []),
        ("muon", False, ["optim.name"]),
        ("adamw_8bit", True, ["optim.name", "parallel.engine"]),
    ]:
        notes = Notes()
        check_shareable(asked, optimizer, packed, notes)
        assert [fault.where for fault in notes.faults] == keys
    notes = Notes()
    check_shareable(plan(2, engine="ddp")[0], "muon", True, notes)
    assert notes.faults == []


def test_an_average_of_weights_needs_them_whole():
    for asked, size, refused in [
        ({"engine": "fsdp2"}, 1, True),
        ({"engine": "deepspeed", "zero_stage": 3}, 1, True),
        ({}, 40, True),  # auto, which takes fsdp2
        ({"engine": "deepspeed", "zero_stage": 2}, 1, False),
        ({}, 1, False),
    ]:
        found, notes = plan(2, size, **asked)
        check_average(found, 0.9, notes)
        assert [fault.where for fault in notes.faults] == ["ppo.ema"] * refused
        assert all(f"parallel.engine {found.engine.value}" in fault.what for fault in notes.faults)
        _, without = plan(2, size, **asked)
        check_average(found, None, without)
        assert without.faults == []


@pytest.mark.parametrize(
    ("asked", "local", "said"),
    [
        ({"engine": "fsdp2"}, 8, True),
        ({"engine": "deepspeed", "zero_stage": 3}, 1, True),
        ({"engine": "deepspeed", "zero_stage": 2}, 8, False),
        ({"engine": "ddp"}, 8, False),
    ],
)
def test_what_is_read_before_it_is_shared_out_is_said(asked, local, said):
    found, notes = plan(8, **asked)
    caution_loading(found, RanksFacts(8, local), 14 * GIB, notes)
    assert len(notes.cautions) == said
    assert all(gives(caution, "14.0") and gives(caution, f"{14 * local}.0") for caution in notes.cautions)
    found, notes = plan(8, **asked)
    caution_loading(found, RanksFacts(8, local), GIB // 9, notes)  # too little to be a worry
    assert notes.cautions == []


@pytest.mark.parametrize(("world", "rollouts", "refused"), [(2, "vllm", 1), (1, "vllm", 0), (2, "embedded", 0)])
def test_a_server_of_answers_beside_several_processes_is_refused(world, rollouts, refused):
    found, notes = plan(world)
    check_server(found, rollouts, "grpo.engine", notes)
    assert [fault.where for fault in notes.faults] == ["grpo.engine"] * refused
