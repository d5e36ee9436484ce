"""What is built once is what building it anew writes, and leaves the same random numbers behind."""

from inspect import unwrap
from pathlib import Path

import pytest
import torch

from helpers import zoo
from helpers.tiny_models import tiny_llama

WAYS = {
    "tiny": (tiny_llama, {"pad": True}),
    "another": (tiny_llama, {"pad": True, "seed": 1}),
    "llama2": (zoo.llama2, {}),
    "gemma3": (zoo.gemma3, {"chat_template": False}),
}


def made(build, folder: Path, **keys) -> tuple[dict[str, bytes], float]:
    """Its files, and the next number that is drawn."""
    folder.mkdir()
    build(folder, **keys)
    return {path.name: path.read_bytes() for path in folder.iterdir()}, float(torch.rand(()))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_building_it_anew_gives(tmp_path, way):
    build, keys = WAYS[way]
    anew = made(unwrap(build), tmp_path / "anew", **keys)
    assert [made(build, tmp_path / name, **keys) for name in ("first", "again")] == [anew, anew]


def test_twin_another_seed_is_another_model(tmp_path):
    one, other = (made(tiny_llama, tmp_path / str(seed), pad=True, seed=seed) for seed in (0, 1))
    assert one[0]["model.safetensors"] != other[0]["model.safetensors"]
    assert one[0]["tokenizer.json"] == other[0]["tokenizer.json"]


def test_what_is_changed_afterwards_changes_no_other(tmp_path):
    first = tiny_llama(tmp_path / "first")
    (first / "config.json").write_text("{}")
    assert (tiny_llama(tmp_path / "second") / "config.json").read_text() != "{}"
