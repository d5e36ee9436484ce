"""locks/ holds what pyproject.toml needs in the versions of constraints.txt, each with hashes. No index is asked."""

import hashlib
import tomllib
from pathlib import Path

import pytest

import lock

ROOT = Path(__file__).resolve().parents[2]

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name: str) -> str:
    return (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")


def wrong(name: str, text: str, constraints: str = CONSTRAINTS) -> list[str]:
    """What a lock lacks or has in another version than the constraints, and what has no hash."""
    pins, versions = lock.pinned(text), lock.pinned(constraints)
    entries = {one.split("==")[0]: len(lock.HASH.findall(one)) for one in _entries(text)}
    return [
        *(f"{one} is missing" for one in lock.needed(lock.asked(PROJECT, lock.LOCKS[name])) - set(pins)),
        *(f"{one} is {pins[one]}, not {versions.get(one)}" for one in pins if pins[one] != versions.get(one)),
        *(f"{one} has no hash" for one, count in entries.items() if not count),
    ]


def _entry(text: str, package: str) -> str:
    return next(one for one in _entries(text) if one.startswith(f"{package}=="))


def _entries(text: str) -> list[str]:
    starts = [found.start() for found in lock.PIN.finditer(text)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_agrees_with_constraints_and_project(name: str) -> None:
    assert wrong(name, text_of(name)) == []


def test_the_list_that_comes_first_is_torch_as_in_the_others() -> None:
    (torch,) = _entries(text_of(lock.FIRST))
    assert all(torch.split() == _entry(text_of(name), "torch").split() for name in lock.LOCKS)


def test_twins_what_disagrees_is_named() -> None:
    text = text_of("core")
    click = _entry(text, "click")
    assert wrong("core", text.replace(click, "")) == ["click is missing"]
    assert wrong("core", text.replace(click, click.splitlines()[0] + "\n")) == ["click has no hash"]
    version = lock.pinned(text)["click"]
    assert wrong("core", text.replace(click, click.replace(version, "0.1"))) == [f"click is 0.1, not {version}"]


@pytest.mark.parametrize("name", lock.LOCKS)
def test_no_address_of_an_index_is_written(name: str) -> None:
    assert "://" not in text_of(name)
    assert "index" not in text_of(name)


def test_the_hash_of_a_file_stands_under_its_package(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"a wheel")
    text = "six==1.17.0 \\\n    --hash=sha256:0\ntorch==2.13.0 \\\n    --hash=sha256:1\n"
    digest = hashlib.sha256(b"a wheel").hexdigest()
    assert lock.with_files(text, [wheel]) == (
        f"six==1.17.0 \\\n    --hash=sha256:0\n# and {wheel.name}\n"
        f"torch==2.13.0 \\\n    --hash=sha256:{digest} \\\n    --hash=sha256:1\n"
    )
    with pytest.raises(SystemExit, match=r"the lock has no torch==2\.13\.0"):
        lock.with_files("torch==2.12.0 \\\n    --hash=sha256:1\n", [wheel])
