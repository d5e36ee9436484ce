"""The identity of a run: hashes of data, tokenizer, template and base model, and the environment.

Resuming with another data file or base model under the same name is refused (exit 4). Another library version or thread
count only ends the guarantee of bit-equality, and a warning says so.

`base_fingerprint` identifies a base model by the first bytes of each tensor, before anything is loaded. It would miss a
flipped bit further on, and a resumed run would silently differ. So threads hash every weight file while the model
loads; the first start writes the hashes to `base.json`, and a resumed run compares them before its first step. Cost:
one second of one CPU core per 1.4 GB at every start; a quarter of the cores share it, at most four.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from surefoot.config.schema import RunConfig
from surefoot.data.prepare import PreparedData
from surefoot.models.folder import base_fingerprint, resolve_folder, safetensors_files, tensor_places
from surefoot.planning.plan import RunPlan
from surefoot.planning.reference import ADAPTER_OFF, CACHED, MODEL, NONE
from surefoot.system import durable, hardware, plain_files
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.checkpoint import Checkpoint
from surefoot.training.manifest import CHANGED, damaged, read_manifest, sealed, unreadable

_MUST_MATCH = {
    "data": "the training data has changed",
    "tokenizer": "the tokenizer files have changed",
    "template": "the chat template has changed",
    "base": "the base model has changed",
    "reference": "the model of alignment.reference has changed",
    "teacher": "the model of distill.teacher has changed",
    "reward": "the model of ppo.reward has changed",
    "critic": "the base model of the critic's adapter has changed",
}
_OF_THE_BASE = (NONE, ADAPTER_OFF, MODEL, CACHED)  # references that are the base model itself


def run_identity(
    config: RunConfig, plan: RunPlan, base: Path, data: PreparedData, objective: str | None
) -> dict[str, Any]:
    """Return the identity as JSON values, for manifests. objective: name of a Python caller's loss; None for the
    stage's."""
    return {
        "objective": objective,
        "data": data.audit.source.content,
        "eval_data": data.eval_audit.source.content if data.eval_audit else None,
        "tokenizer": data.tokenizer_sha256,
        "template": hashlib.sha256(data.template.identity.encode()).hexdigest(),
        "eval_template": hashlib.sha256(data.eval_template.identity.encode()).hexdigest()
        if data.eval_template
        else None,
        "base": base_fingerprint(base),
        "reference": _reference_fingerprint(plan),
        **_scored_fingerprints(config, plan),
        **_teacher_fingerprint(config),
        "versions": hardware.versions(),
        "threads": plan.threads.value,
        "device": plan.device.value,
        "ranks": plan.parallel.ranks.value,
        "engine": plan.parallel.engine.value,
    }


def _reference_fingerprint(plan: RunPlan) -> str | None:
    """Fingerprint of the reference, if it is another model or adapter."""
    chosen = plan.reference.value if plan.reference else NONE
    return None if chosen in _OF_THE_BASE else base_fingerprint(resolve_folder(chosen, None, weights=True))


def _scored_fingerprints(config: RunConfig, plan: RunPlan) -> dict[str, str]:
    if plan.ppo is None:
        return {}
    from surefoot.methods.ppo.models import fingerprints

    return fingerprints(config, plan.ppo)


def _teacher_fingerprint(config: RunConfig) -> dict[str, str]:
    if not config.method.teacher or config.distill.teacher is None:
        return {}
    from surefoot.methods.distill.teacher import teacher_fingerprint

    return {"teacher": teacher_fingerprint(config)}


def require_base(checkpoint: Checkpoint, base: Path) -> None:
    """Raise IntegrityError if the base differs from the checkpoint's, before less clear errors about it can occur."""
    then = saved_identity(checkpoint).get("base")
    if then not in (None, base_fingerprint(base)):
        what = f"is not the base model of {checkpoint.folder}: {_MUST_MATCH['base']}"
        raise IntegrityError(
            Fault(str(base), what, "set model to the old one, or start another run", code="SF-RESUME-CHANGED")
        )


