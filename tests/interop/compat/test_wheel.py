"""The programs of compat as users of the installed package get them: built as a wheel, installed, written, started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LONGEST = 600  # seconds until a program counts as hanging
NOT_STARTED = (126, 127)  # of a shell: no permission, no such program


def run(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LONGEST, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel leaves it. Nothing is fetched, and the checkout stays as it is."""
    place = tmp_path_factory.mktemp("wheel")
    (place / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source")
    shutil.copytree(ROOT / "src", place / "source" / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = run(
        *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", ".", "./source", cwd=place
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = place.glob("*.whl")
    done = run(*pip, "install", "-q", "--no-deps", "--no-index", "--target", "site", wheel, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "site"


@pytest.mark.slow
def test_every_program_starts_from_the_wheel(installed, tmp_path):
    assert not os.access(installed / "surefoot" / "compat" / "scripts" / "finetune.py", os.X_OK)  # what the twin is
    at = {"PYTHONPATH": str(installed)}
    asked = (sys.executable, "-c", "import surefoot; print(surefoot.__file__)")
    assert run(*asked, cwd=tmp_path, **at).stdout.startswith(str(installed))
    written = run(sys.executable, installed / "bin" / "surefoot", "compat", "old-names", cwd=tmp_path, **at)
    assert written.returncode == 0, written.stderr
    programs = [tmp_path / name for name in written.stdout.splitlines()[:-1]]
    programs = [path for path in programs if path.read_bytes().startswith(b"#!") and path.suffix != ".sh"]
    assert {"finetune.py", "commonsense_evaluate.py", "capture_phi3_with_rmsnorm_weights.py"} <= {
        path.name for path in programs
    }
    for path in programs:
        told = run("bash", "-c", f"{path} --help", cwd=tmp_path, **at)
        assert told.returncode not in NOT_STARTED, told.stderr
        assert "No module named" not in told.stderr
    twin = tmp_path / "old-names" / "finetune.py"
    twin.chmod(0o644)
    assert run("bash", "-c", f"{twin} --help", cwd=tmp_path, **at).returncode in NOT_STARTED
