"""Log-probabilities of a whole data set under the reference, computed once before step 1 and kept in the cache folder.

They are found again by what decides them: the base, the examples, and how they are computed. An answer is found by its
content, its ids and which of them are learned, so it does not matter in which step, order or batch it comes. A folder
that was damaged is made again; of one that was found, a few answers are computed anew and compared where the base is in
memory.

The price beside disk: an answer is computed in other company than in its step, so its last bits differ from what a
reference in memory would give. They are the same in every step and after every resume.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surefoot.config.schema import RunConfig
from surefoot.data.batch import Batch
from surefoot.data.cache import cache_key
from surefoot.data.layout import Layout
from surefoot.data.loader import all_laid_out
from surefoot.data.pack import in_rows
from surefoot.data.prepare import PreparedData
from surefoot.methods.layout import whole_layout
from surefoot.methods.losses.reference import Reference
from surefoot.models.folder import base_fingerprint, resolve_folder
from surefoot.planning.plan import RunPlan
from surefoot.report.wording import duration_text
from surefoot.system import durable, hardware, plain_files, process
from surefoot.system.errors import EnvironmentFault
from surefoot.training.engine import Engine

if TYPE_CHECKING:
    from surefoot.runs.prepared import Prepared
    from surefoot.runs.setup import Setup

_DIGEST = 16  # bytes
_CHECKED = 4  # answers computed anew where a cache is found
_EVERY = 20.0  # seconds between two words on how far it is
# Same weights and ids, other neighbours in the batch: fp32 sums in another order, 16-bit products rounded elsewhere.
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
_VALUES, _KEYS, _META = "values.npy", "keys.npy", "meta.json"


def cached_reference(
    run: Prepared, setup: Setup, base: Callable[[], Reference], at_hand: bool, say: Callable[[str], None]
) -> Reference:
    """base: the reference itself. at_hand: asking for it loads nothing. Every rank must call this; each computes its
    share."""
    plan, data = run.plan, run.stage.data
    folder = process.cache_folder() / "reference" / _key(run.config, plan, data)
    known = _agreed(_read(folder), setup.engine)
    if known is not None and at_hand:
        known = _agreed(_checked(known, plan, data, setup, base, say), setup.engine)
    if known is None:
        known = _computed(plan, data, setup, base, say)
        if setup.engine.rank == 0:
            try:
                _write(folder, known)
            except EnvironmentFault as error:  # it is computed again next time
                say(f"reference: log-probabilities are not kept for the next start: {error}")
    else:
        say(f"reference: log-probabilities of {len(known):,} answers found in the cache")
    return lambda rows: _look_up(known, rows)


def _agreed(known: dict[bytes, float] | None, engine: Engine) -> dict[bytes, float] | None:
    """None on every rank where any has None: nodes may have caches of their own, and all must compute or none."""
    (missing,) = engine.totals([float(known is None)])
    return None if missing else known


def _key(config: RunConfig, plan: RunPlan, data: PreparedData) -> str:
    folder = resolve_folder(config.model.path, config.model.revision, weights=True)
    evaluation = data.eval_audit.source.content if data.eval_audit else None
    tokens, precision = plan.tokenizer, plan.precision
    return cache_key(
        {
            "base": base_fingerprint(folder),
            "data": [data.audit.source.content, evaluation, str(config.data.eval), config.seed],
            "tokenizer": data.tokenizer_sha256,
            "template": [one.identity if one else None for one in (data.template, data.eval_template)],
            "tokens": [tokens.max_length.value, tokens.bos_id if tokens.bos.value else None, tokens.bos_scale.value],
            "precision": [precision.compute.value, precision.base.value, precision.tf32.value],
            "attention": [plan.attention.implementation.value, list(plan.attention.kernels.value)],
            "device": plan.device.value,
            "versions": {name: hardware.versions().get(name) for name in ("torch", "transformers")},
        }
    )


def _computed(
    plan: RunPlan, data: PreparedData, setup: Setup, base: Callable[[], Reference], say: Callable[[str], None]
) -> dict[bytes, float]:
    engine, reference = setup.engine, base()
    sets = [one for one in (data.train, data.eval) if one is not None]
    total = sum(map(len, sets))
    say(f"reference: computing the log-probabilities of {total:,} answers, once")
    started = told = time.monotonic()
    keys: list[bytes] = []
    values: list[float] = []
    for round_of in _rounds(_all_rows(plan, data), engine.world):
        own = round_of[min(engine.rank, len(round_of) - 1)]  # a rank without a batch keeps step with the others
        found = _run(setup, reference, own)
        lengths = [len(batch.lengths) for batch in round_of]
        places = np.cumsum([0, *lengths])
        shared = np.zeros(places[-1])
        if engine.rank < len(round_of):
            shared[places[engine.rank] : places[engine.rank + 1]] = found.cpu().numpy()
        values += engine.totals(shared.tolist())
        keys += [key for batch in round_of for key in _digests(batch)]
        if time.monotonic() - told >= _EVERY:
            told = time.monotonic()
            say(f"reference: {len(values):,} of {total:,} answers")
    say(f"reference: done in {duration_text(time.monotonic() - started)}")
    return dict(zip(keys, values, strict=True))


def _all_rows(plan: RunPlan, data: PreparedData) -> Iterator[Batch]:
    items = whole_layout(plan, data)
    layout = replace(items, most=None if items.most is None else items.most * data.rows_per_item)
    for dataset in (one for one in (data.train, data.eval) if one is not None):
        yield from all_laid_out(dataset, layout)


def _rounds(batches: Iterator[Batch], world: int) -> Iterator[list[Batch]]:
    """As many batches as there are ranks, fewer at the end."""
    together: list[Batch] = []
    for batch in batches:
        together.append(batch)
        if len(together) == world:
            yield together
            together = []
    if together:
        yield together


def _run(setup: Setup, reference: Reference, rows: Batch) -> torch.Tensor:
    with setup.settings.kernels(), setup.settings.forward():
        return reference(rows.to(setup.engine.device))


def _checked(
    known: dict[bytes, float],
    plan: RunPlan,
    data: PreparedData,
    setup: Setup,
    base: Callable[[], Reference],
    say: Callable[[str], None],
) -> dict[bytes, float] | None:
    """None where the cache holds other numbers than the base gives."""
    few = data.train.subset(np.linspace(0, len(data.train) - 1, min(_CHECKED, len(data.train))).astype(int))
    (rows,) = all_laid_out(few, Layout(plan.tokenizer.pad_id))
    expected = _run(setup, base(), rows).tolist()
    tolerance = _TOLERANCE[plan.precision.compute.value]
    for key, value in zip(_digests(rows), expected, strict=True):
        if key not in known or abs(known[key] - value) > tolerance * max(1.0, abs(value)):
            say("reference: what the cache holds is not what the base gives; computing it again")
            return None
    return known


def _look_up(known: Mapping[bytes, float], rows: Batch) -> torch.Tensor:
    """Zeros for blank rows: whatever is computed from them counts nothing, and their lengths are gone."""
    if not rows.lengths:
        return torch.zeros(rows.sequences, device=rows.input_ids.device)
    found = [known[key] for key in _digests(rows)]
    return torch.tensor(found, dtype=torch.float32, device=rows.input_ids.device)


def _digests(rows: Batch) -> list[bytes]:
    """Of each row's ids and of which are learned, whether rows are packed or padded."""
    ids, targets = (in_rows(one, rows).cpu().numpy() for one in (rows.input_ids, rows.targets))
    found = []
    for row, length in enumerate(rows.lengths):
        content = ids[row, :length].tobytes() + targets[row, :length].tobytes()
        found.append(hashlib.blake2b(content, digest_size=_DIGEST).digest())
    return found


def _read(folder: Path) -> dict[bytes, float] | None:
    """None where there is none, or it is not what was written."""
    try:
        meta: dict[str, Any] = json.loads(plain_files.read_text(folder / _META))
        if any(durable.sha256_file(folder / name) != digest for name, digest in meta["sha256"].items()):
            return None
        keys, values = (np.load(folder / name, allow_pickle=False) for name in (_KEYS, _VALUES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {key.tobytes(): float(value) for key, value in zip(keys, values, strict=True)}


def _write(folder: Path, known: Mapping[bytes, float]) -> None:
    with durable.staged_folder(folder, replace=True) as staging:
        np.save(staging / _KEYS, np.frombuffer(b"".join(known), dtype=np.uint8).reshape(-1, _DIGEST))
        np.save(staging / _VALUES, np.array(list(known.values()), dtype=np.float32))
        sha256 = {name: durable.sha256_file(staging / name) for name in (_KEYS, _VALUES)}
        durable.write_json(staging / _META, {"sha256": sha256})
