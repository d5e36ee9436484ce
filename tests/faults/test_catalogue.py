"""Every fault of the catalogue has its proof; and those that no one row of the table shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults.model_cases import from_under_an_adapter, fused
from faults.place import ROWS, Place
from faults.proven_elsewhere import PROVEN_ELSEWHERE
from faults.run_cases import raising
from faults.test_bad_inputs import CASES
from helpers.tiers import representatives
from surefoot.training.checkpoint import list_checkpoints

# How many faults each part of the catalogue has: data, tokenizer, model, precision, run, policy, export, config.
FAULTS = {"D": 28, "T": 13, "M": 18, "P": 9, "R": 27, "K": 8, "E": 5, "C": 7}
NOT_APPLICABLE: dict[str, str] = {}  # number -> why it cannot happen here
CATALOGUE = {f"{part}{number}" for part, count in FAULTS.items() for number in range(1, count + 1)}
PROVEN = [(fault, place) for fault, places in PROVEN_ELSEWHERE.items() for place in places]


def open_faults(*without: str) -> set[str]:
    """Faults of the catalogue that nothing shows."""
    shown = {case.fault for case in CASES} | PROVEN_ELSEWHERE.keys() | NOT_APPLICABLE.keys()
    return CATALOGUE - (shown - set(without))


def test_every_fault_of_the_catalogue_is_shown() -> None:
    assert len(CATALOGUE) == 115
    assert open_faults() == set()
    assert {case.fault for case in CASES} | PROVEN_ELSEWHERE.keys() | NOT_APPLICABLE.keys() <= CATALOGUE


def test_twin_a_fault_that_nothing_shows_is_noticed() -> None:
    assert open_faults("R2", "C6") == {"R2", "C6"}


@pytest.mark.parametrize(("fault", "place"), PROVEN)
def test_what_is_proven_elsewhere_is_there(fault: str, place: str) -> None:
    file, _, name = place.partition("::")
    assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(encoding="utf-8")


def test_the_last_line_cut_at_every_byte_is_named_by_the_command(place: Place) -> None:
    """All of it gone, or its end of line alone, is a whole file of one record less, or of as many."""
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in [*ROWS[:1], {**ROWS[1], "output": "ä 😀"}]]
    path = place.text("train.jsonl", b"")
    place.change(data={"train": str(path)})
    config = place.config()
    for cut in range(1, len(lines[1])):
        path.write_bytes(lines[0] + b"\n" + lines[1][:cut])
        result = place.call("train", config)
        assert result.exit_code == 2, cut
        (line,) = (line for line in result.stderr.splitlines() if "error: " in line)
        assert "train.jsonl:2" in line, cut
        assert "cut off" in line, cut
    assert not (place.folder / "out").exists()


@pytest.mark.parametrize("change", representatives([fused, from_under_an_adapter], fused))
def test_a_base_in_another_layout_trains_to_the_same_bits(place: Place, change) -> None:
    place.weights(change)
    result = place.call("train", place.config())
    assert result.exit_code == 0, result.output
    found, expected = (load_file(run / "adapter_model.safetensors") for run in (place.folder / "out", place.run))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_device_that_fails_saves_nothing_of_its_step(place: Place) -> None:
    run = place.own_run()
    raising(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), step=9)(place)
    result = place.call("train", place.config(), "--resume", "duration=12 steps")
    assert result.exit_code == 3
    assert max(checkpoint.step for checkpoint in list_checkpoints(run)) == 8
    place.patch.undo()
    assert place.call("train", place.config(), "--resume", "duration=12 steps").exit_code == 0
    assert max(checkpoint.step for checkpoint in list_checkpoints(run)) == 12