def check_identity(checkpoint: Checkpoint, now: dict[str, Any], others: Sequence[str] = ()) -> list[str]:
    """Compare the identity with a checkpoint's and return warnings about a changed environment.

    others: further changes to how the run computes.

    Raises IntegrityError if data, tokenizer or base changed.
    """
    then = saved_identity(checkpoint)
    faults = [
        Fault(str(checkpoint.folder), what, "restore it, or start another run", code="SF-RESUME-CHANGED")
        for key, what in _MUST_MATCH.items()
        if then.get(key, now.get(key)) != now.get(key)  # checkpoints of older versions may lack a key
    ]
    if then.get("objective") != now["objective"]:
        losses = [name or "the stage's own" for name in (then.get("objective"), now["objective"])]
        what = f"it was trained with another loss: {losses[0]}, not {losses[1]}"
        faults.append(
            Fault(
                str(checkpoint.folder), what, "resume it from Python with the same objective", code="SF-RESUME-CHANGED"
            )
        )
    if faults:
        raise IntegrityError(faults)
    changed = [
        f"{name} was {then['versions'].get(name)}, is {now['versions'].get(name)}"
        for name in sorted({*then["versions"], *now["versions"]})
        if then["versions"].get(name) != now["versions"].get(name)
    ]
    changed += [f"{key} was {then[key]}, is {now[key]}" for key in ("threads", "device") if then[key] != now[key]]
    changed += [
        f"{key} {'were' if key == 'ranks' else 'was'} {before}, {'are' if key == 'ranks' else 'is'} {now[key]}"
        for key, usual in (("ranks", 1), ("engine", "single"))
        if (before := then.get(key, usual)) != now[key]
    ]
    cautions = [f"continuing, but not bit for bit: {change}" for change in [*changed, *others]]
    if then["eval_data"] != now["eval_data"]:
        cautions.append("the evaluation data has changed: evaluation losses before and after are not comparable")
    if then.get("eval_template", now["eval_template"]) != now["eval_template"]:
        what = "the template of the evaluation data has changed"
        cautions.append(f"{what}: evaluation losses before and after are not comparable")
    return cautions


T = TypeVar("T")
_FIX = "restore it to resume this run"


def read_sealed(path: Path, meaning: Callable[[dict[str, Any]], T]) -> T:
    """Read a sealed JSON file. meaning: parses the content. Raises IntegrityError if the file was changed."""
    try:
        content = json.loads(plain_files.read_text(path))
        if sealed(content) != content:
            raise IntegrityError(damaged(path, CHANGED, _FIX))
        return meaning(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise IntegrityError(unreadable(path, error, _FIX)) from None


RECORD = "base.json"
Digests = dict[str, dict[str, str]]  # file name -> tensor -> SHA-256 of its bytes
_CHUNK = 1 << 20  # bytes per read
_MOST_HASHERS = 4  # threads; a disk hardly delivers more


def tensor_digests(folder: Path, given_up: Callable[[], bool] = lambda: False) -> Digests:
    """Hash all weight files, with several threads where there are many cores. given_up: polled; once it returns true,
    hashing stops and the result is incomplete."""
    files = safetensors_files(folder)
    places = [(file, name, place) for file in files for name, place in tensor_places(file)[1].items()]
    with ThreadPoolExecutor(min(_MOST_HASHERS, max(1, hardware.usable_cores() // 4))) as hashers:
        digests = list(hashers.map(lambda one: _digest(one[0], one[2][0], one[2][1], given_up), places))
    found: Digests = {file.name: {} for file in files}
    for (file, name, _), digest in zip(places, digests, strict=True):
        found[file.name][name] = digest
    return found


def _digest(file: Path, start: int, end: int, given_up: Callable[[], bool]) -> str:
    """Hash the bytes from start to end."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_CHUNK, end - start)))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and not given_up():
            count = stream.readinto(buffer[: end - start])
            if not count:  # a truncated file; loading it reports that
                break
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()


@contextmanager
def hashed_in_background(folder: Path) -> Iterator[Callable[[], Digests]]:
    """Hash the weight files in threads while the block runs. The yielded function waits for the result or raises."""
    over = Event()
    with ThreadPoolExecutor(1, "hash of the base") as pool:
        digests = pool.submit(tensor_digests, folder, over.is_set)
        try:
            yield digests.result
        finally:
            # Otherwise leaving the block on an error would wait until many GB are hashed.
            over.set()


def check_base(run: Path, base: Path, now: Digests) -> None:
    """Raise IntegrityError if a tensor has changed since the run's first start. Runs of earlier versions have no
    record."""
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
        others = f", and {more} others" if more else ""
        what = f"{name}{others}: changed since this run started (SHA-256 differs)"
        raise IntegrityError(
            Fault(str(base / file), what, "get the file again, or start another run", code="SF-RESUME-CHANGED")
        )


def record_base(run: Path, now: Digests, *, anew: bool) -> None:
    """Write the hashes for later starts. anew: overwrite a record, which is an earlier run's."""
    # Never over a record of this run: that would accept a base that has changed since the first start.
    if anew or not (run / RECORD).is_file():
        durable.write_json(run / RECORD, sealed({"files": now}))


def saved_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Hashes and versions stored with a checkpoint."""
    return read_manifest(checkpoint.folder)["identity"]
