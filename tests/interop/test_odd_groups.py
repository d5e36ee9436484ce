"""Odd values inside a group of settings of another tool are one fault with its line."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.faults import refused_settings
from interop.small_configs import text_of, translated

FLOOR: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5}
LEND = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": [1]}}
CASES: list[tuple[dict[str, Any], str]] = [
    (FLOOR | {"lr_scheduler_kwargs": {"min_lr": "1e-6"}}, "lr_scheduler_kwargs"),
    (FLOOR | {"lr_scheduler_kwargs": {"min_lr_rate": "0.1"}}, "lr_scheduler_kwargs"),
    (FLOOR | {"lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 0}, "learning_rate"),
    (LEND, "lr_scheduler_kwargs"),
    (
        {"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "d"}], "test_split_size": "0.1"}},
        "dataset_mixture",
    ),
    ({"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "d", "columns": 5}]}}, "dataset_mixture"),
    ({"dataset_name": None, "datasets": [{"path": "d", "columns": "messages"}]}, "datasets"),
    ({"dataset_name": None, "datasets": [{"path": "d", "columns": [5]}]}, "datasets"),
]


@pytest.mark.parametrize(("words", "name"), CASES)
def test_one_fault(words: dict[str, Any], name: str) -> None:
    text = text_of("trl", **words)
    assert refused_settings(lambda: translated("trl", **words), text=text) == [name]


def test_twin_the_same_with_numbers_and_names() -> None:
    found = translated("trl", **FLOOR, lr_scheduler_kwargs={"min_lr": 1e-6}).config
    assert found["optim"]["floor"] == pytest.approx(0.1)
    mixture = {"datasets": [{"id": "d", "columns": ["messages"]}], "test_split_size": 0.1}
    data = translated("trl", dataset_name=None, dataset_mixture=mixture).config["data"]
    assert (data["train"]["format"], data["eval"]) == ("messages", 0.1)
