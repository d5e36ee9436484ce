"""A checkpoint that is found again is the one that was written, or it is not found."""

import errno
import json
import os
import random
import resource
import shutil
import signal

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from helpers.faults import raises_fault
from helpers.toy_model import (
    bits,
    same_bits,
    save_checkpoint,
    settings,
    toy_batches,
    toy_engine,
    toy_examples,
    toy_loss,
)
from surefoot.planning import disk as planning_disk
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault
from surefoot.training import checkpoint as module
from surefoot.training.checkpoint import (
    Checkpoint,
    clear_rejected,
    list_checkpoints,
    load_state,
    newest_verified,
    retain,
    set_aside_newer,
    verify_checkpoint,
)
from surefoot.training.manifest import MANIFEST, sealed
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.state import Best, LossScale, RunState
from surefoot.training.step import train_step


def save(run, engine, state):
    def write(folder):
        save_file(dict(engine.model.state_dict()), folder / "model.safetensors")

    more = {"trainer_state": {"global_step": state.step}, "identity": {"a": 1}}
    return save_checkpoint(run, engine, state, write_model=write, **more)


@pytest.fixture
def engine():
    engine = toy_engine()
    train_step(engine, toy_loss, toy_batches(toy_examples(6), 3), step=1, lr=0.1, scale=None, settings=settings())
    return engine


def test_state_comes_back_exactly(tmp_path, engine):
    state = RunState(
        step=7, tokens=123, scale=LossScale(512.0, 3), best=Best(4, 0.1 + 0.2), evaluated=4, stale=1, seconds=1.5
    )
    folder = save(tmp_path, engine, state)
    assert verify_checkpoint(folder) == []
    found, rejected = newest_verified(tmp_path)
    assert (found, rejected) == (Checkpoint(folder, 7), [])
    loaded, tensors = load_state(found)
    assert loaded == state
    fresh = toy_engine()
    fresh.model.load_state_dict(engine.model.state_dict())
    load_optimizer_tensors(fresh.optimizer, fresh.parameters, tensors)
    assert same_bits(bits(engine), bits(fresh))


def test_only_finished_checkpoints_match(tmp_path, engine):
    save(tmp_path, engine, RunState(step=1))
    (tmp_path / ".checkpoint-9.1-0123abcd.tmp").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]
    durable.clear_temporary(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-x"]


def test_steps_are_ordered_as_numbers(tmp_path, engine):
    for step in (2, 10, 9):
        save(tmp_path, engine, RunState(step=step))
    assert [c.step for c in list_checkpoints(tmp_path)] == [10, 9, 2]


def test_saving_the_same_step_again_replaces_it(tmp_path, engine):
    save(tmp_path, engine, RunState(step=3))
    folder = save(tmp_path, engine, RunState(step=3, evaluated=3))
    assert verify_checkpoint(folder) == []
    assert load_state(Checkpoint(folder, 3))[0].evaluated == 3
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path, engine, monkeypatch):
    save(tmp_path, engine, RunState(step=3))
    rename, calls = durable.os.rename, []

    def killed_at_the_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(durable.os, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, engine, RunState(step=3, evaluated=3))
    monkeypatch.undo()
    assert newest_verified(tmp_path) == (None, [])  # looking moves nothing
    durable.restore_replaced(tmp_path)  # as resuming does first
    assert newest_verified(tmp_path)[0].step == 3


def damage(path, draw):
    """One random mutation of a file: flip a bit, cut it, zero a part, append, delete."""
    data = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "cut", "zero", "append", "delete"])
    if kind == "delete":
        path.unlink()
        return
    if kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "append":
        data += b"\0"
    else:
        half = len(data) // 2
        data[half:] = bytes(b ^ 0xFF for b in data[half:])
    path.write_bytes(bytes(data))


def test_any_damage_is_found_and_the_older_checkpoint_taken(tmp_path, engine):
    older = save(tmp_path, engine, RunState(step=1))
    newer = save(tmp_path, engine, RunState(step=2))
    shutil.copytree(newer, tmp_path / "whole")
    for trial in range(30):
        draw = random.Random(trial)
        damage(draw.choice(sorted(p for p in newer.rglob("*") if p.is_file())), draw)
        found, rejected = newest_verified(tmp_path)
        assert found == Checkpoint(older, 1), trial
        assert rejected
        shutil.rmtree(newer)
        shutil.copytree(tmp_path / "whole", newer)


def test_twin_without_hashes_a_flipped_bit_is_loaded(tmp_path, engine, monkeypatch):
    folder = save(tmp_path, engine, RunState(step=1))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert verify_checkpoint(folder)
    expected = json.loads((folder / MANIFEST).read_text())["files"]
    monkeypatch.setattr(durable, "sha256_file", lambda p: expected[p.name]["sha256"])
    assert verify_checkpoint(folder) == []


