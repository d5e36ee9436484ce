"""What the table of bad inputs starts from: a tiny base and a finished run, made once. And `--break`: see breaks.py."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from faults.breaks import BREAKS, broken
from faults.place import ROWS, Place, settings_of
from faults.soak import sizes
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "; ".join(f"{name}: {what}" for name, what in BREAKS.items())
    parser.addoption("--break", choices=BREAKS, default=None, help=f"take a protection out: {words}")
    parser.addoption("--scale", type=float, default=1.0, help="of make soak: share of each part's trials")
    parser.addoption("--trials", action="append", default=[], help="of make soak: PART=COUNT, see tests/faults/soak.py")


@pytest.fixture(scope="session")
def without(request: pytest.FixtureRequest) -> str | None:
    """Which protection `--break` takes out."""
    return request.config.getoption("--break", default=None)


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> int:
    """How many trials a test is to make: what it is parametrised with, or those of its part of `make soak`."""
    if getattr(request, "param", None) is not None:
        return request.param
    (part,) = request.node.get_closest_marker("soak").args
    option = request.config.getoption  # unknown where pytest was started above this folder
    return sizes(option("--scale", default=1.0), option("--trials", default=[]))[part]


@pytest.fixture(autouse=True)
def _as_asked(without: str | None) -> Iterator[None]:
    with broken(without):
        yield


@pytest.fixture
def seeded() -> random.Random:
    return random.Random(0)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, and out/ with a finished run over it."""
    folder = tmp_path_factory.mktemp("world")
    base = tiny_llama(folder / "base")
    (folder / "train.json").write_text(json.dumps(ROWS))
    (folder / "run.yaml").write_text(yaml.safe_dump(settings_of(folder, base)))
    result = CliRunner().invoke(main, ["train", str(folder / "run.yaml")])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def place(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path, world / "base", world / "out", monkeypatch)
    yield made
    for handle in made.held:
        os.close(handle)
