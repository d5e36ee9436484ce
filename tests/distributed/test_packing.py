"""Packed rows dealt out to two processes: what one process loses with padded rows, two lose with packed ones."""

import json

import pytest

from distributed.runs import rows, run_forked, write_config, write_world

# fp32 sums over ranks and documents are taken in another order, and carried on by six steps of the optimizer.
LOSS_TOLERANCE = 1e-4
BATCH = {"size": 4, "micro": 3}  # 9 examples: the last step of an epoch has one, which leaves a blank row to one rank


@pytest.mark.slow
def test_two_ranks_learn_from_packed_rows_what_one_learns_from_padded_ones(tmp_path):
    world = write_world(tmp_path)
    losses = {}
    for name, packing, nproc in (("one", "off", None), ("two", "on", 2)):
        data = {"train": str(world / "train.json"), "eval": 3, "max_length": 128, "packing": packing}
        config = write_config(world, tmp_path / name, data=data, batch=BATCH, parallel={"nproc": nproc})
        code, said = run_forked(["train", config], tmp_path / f"{name}.log")
        assert code == 0, said
        losses[name] = [row["loss"] for row in rows(tmp_path / name) if "loss" in row]
    assert losses["two"] == pytest.approx(losses["one"], abs=LOSS_TOLERANCE)
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())["plan"]
    assert (plan["parallel"]["ranks"]["value"], plan["kernels"]["documents"]["value"]) == (2, "sdpa")