def test_a_manifest_that_was_edited_is_found(tmp_path, engine):
    folder = save(tmp_path, engine, RunState(step=1))
    content = json.loads((folder / MANIFEST).read_text())
    edits = ({"step": 2}, {"schema": 1}, {"schema": 3}, {"identity": {"a": 2}}, {"files": {}}, {"more": 1})
    for edit in (*edits, {"sha256": "0" * 64}):
        (folder / MANIFEST).write_text(durable.json_text({**content, **edit}))
        assert verify_checkpoint(folder), edit


def test_a_manifest_without_a_digest_as_older_versions_wrote_it_is_read(tmp_path, engine):
    folder = save(tmp_path, engine, RunState(step=1))
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    (folder / MANIFEST).write_text(json.dumps({**content, "schema": 1}, indent=2))
    assert verify_checkpoint(folder) == []
    (folder / MANIFEST).write_text(json.dumps(content, indent=2))  # of today, it must have one
    assert verify_checkpoint(folder)


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, engine):
    folder = save(tmp_path, engine, RunState(step=1))
    content = json.loads((folder / MANIFEST).read_text())
    files = content["files"]
    for name in ("../model.safetensors", "/etc/hostname", "a/../../b"):
        content["files"] = {**files, name: files["model.safetensors"]}
        (folder / MANIFEST).write_text(durable.json_text(sealed(content)))
        (fault,) = verify_checkpoint(folder)
        assert fault.where == str(folder / MANIFEST)


def test_a_file_that_was_added_is_found_and_a_hidden_one_is_nobodys(tmp_path, engine):
    folder = save(tmp_path, engine, RunState(step=1))
    (folder / ".DS_Store").touch()
    assert verify_checkpoint(folder) == []
    (folder / module.STAGE).touch()
    (fault,) = verify_checkpoint(folder)
    assert fault.where == str(folder / module.STAGE)


def test_a_checkpoint_under_the_name_of_another_step_is_found(tmp_path, engine):
    older = save(tmp_path, engine, RunState(step=1))
    save(tmp_path, engine, RunState(step=2)).rename(tmp_path / "checkpoint-9")
    found, rejected = newest_verified(tmp_path)
    assert found == Checkpoint(older, 1)
    assert rejected[0].where == str(tmp_path / "checkpoint-9")


def test_checkpoints_but_none_valid(tmp_path, engine):
    folder = save(tmp_path, engine, RunState(step=1))
    (folder / MANIFEST).unlink()
    with raises_fault("SF-CHECKPOINT-DAMAGED", folder / MANIFEST, also=[("SF-CHECKPOINT-NONE", tmp_path)]):
        newest_verified(tmp_path)
    assert newest_verified(tmp_path / "nothing") == (None, [])  # no checkpoint at all


def test_nothing_non_finite_is_ever_published(tmp_path, engine):
    moment, weight = engine.gather_state()["head.weight/exp_avg"], engine.model.head.weight
    for name, tensor in (("head.weight/exp_avg", moment), ("head.weight", weight)):
        before = tensor[0, 0].clone()
        with torch.no_grad():
            tensor[0, 0] = float("nan")
        with raises_fault("SF-DIVERGED", "step 2", name):
            save(tmp_path, engine, RunState(step=2))
        assert list(tmp_path.iterdir()) == []
        with torch.no_grad():
            tensor[0, 0] = before


