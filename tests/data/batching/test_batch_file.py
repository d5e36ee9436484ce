"""Batches of every kind come back as they were, and nothing else is written."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load, save

from helpers.toy_model import toy_examples
from surefoot.data.batching.batch import JudgedBatch, PairBatch, PromptBatch, collate
from surefoot.data.batching.batch_file import batches_from_file, batches_to_file
from surefoot.data.batching.rollouts import PpoBatch

ROWS = collate(toy_examples(4), 0)
LEFT = collate(toy_examples(3), 0, side="left")
KINDS = [
    ROWS,
    LEFT,
    dataclasses.replace(ROWS, examples=("a.json:1", 2, 3, 4)),
    PairBatch(ROWS, (1, 2), 2, 0.25, torch.randn(4)),
    JudgedBatch(ROWS, torch.tensor([True, False, True, True]), LEFT, 4, kl=math.inf, good_share=4 / 3),
    PromptBatch(ROWS, ((1, 2), (3,)), 2),
    PpoBatch(ROWS, *(torch.randn(5) for _ in range(4)), text=LEFT, text_share=0.1),
]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    return type(one) is type(other) and one == other


def test_every_kind_comes_back():
    tensors, layout = batches_to_file(KINDS)
    found = batches_from_file(load(save(tensors)), json.loads(json.dumps(layout, allow_nan=False)))
    assert all(same(*pair) for pair in zip(KINDS, found, strict=True))


def test_twin_another_number_is_noticed():
    assert not same(ROWS, dataclasses.replace(ROWS, targets=ROWS.targets + 1))
    assert not same(ROWS, dataclasses.replace(ROWS, lengths=(1, 2, 3)))


def test_what_is_no_batch_is_refused_both_ways():
    with pytest.raises(TypeError, match="function"):
        batches_to_file([same])
    with pytest.raises(KeyError):
        batches_from_file({}, [{"kind": "Popen", "fields": {"args": "true"}}])
