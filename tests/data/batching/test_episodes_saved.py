from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from surefoot.data.batching.rollouts import Episode, episodes_from_tensors, episodes_to_tensors


def episode(place: int, number: int | str, prompt: int, response: int) -> Episode:
    draw = torch.Generator().manual_seed(place)
    tables = [torch.randn(response, generator=draw) for _ in range(4)]
    return Episode(place, tuple(range(prompt)), tuple(range(90, 90 + response)), number, *tables)


EPISODES = (episode(0, 7, 3, 5), episode(2, "data/a.json:4", 1, 1), episode(3, 0, 6, 2))


def plain(one: Episode) -> tuple:
    tables = (one.logprobs, one.values, one.advantages, one.returns)
    return one.place, one.prompt, one.response, one.number, *(table.tolist() for table in tables)


def through_a_file(episodes, folder: Path):
    save_file(episodes_to_tensors(episodes), folder / "stage.safetensors")
    return episodes_from_tensors(load_file(folder / "stage.safetensors"), [one.number for one in episodes])


def test_they_come_back_bit_for_bit(tmp_path):
    assert list(map(plain, through_a_file(EPISODES, tmp_path))) == list(map(plain, EPISODES))


def test_none_need_no_tensors():
    assert episodes_to_tensors(()) == {}
    assert episodes_from_tensors({}, []) == ()