def test_a_failed_save_leaves_the_older_one_and_no_traces(tmp_path, engine):
    save(tmp_path, engine, RunState(step=1))

    def failing(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        save_checkpoint(tmp_path, engine, RunState(step=2), write_model=failing)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest_verified(tmp_path)[0].step == 1


def test_a_full_disk_is_an_environment_fault_and_leaves_the_older_one(tmp_path, engine):
    """A real limit on file size, in a child process: writes beyond it fail as they do on a full disk."""
    save(tmp_path, engine, RunState(step=1))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            save(tmp_path, engine, RunState(step=2))
        except EnvironmentFault as error:
            os._exit(error.exit_code if str(tmp_path / "checkpoint-2") in str(error) else 90)
        except BaseException:
            os._exit(91)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest_verified(tmp_path)[0].step == 1


def test_retention_keeps_the_newest_and_the_best(tmp_path, engine):
    for step in range(1, 7):
        save(tmp_path, engine, RunState(step=step))
    retain(tmp_path, keep=2, best_step=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-5", "checkpoint-6"]


def flip(run, *steps):
    """A bit of the optimizer's state, as a failing disk does."""
    for step in steps:
        path = run / f"checkpoint-{step}" / module.OPTIMIZER
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


STAYING = {
    (): [6, 5],
    (6,): [6, 5],
    (5,): [6, 5],
    (6, 5): [6, 5, 4],
    (6, 5, 4): [6, 5, 3],
    (6, 5, 4, 3, 2, 1): [6, 5],
}


def test_the_newest_that_verifies_stays(tmp_path, engine, monkeypatch):
    for step in range(1, 7):
        save(tmp_path / "all", engine, RunState(step=step))

    def staying(name, flipped):
        run = shutil.copytree(tmp_path / "all", tmp_path / name)
        flip(run, *flipped)
        retain(run, keep=2, best_step=None)
        return [one.step for one in list_checkpoints(run)]

    for number, (flipped, stay) in enumerate(STAYING.items()):
        assert staying(str(number), flipped) == stay, flipped
    monkeypatch.setattr(module, "verify_checkpoint", lambda folder: [])
    assert staying("twin", (6, 5)) == [6, 5]  # trusting every checkpoint, it deletes the last good one


def test_a_file_that_the_disk_cannot_read_is_passed_over(tmp_path, engine, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, engine, RunState(step=step))
    sha256 = durable.sha256_file

    def lost(path):
        if path.parent.name == "checkpoint-3":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sha256(path)

    monkeypatch.setattr(durable, "sha256_file", lost)
    assert {fault.code for fault in verify_checkpoint(tmp_path / "checkpoint-3")} == {"SF-FILE-UNREADABLE"}
    assert newest_verified(tmp_path)[0].step == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "SF-DISK-FULL"), (errno.EDQUOT, "SF-DISK-FULL"), (errno.EIO, "SF-FILE-WRITE")],
)
def test_what_the_disk_refuses_to_safetensors_has_the_disk_s_own_code(tmp_path, engine, monkeypatch, number, code):
    def refused(tensors, path):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    monkeypatch.setattr(module, "save_file", refused)
    with raises_fault(code, tmp_path / "checkpoint-1"):
        save(tmp_path, engine, RunState(step=1))


def test_safetensors_still_gives_the_system_s_number(tmp_path):
    with pytest.raises(SafetensorError) as caught:
        save_file({"a": torch.zeros(2)}, tmp_path / "no folder" / "a.safetensors")
    assert module._OS_ERROR.search(str(caught.value))[1] == str(errno.ENOENT)


def test_two_are_kept_where_one_is_asked_for(tmp_path, engine, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, engine, RunState(step=step))
    retain(tmp_path, keep=1, best_step=None)
    assert [one.step for one in list_checkpoints(tmp_path)] == [3, 2]
    monkeypatch.setattr(planning_disk, "LEAST_KEPT", 1)  # twin
    retain(tmp_path, keep=1, best_step=None)
    assert [one.step for one in list_checkpoints(tmp_path)] == [3]


def test_rejected_checkpoints_do_not_displace_good_ones(tmp_path, engine):
    """Checkpoints 2 and 4 are good, 6 and 8 are not; the run goes on from 4, and saves step 5."""
    for step in (2, 4, 6, 8):
        folder = save(tmp_path, engine, RunState(step=step))
        if step > 4:
            (folder / module.OPTIMIZER).write_bytes(b"")
    assert newest_verified(tmp_path)[0].step == 4
    twin = shutil.copytree(tmp_path, tmp_path / "twin")
    aside = set_aside_newer(tmp_path, 4)
    assert [path.name for path in aside] == [".rejected-checkpoint-8", ".rejected-checkpoint-6"]
    for run in (tmp_path, twin):
        save(run, engine, RunState(step=5))
        retain(run, keep=2, best_step=None)
    assert [one.step for one in list_checkpoints(tmp_path)] == [5, 4]
    assert newest_verified(tmp_path) == (Checkpoint(tmp_path / "checkpoint-5", 5), [])
    assert [one.step for one in list_checkpoints(twin)] == [8, 6, 5]  # left in the row, they displaced the good one
    durable.clear_temporary(tmp_path)
    assert all((path / MANIFEST).is_file() for path in aside)  # still there to be looked at
    clear_rejected(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5", "twin"]


def test_rejecting_the_same_step_twice_keeps_the_newer(tmp_path, engine):
    for evaluated in (0, 3):
        save(tmp_path, engine, RunState(step=3, evaluated=evaluated))
        (aside,) = set_aside_newer(tmp_path, 2)
    assert json.loads((aside / module.STATE).read_text())["evaluated"] == 3
