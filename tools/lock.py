"""Write the hash-locked requirements in locks/: what surefoot needs, in the versions of constraints.txt.

    make lock                                    # asks the package index for hashes; downloads no package
    make lock FILES=torch-2.13.0+cpu-….whl       # and takes the hash of a file that the index does not show

Which packages belong to a list is said by pyproject.toml and by what is installed in the environment that runs this
(`make setup` makes it): a requirement counts where its marker holds here. Hashes are those of all files of a version,
wheels and source, as `uv pip compile --generate-hashes` writes them, so a lock made here serves other systems too,
where they need no further package. pip refuses what is not in the list. No address of an index is written.

torch has a list of its own besides: its build is chosen first (see SECURITY.md), and others of its builds than the
one installed here need packages that stand in no list.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCKS: dict[str, tuple[str, ...]] = {"core": (), "dev": ("dev",)}  # name of the list: extras of surefoot
FIRST = "torch"
HEAD = """\
# Made by `make lock` on {system}, Python {version}; do not edit. SECURITY.md says how to install from it.
"""
PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def main() -> None:
    parser = argparse.ArgumentParser(description="write locks/*.txt")
    parser.add_argument("--uv", default="uv", help="the uv that is asked for hashes")
    parser.add_argument("files", nargs="*", type=Path, help="wheels that the index does not show")
    given = parser.parse_args()
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {name: sorted(needed(asked(project, extras))) for name, extras in LOCKS.items()}
    for name, packages in {**lists, FIRST: [FIRST]}.items():
        lock = with_files(hashed([f"{package}=={pins[package]}" for package in packages], given.uv), given.files)
        path = ROOT / "locks" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        path.write_text(HEAD.format(system=sys.platform, version=version) + lock, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(packages)} packages, {len(HASH.findall(lock))} hashes")


def pinned(text: str) -> dict[str, str]:
    """Version by name (normalized) of each `name==version` that begins a line of constraints or of a lock."""
    return {canonicalize_name(found["name"]): found["version"] for found in PIN.finditer(text)}


def asked(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """What `[project]` of pyproject.toml asks for with these extras."""
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def needed(requirements: Iterable[str]) -> set[str]:
    """Normalized names of all that these require here, themselves included. Raises PackageNotFoundError where one of
    them is not installed."""
    todo = [(Requirement(line), frozenset[str]()) for line in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement, extras = todo.pop()  # extras: of the package that requires it
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        one = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if one not in seen:
            seen.add(one)
            todo += [(Requirement(line), one[1]) for line in metadata.requires(one[0]) or ()]
    return {name for name, _ in seen}


def hashed(requirements: Sequence[str], uv: str) -> str:
    """The requirements, each followed by a line per hash."""
    with tempfile.TemporaryDirectory() as folder:
        asks = Path(folder) / "asked.txt"
        asks.write_text("\n".join(requirements), encoding="utf-8")
        command = [uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "--generate-hashes"]
        done = subprocess.run(
            [*command, "--python", sys.executable, str(asks)], check=True, stdout=subprocess.PIPE, encoding="utf-8"
        )
    return done.stdout


def with_files(lock: str, files: Iterable[Path]) -> str:
    """The lock with the hashes of these wheels, each under its package, which must stand there in the same version but
    for a local part such as `+cpu`."""
    for file in files:
        name, version, *_ = parse_wheel_filename(file.name)
        entry = re.compile(rf"^({re.escape(name)}=={re.escape(version.public)}) \\\n", re.MULTILINE)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lock, found = entry.subn(rf"# and {file.name}\n\1 \\\n    --hash=sha256:{digest} \\\n", lock)
        if not found:
            sys.exit(f"{file.name}: the lock has no {name}=={version.public}")
    return lock


if __name__ == "__main__":
    main()
