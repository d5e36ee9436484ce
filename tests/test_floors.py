"""pyproject.toml keeps out the versions with known holes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
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
