"""Every byte of a run's base model, hashed tensor by tensor, and held against those of the run's first start.

`base_fingerprint` tells another model by the first bytes of each tensor, before anything is loaded. A single bit that
flips further on would be trained on unseen: a resumed run would not be the one that it goes on with. So a thread hashes
all of the weight files while they are loaded, the first start writes down what it found (`base.json`), and a resumed
one compares before its first step. Trade-off: a second of one processor core for each 1.4 GB, at every start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from surefoot.models.folder import safetensors_files, tensor_places
from surefoot.runs.sealed_record import read_sealed
from surefoot.system import durable
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.manifest import sealed

RECORD = "base.json"
Digests = dict[str, dict[str, str]]  # file name -> tensor -> SHA-256 of its bytes
_CHUNK = 1 << 20  # bytes that are read at once


def tensor_digests(folder: Path, given_up: Callable[[], bool] = lambda: False) -> Digests:
    """Of all weight files. given_up: asked now and then; what is returned after a yes is not complete."""
    found: Digests = {}
    buffer = memoryview(bytearray(_CHUNK))
    for file in safetensors_files(folder):
        own = found[file.name] = {}
        with file.open("rb", buffering=0) as stream:
            for name, (start, end) in tensor_places(file)[1].items():
                digest = hashlib.sha256()
                stream.seek(start)
                while start < end and not given_up():
                    count = stream.readinto(buffer[: end - start])
                    if not count:  # a cut file, which whoever loads it names
                        break
                    digest.update(buffer[:count])
                    start += count
                own[name] = digest.hexdigest()
    return found


@contextmanager
def hashed_beside(folder: Path) -> Iterator[Callable[[], Digests]]:
    """In the block a thread hashes the weight files; the function waits for it, and raises what it raised."""
    over = Event()
    with ThreadPoolExecutor(1, "hash of the base") as pool:
        digests = pool.submit(tensor_digests, folder, over.is_set)
        try:
            yield digests.result
        finally:
            over.set()


def check_base(run: Path, base: Path, now: Digests) -> None:
    """Raises IntegrityError where a tensor is not what it was at the run's first start; runs of earlier versions have
    no record of that."""
    path = run / RECORD
    if not path.is_file():
        return
    then: Digests = read_sealed(path, lambda content: {name: dict(own) for name, own in content["files"].items()})
    changed = [
        (file, name)
        for file, own in then.items()
        for name, digest in own.items()
        if now.get(file, {}).get(name) != digest
    ]
    if changed:
        (file, name), more = changed[0], len(changed) - 1
        others = f", nor are {more} others" if more else ""
        what = f"{name} is not what it was when this run began (SHA-256 differs){others}"
        raise IntegrityError(
            Fault(str(base / file), what, "get the file again, or start another run", code="SF-CONFIG-CONFLICT")
        )


def keep_base(run: Path, now: Digests, *, anew: bool) -> None:
    """Write them down for later starts. anew: also where there is a record, of an earlier run."""
    if anew or not (run / RECORD).is_file():
        durable.write_json(run / RECORD, sealed({"files": now}))
