import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.toy_model import save_checkpoint, toy_engine
from surefoot.training.compare import compare_checkpoints
from surefoot.training.state import RunState


@pytest.fixture
def pair(tmp_path):
    engine = toy_engine()
    a = save_checkpoint(
        tmp_path,
        engine,
        RunState(step=1, seconds=1.0),
        write_model=lambda folder: save_file(dict(engine.model.state_dict()), folder / "model.safetensors"),
    )
    b = tmp_path / "b"
    shutil.copytree(a, b)
    return a, b


def change(folder, function):
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_equal_checkpoints_have_no_difference(pair):
    assert compare_checkpoints(*pair) == []


def test_time_spent_is_no_difference(pair):
    path = pair[1] / "state.json"
    path.write_text(path.read_text().replace('"seconds": 1.0', '"seconds": 2.0'))
    assert compare_checkpoints(*pair) == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda t: t["hidden.bias"].add_(1e-3), "0.001"),
        (lambda t: t["hidden.bias"].copy_(torch.nextafter(t["hidden.bias"], torch.tensor(9.0))), "differs"),
        (lambda t: t.pop("hidden.bias"), "only in"),
        (lambda t: t.update({"hidden.bias": t["hidden.bias"].half()}), "torch.float32 [8] against torch.float16 [8]"),
    ],
)
def test_one_changed_tensor_is_named(pair, function, words):
    change(pair[1], function)
    (difference,) = compare_checkpoints(*pair)
    assert difference.where == "model.safetensors: hidden.bias"
    assert words in difference.what


def test_minus_zero_is_not_zero(pair):
    change(pair[0], lambda t: t["hidden.bias"].zero_())
    change(pair[1], lambda t: t["hidden.bias"].zero_().neg_())
    assert len(compare_checkpoints(*pair)) == 1


def test_state_is_compared(pair):
    path = pair[1] / "state.json"
    path.write_text(path.read_text().replace('"tokens": 0', '"tokens": 5'))
    (difference,) = compare_checkpoints(*pair)
    assert (difference.where, difference.what) == ("state.json: tokens", "0 against 5")
