"""A pickle is a program: whatever it asks for, nothing of it runs, and the refusal is one line."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path

import torch

from helpers.faults import raises_fault
from surefoot.models.convert import pickled, unpickle
from surefoot.models.convert.pickled import Wanted, open_pickled, state_dict
from surefoot.models.convert.tensors import as_bytes


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_nothing_of_a_hostile_file_runs(tmp_path, capsys):
    """In the child, and of the other forms as the child opens them."""
    files = {name: tmp_path / f"{name}.bin" for name in ("zip", "plain", "tar")}
    payload = Payload(tmp_path / "marker")
    torch.save({"w": payload}, files["zip"])
    files["plain"].write_bytes(pickle.dumps(payload))
    with tarfile.open(files["tar"], "w") as archive:
        (tmp_path / "x").write_text("x")
        archive.add(tmp_path / "x", arcname="../marker")
    torch.save({"a": torch.ones(1)}, tmp_path / "good.pt")
    with raises_fault("SF-MODEL-WEIGHTS", files["zip"], "posix.system"):
        open_pickled([Wanted(tmp_path / "good.pt"), Wanted(files["zip"])], tmp_path / "work")
    for name in ("plain", "tar"):
        (tmp_path / name).mkdir()
        assert unpickle._opened(str(files[name]), tmp_path / name, (), torch) == unpickle.REFUSED
        assert capsys.readouterr().out.count("\n") == 1
        assert not list((tmp_path / name).iterdir())
    assert not (tmp_path / "marker").exists()
    pickle.loads(files["plain"].read_bytes())  # twin: the payload is live
    assert (tmp_path / "marker").exists()


def test_one_child_gives_all_tensors_bit_for_bit_and_shared_ones_once(tmp_path, monkeypatch):
    started = []
    run = pickled.subprocess.run
    monkeypatch.setattr(pickled.subprocess, "run", lambda *given, **more: started.append(given) or run(*given, **more))
    weight = torch.tensor([[float("nan"), -0.0], [1e-45, 2.0]])
    tensors = {"a": weight, "b": weight.bfloat16(), "tied": weight, "view": weight[:, 1], "one": torch.tensor(3)}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "m.pt")
    for number in range(2):
        torch.save({"a": torch.full((2,), number), "b": torch.ones(1)}, tmp_path / f"{number}.pt")
    parts = [Wanted(tmp_path / f"{number}.pt", ("a",)) for number in range(2)]
    value, *others = open_pickled([Wanted(tmp_path / "m.pt"), *parts], tmp_path / "out")
    assert len(started) == 1
    found = state_dict(value, tmp_path / "m.pt")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(as_bytes(found[name].read()), as_bytes(tensor)), name
    assert sum(path.stat().st_size for path in (tmp_path / "out" / "0").rglob("*.safetensors")) < 1000
    assert [value.keys() for value in others] == [{"a"}] * 2
    assert [value["a"].read().tolist() for value in others] == [[0, 0], [1, 1]]


def test_a_file_without_weights_is_refused():
    with raises_fault("SF-MODEL-WEIGHTS", "m.pt"):
        state_dict({"epoch": 3, "loss": [1.0]}, Path("m.pt"))


def test_a_child_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(pickled, "_SECONDS", 0.01)
    torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
    with raises_fault("SF-MODEL-WEIGHTS", f"{tmp_path}/m.pt"):
        open_pickled([Wanted(tmp_path / "m.pt")], tmp_path / "out")
