"""Build each test model once per process; later calls copy the same files and leave the random state as a build would.

@built_once
def tiny_llama(folder: Path, *, seed: int = 0) -> Path: ...
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


def built_once(build: Callable[..., Path]) -> Callable[..., Path]:
    """Cache a function build(folder, **keys) whose files depend only on its keys."""
    known: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}

    @wraps(build)
    def written(folder: Path, **keys: Any) -> Path:
        key = repr(sorted(keys.items()))
        if key not in known:
            with TemporaryDirectory() as place:
                build(Path(place), **keys)
                files = {path.name: path.read_bytes() for path in Path(place).iterdir()}
            known[key] = files, torch.get_rng_state()
        files, state = known[key]
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        torch.set_rng_state(state)
        return folder

    return written
