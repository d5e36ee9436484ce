"""A pickle is a program: whatever it asks for, nothing of it runs, and the refusal is one line."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from surefoot.models.convert import pickled
from surefoot.models.convert.pickled import Wanted, open_pickled, state_dict
from surefoot.models.convert.tensors import as_bytes
from surefoot.system.errors import EnvironmentFault, InputError


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def hostile(folder: Path) -> dict[str, Path]:
    payload, marker = Payload(folder / "marker"), folder / "marker"
    files = {name: folder / f"{name}.bin" for name in ("zip", "plain", "tar")}
    torch.save({"w": payload}, files["zip"])
    files["plain"].write_bytes(pickle.dumps(payload))
    with tarfile.open(files["tar"], "w") as archive:
        (folder / "x").write_text("x")
        archive.add(folder / "x", arcname=f"../{marker.name}")
    return files


def test_nothing_of_a_hostile_file_runs(tmp_path):
    (tmp_path / "work").mkdir()
    messages = {}
    for name, file in hostile(tmp_path).items():
        with pytest.raises(InputError) as caught:
            open_pickled([Wanted(file)], tmp_path / "work" / name)
        messages[name] = str(caught.value)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "work" / "marker").exists()
    assert all("\n" not in message for message in messages.values())
    assert "asks for posix.system when it is opened" in messages["zip"]
    assert "tar archive" in messages["tar"]
    pickle.loads((tmp_path / "plain.bin").read_bytes())  # twin: the payload is live
    assert (tmp_path / "marker").exists()


def test_tensors_come_back_bit_for_bit_and_shared_ones_once(tmp_path):
    weight = torch.tensor([[float("nan"), -0.0], [1e-45, 2.0]])
    tensors = {"a": weight, "b": weight.bfloat16(), "tied": weight, "view": weight[:, 1], "one": torch.tensor(3)}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "m.pt")
    (value,) = open_pickled([Wanted(tmp_path / "m.pt")], tmp_path / "out")
    found = state_dict(value, tmp_path / "m.pt")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(as_bytes(found[name].read()), as_bytes(tensor)), name
    held = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors"))
    assert held < 1000


def test_a_file_without_weights_is_refused():
    with pytest.raises(InputError, match="no mapping of names to tensors"):
        state_dict({"epoch": 3, "loss": [1.0]}, Path("m.pt"))


def test_one_child_opens_several_files_and_names_the_one_that_is_refused(tmp_path, monkeypatch):
    started = []
    run = pickled.subprocess.run
    monkeypatch.setattr(pickled.subprocess, "run", lambda *given, **more: started.append(given) or run(*given, **more))
    for number in range(3):
        torch.save({"a": torch.full((2,), number), "b": torch.ones(1)}, tmp_path / f"{number}.pt")
    wanted = [Wanted(tmp_path / f"{number}.pt", ("a",)) for number in range(3)]
    values = open_pickled(wanted, tmp_path / "out")
    assert [value.keys() for value in values] == [{"a"}] * 3
    assert [value["a"].read().tolist() for value in values] == [[0, 0], [1, 1], [2, 2]]
    assert len(started) == 1
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Payload(tmp_path / "marker")))
    with pytest.raises(InputError, match=r"1\.pt: asks for"):
        open_pickled(wanted, tmp_path / "again")
    assert not (tmp_path / "marker").exists()


def test_a_child_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(pickled, "_SECONDS", 0.01)
    torch.save({"a": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(EnvironmentFault, match="took more than"):
        open_pickled([Wanted(tmp_path / "m.pt")], tmp_path / "out")
