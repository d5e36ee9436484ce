"""Tiny models, each written once for all tests of a worker; whoever changes one copies it first.

def test_it(folder): ...                                  a Llama of two layers
def test_it(tiny_model): tiny_model(tied=True, hidden=64)
def test_it(zoo_model): zoo_model("gpt2")                 any of zoo.ZOO by name
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers import zoo
from helpers.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """Arguments of `tiny_llama` -> its folder."""

    @cache
    def written(**options: Any) -> Path:
        return tiny_llama(tmp_path_factory.mktemp("tiny") / "model", **options)

    return written


@pytest.fixture(scope="session")
def zoo_model(tmp_path_factory) -> Callable[..., Path]:
    """Family and keys of its config -> its folder, which is called like the family."""

    @cache
    def written(family: str, **keys: Any) -> Path:
        return zoo.ZOO[family](tmp_path_factory.mktemp("zoo") / family, **keys)

    return written


@pytest.fixture(scope="session")
def folder(tiny_model) -> Path:
    return tiny_model()
