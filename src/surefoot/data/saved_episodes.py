"""Episodes as a few flat tensors and back, bit for bit: for checkpoints inside a cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from surefoot.data.batch import RecordName
from surefoot.data.episodes import Episode

_NUMBERS = ("logprobs", "values", "advantages", "returns")


def episodes_to_tensors(episodes: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """By name; nothing for no episodes. What the records are called stays with the caller: names are no tensors."""
    if not episodes:
        return {}
    return {
        "places": torch.tensor([one.place for one in episodes]),
        "prompts": torch.tensor([token for one in episodes for token in one.prompt]),
        "prompt_lengths": torch.tensor([len(one.prompt) for one in episodes]),
        "responses": torch.tensor([token for one in episodes for token in one.response]),
        "response_lengths": torch.tensor([len(one.response) for one in episodes]),
        **{name: torch.cat([getattr(one, name) for one in episodes]) for name in _NUMBERS},
    }


def episodes_from_tensors(tensors: Mapping[str, torch.Tensor], numbers: Sequence[RecordName]) -> tuple[Episode, ...]:
    """numbers: of each episode's record, in order."""
    if not numbers:
        return ()
    prompts = tensors["prompts"].split(tensors["prompt_lengths"].tolist())
    lengths = tensors["response_lengths"].tolist()
    responses = tensors["responses"].split(lengths)
    tables = [tensors[name].split(lengths) for name in _NUMBERS]
    return tuple(
        Episode(place, tuple(prompt.tolist()), tuple(response.tolist()), number, *(table.clone() for table in own))
        for place, prompt, response, number, *own in zip(
            tensors["places"].tolist(), prompts, responses, numbers, *tables, strict=True
        )
    )
