"""Scripts under the names that existing launch scripts call, each a few lines onto surefoot.

They lie in `scripts/` as they are used: `source compat/activate` in the repository, or `surefoot compat DIR` for users
of the installed package. See docs/compat.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from surefoot import durable
from surefoot.errors import Fault, InputError


def write_scripts(folder: Path, *, overwrite: bool) -> list[str]:
    """Write the scripts into `folder` and return their names. Raises InputError where another file of one of these
    names stands there and `overwrite` is off; then nothing is written."""
    with resources.as_file(resources.files(__name__) / "scripts") as scripts:
        files = list(_files(scripts))
        changed = [name for name in files if _is_other(folder / name, scripts / name)]
        if changed and not overwrite:
            what = f"has other files of these names: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
            raise InputError(Fault(str(folder), what, "name another folder, or add --overwrite"))
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write_bytes(folder / name, (scripts / name).read_bytes())
            shutil.copymode(scripts / name, folder / name)
    return files


def _files(scripts: Path) -> Iterator[str]:
    for path in sorted(scripts.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(scripts).as_posix()


def _is_other(path: Path, ours: Path) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != ours.read_bytes())
