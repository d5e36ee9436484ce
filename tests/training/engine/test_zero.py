"""What ZeRO is asked to do, and which run of a parameter each rank keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.system import libraries
from surefoot.training.engine.deepspeed import deepspeed_config
from surefoot.training.engine.zero_shares import Share, own_part, put_state, share_of_parameter, share_of_row
from surefoot.training.ranks import Ranks


def config(stage, offload="none"):
    return deepspeed_config(stage=stage, offload=offload, world=4, trained=1000, pinned=False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_step_does_itself_is_off(stage):
    asked = config(stage)
    assert asked["zero_optimization"]["stage"] == stage
    assert asked["managed_gradient_accumulation"] is False
    assert asked["gradient_clipping"] == 0.0
    assert not {"fp16", "bf16", "optimizer", "scheduler"} & asked.keys()


def test_every_weight_is_shared_out_at_stage_3_and_none_before():
    assert config(3)["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert not [key for key in config(2)["zero_optimization"] if key.startswith("stage3")]


@pytest.mark.parametrize(
    ("offload", "keys"),
    [("none", set()), ("optimizer", {"offload_optimizer"}), ("all", {"offload_optimizer", "offload_param"})],
)
def test_what_lies_in_host_memory(offload, keys):
    assert {key for key in config(3, offload)["zero_optimization"] if key.startswith("offload")} == keys


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 60), st.integers(1, 40))
def test_the_runs_of_all_ranks_make_up_a_parameter_of_a_row(world, start, elements, size):
    """As far as the row reaches, in order, without gap or overlap, and each where its rank's piece has it."""
    shape = torch.Size([elements])
    row = list(range(world * size))
    reached = []
    for rank in range(world):
        share = share_of_row(0, start, shape, size, Ranks(rank, world, rank))
        first, end = share.runs[rank]
        piece = row[rank * size : (rank + 1) * size]
        reached += piece[share.place : share.place + end - first]
        assert end - first == len(piece[share.place : share.place + end - first])
    assert reached == row[start : start + elements]


@given(st.integers(1, 5), st.integers(1, 60))
def test_the_runs_of_all_ranks_make_up_a_parameter_that_is_cut_itself(world, elements):
    size = -(-elements // world)
    share = share_of_parameter(0, 7, torch.Size([elements]), size, Ranks(0, world, 0))
    covered = [number for first, end in share.runs for number in range(first, end)]
    assert covered == list(range(elements))
    assert share.place == 7


@given(world=st.integers(1, 5), elements=st.integers(1, 40))
def test_the_parts_of_all_ranks_are_the_parameter_and_nothing_beyond_it(world, elements):
    """Pieces are padded to one size: a parameter of fewer elements than ranks leaves whole pieces unwritten."""
    size = -(-elements // world)
    row = torch.full((world * size,), math.nan)  # what nobody wrote may be anything
    row[:elements] = torch.arange(elements, dtype=torch.float32)
    pieces = row.reshape(world, size)
    parts = [own_part(pieces[rank], elements, rank) for rank in range(world)]
    assert torch.cat(parts).tolist() == list(range(elements))
    runs = share_of_parameter(0, 0, torch.Size([elements]), size, Ranks(0, world, 0)).runs
    assert [len(part) for part in parts] == [end - first for first, end in runs]


def test_twin_whole_pieces_hold_what_nobody_wrote():
    """Two elements on three ranks, in pieces of one."""
    pieces = torch.tensor([0.0, 1.0, math.nan]).reshape(3, 1)
    assert [own_part(pieces[rank], 2, rank).tolist() for rank in range(3)] == [[0.0], [1.0], []]
    assert not torch.isfinite(pieces[2].flatten()).all()


def test_parameters_of_one_flat_tensor_have_taken_as_many_steps():
    shares = {name: Share(0, 0, ((0, 2),), torch.Size([2])) for name in ("a", "b")}
    flat = torch.zeros(2)
    put_state(shares, [flat], [{}], {"a/step": torch.tensor(3.0), "b/step": torch.tensor(3.0)}, Ranks(0, 1, 0))
    with raises_fault("SF-CHECKPOINT-DAMAGED", "optimizer.safetensors"):
        put_state(shares, [flat], [{}], {"a/step": torch.tensor(3.0), "b/step": torch.tensor(4.0)}, Ranks(0, 1, 0))


def test_deepspeed_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(libraries, "is_installed", lambda name: False)
    with raises_fault("SF-PACKAGE", "parallel.engine"):
        libraries.import_deepspeed("cpu")
