"""What a checkpoint belongs to: hashes of config, data, tokenizer and base model, and the environment it ran in.

Another data file or base model under the same name is refused on resume (exit 4). Another library version or thread
count only ends the promise of bit-equality, and that is said.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from surefoot import hardware
from surefoot.config.load import dump_config
from surefoot.config.schema import RunConfig
from surefoot.data.prepare import PreparedData
from surefoot.errors import Fault, IntegrityError
from surefoot.planning.plan import RunPlan
from surefoot.stages.run_folder import saved_identity
from surefoot.training.checkpoint import Checkpoint

_ENDS = 1 << 20  # bytes hashed at either end of a weight file
_MUST_MATCH = {
    "data": "the training data is not what it was",
    "tokenizer": "the tokenizer files are not what they were",
    "base": "the base model is not what it was",
}


def run_identity(config: RunConfig, plan: RunPlan, base: Path, data: PreparedData) -> dict[str, Any]:
    """JSON-able; goes into every manifest."""
    return {
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "data": data.audit.source.sha256,
        "tokenizer": data.tokenizer_sha256,
        "base": base_fingerprint(base),
        "versions": hardware.versions(),
        "threads": plan.threads.value,
        "device": plan.device.value,
        "world_size": 1,
    }


def base_fingerprint(folder: Path) -> str:
    """SHA-256 over config.json and, of every weight file, name, size and both ends.

    Hashing all of a large model would take minutes at every start; another training of the same architecture differs
    in these bytes as well.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def check_identity(checkpoint: Checkpoint, now: dict[str, Any]) -> list[str]:
    """Cautions about a changed environment. Raises IntegrityError where data, tokenizer or base changed."""
    then = saved_identity(checkpoint)
    faults = [
        Fault(str(checkpoint.folder), what, "restore it, or start another run")
        for key, what in _MUST_MATCH.items()
        if then.get(key) != now[key]
    ]
    if faults:
        raise IntegrityError(faults)
    changed = [
        f"{name} was {then['versions'].get(name)}, is {now['versions'].get(name)}"
        for name in sorted({*then["versions"], *now["versions"]})
        if then["versions"].get(name) != now["versions"].get(name)
    ]
    changed += [f"{key} was {then[key]}, is {now[key]}" for key in ("threads", "device") if then[key] != now[key]]
    return [f"continuing, but not bit for bit: {change}" for change in changed]
