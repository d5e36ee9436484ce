"""pyproject.toml keeps out the versions with known holes, and the lists of packages what must not come in."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
HOLES = {  # last version known to have it: the floor must be above
    "CVE-2025-32434": ("torch", "2.5.1"),
    "CVE-2026-24747": ("torch", "2.9.1"),
    "CVE-2024-3568": ("transformers", "4.37.2"),
    "CVE-2026-1839": ("transformers", "4.57.6"),
    "CVE-2026-4372": ("transformers", "5.2.0"),
    "CVE-2024-56326": ("jinja2", "3.1.4"),
    "CVE-2025-27516": ("jinja2", "3.1.5"),
    "CVE-2024-43497": ("deepspeed", "0.15.0"),
}

STAY_OUT = {  # why a package must not come in, not even with another one
    "litellm": "PYSEC-2026-2",
    "torchtriton": "poisoned in 2022",
    "ultralytics": "poisoned in 2024",
    "gradio": "CVE-2024-1727, -47084, -47164, -47165, CVE-2025-5320, CVE-2026-28414, -28416",
    "lightning": "CVE-2026-31221, CVE-2026-37572",
    "pytorch-lightning": "the same",
    "mcp": "DNS rebinding",
}
LISTS = ("constraints.txt", "locks/core.txt", "locks/dev.txt")
PT2_LOADERS = ("torch.export.load", "aoti_load_package", "load_pt2", "torch.jit.load")  # CVE-2026-4538, torch <= 2.10


def admitted(hole: str, required: list[str]) -> list[str]:
    """The requirements that would let the vulnerable version in."""
    package, version = HOLES[hole]
    asked = [Requirement(line) for line in required]
    return [str(one) for one in asked if one.name.lower() == package and version in one.specifier]


@pytest.mark.parametrize("hole", HOLES)
def test_no_requirement_admits_it(hole: str) -> None:
    assert any(Requirement(line).name.lower() == HOLES[hole][0] for line in REQUIRED)
    assert admitted(hole, REQUIRED) == []


def test_twin_a_lower_floor_is_noticed() -> None:
    assert admitted("CVE-2026-24747", ["torch>=2.6"]) == ["torch>=2.6"]


def unwanted(text: str) -> set[str]:
    """Of the packages that must stay out, those that a list of `name==version` has."""
    return {line.partition("==")[0].strip().lower() for line in text.splitlines()} & set(STAY_OUT)


@pytest.mark.parametrize("name", LISTS)
def test_none_comes_in_that_must_stay_out(name: str) -> None:
    assert unwanted((ROOT / name).read_text(encoding="utf-8")) == set()


def test_twin_one_that_came_in_is_noticed() -> None:
    assert unwanted("click==8.5.1\ngradio==5.0.0 \\\n    --hash=sha256:0\n") == {"gradio"}


def loaders_in(texts: Iterable[str]) -> set[str]:
    return {loader for text in texts for loader in PT2_LOADERS if loader in text}


def test_no_exported_program_is_ever_loaded() -> None:
    """torch 2.10 is admitted, whose loader of .pt2 files has a hole: nothing here calls it."""
    assert loaders_in(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")) == set()
    assert loaders_in(["program = torch.export.load(path)"]) == {"torch.export.load"}
