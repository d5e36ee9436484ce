"""ZeRO checkpoints, laid out by hand as `models.convert.zero` describes them, come back as the weights that went in.

Real ones of DeepSpeed 0.19.8 (two ranks; stages 1, 2, 3; with and without frozen weights) were compared by hand with
its own script on 2026-11-21: all weights equal, bit for bit.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch

from helpers.faults import raises_fault
from surefoot.models.convert.tensors import held
from surefoot.models.convert.zero import consolidate, find_checkpoint

WORLD = 3
SHAPES = [{"a.weight": (4, 5), "b.bias": (7,)}, {"c.weight": (2, 3), "d.weight": (1,)}]


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for group in SHAPES for name, shape in group.items()}


def written(root, stage):
    """All ranks' files of a run with a frozen weight, a buffer and a shared one."""
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    tensors, frozen = weights(), torch.arange(10, dtype=torch.bfloat16).reshape(2, 5)
    share = math.ceil(frozen.numel() / WORLD)
    padded = torch.cat([frozen.reshape(-1), torch.zeros(share * WORLD - frozen.numel(), dtype=torch.bfloat16)])
    for rank in range(WORLD):
        groups = []
        for group in SHAPES:
            if stage == 3:
                pieces = []
                for name in group:
                    flat = tensors[name].reshape(-1)
                    size = math.ceil(flat.numel() / WORLD)
                    flat = torch.cat([flat, torch.full((size * WORLD - flat.numel(),), float("nan"))])
                    pieces.append(flat[rank * size : (rank + 1) * size])
                groups.append(torch.cat(pieces))
            else:
                flat = torch.cat([tensors[name].reshape(-1) for name in group])
                flat = torch.cat([flat, torch.full((-flat.numel() % (2 * WORLD),), float("nan"))])
                size = flat.numel() // WORLD
                groups.append(flat[rank * size : (rank + 1) * size].clone())
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {"zero_stage": stage, "partition_count": WORLD if stage == 3 else [WORLD, WORLD], key: groups}
        optimizer["base_optimizer_state"] = {"state": {0: {"exp_avg": torch.zeros(5)}}}
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        state = {
            "module": {"pos.buffer": torch.arange(3.0), "a.weight": torch.zeros(4, 5)},
            "buffer_names": ["pos.buffer"],
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in SHAPES
            ],
            "shared_params": {"head.weight": "a.weight"},
            "frozen_param_shapes": {"f.weight": torch.Size((2, 5))},
            "frozen_param_fragments": {
                "f.weight": padded[rank * share : (rank + 1) * share].clone() if stage == 3 else frozen
            },
        }
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(state, folder / name)
    return folder, {**tensors, "f.weight": frozen, "pos.buffer": torch.arange(3.0), "head.weight": tensors["a.weight"]}


def consolidated(folder, asked=None):
    """asked: gets what is wanted of each file.

    With the files opened here: that a child process gives the same is test_pickled's matter."""

    def rebuilt(value):
        if isinstance(value, torch.Tensor):
            return held(value)
        if isinstance(value, dict):
            return {key: rebuilt(item) for key, item in value.items()}
        return [rebuilt(item) for item in value] if isinstance(value, list) else value

    def opened(wanted):
        if asked is not None:
            asked.append(wanted)
        return [rebuilt(torch.load(file, weights_only=True)) for file, _ in wanted]

    return consolidate(folder, opened)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_weights_come_back(tmp_path, stage):
    folder, expected = written(tmp_path / "run", stage)
    assert find_checkpoint(tmp_path / "run") == folder
    found = consolidated(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].read(), tensor), name
        assert found[name].shape == tuple(tensor.shape)
    if stage == 3:  # twin: a rank's file in another's place
        first, second = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        swapped = consolidated(folder)
        assert not torch.equal(swapped["a.weight"].read(), expected["a.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_of_the_half_precision_weights_only_buffers_are_opened(tmp_path, stage):
    folder, _ = written(tmp_path / "run", stage)
    asked: list = []
    consolidated(folder, asked)
    first, second = asked
    assert not [keep for _, keep in first if "module" in keep]
    assert [keep for _, keep in second] == [["module.pos.buffer"]]
    assert len(first) == WORLD + (WORLD if stage == 3 else 1)


def test_missing_ranks_and_wrong_shapes_are_refused(tmp_path):
    folder, _ = written(tmp_path / "run", 2)
    model = folder / "mp_rank_00_model_states.pt"
    state = torch.load(model)
    torch.save({**state, "param_shapes": [{"a.weight": torch.Size((40, 5))}, state["param_shapes"][1]]}, model)
    with raises_fault("SF-CONVERT-ZERO", folder, 30, 200):
        consolidated(folder)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with raises_fault("SF-CONVERT-ZERO", folder, 3, 2):
        consolidated(folder)
    (tmp_path / "run" / "latest").write_text("../elsewhere")
    with raises_fault("SF-CONVERT-ZERO", f"{tmp_path}/run/latest"):
        find_checkpoint(tmp_path / "run")
