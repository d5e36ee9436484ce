"""The reference policy of DPO and KTO as planned: loaded, or precomputed and cached.

A separate reference model belongs to no engine: each rank holds all of it, frozen.

`cached_reference` computes the log-probabilities of a whole data set before step 1 and stores them in the cache folder,
with a key of everything they depend on: base, examples and computation. Answers are looked up by their ids and which
are supervised, independent of step, order or batch. A damaged folder is rebuilt; for an intact one a few answers are
computed again and compared, if the base is in memory.

Besides disk space, the cost is that an answer is computed in another batch than in its step, so its last bits differ
from those of a reference in memory. They are the same in every step and after every resume.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import DIGEST_SIZE, Batch, numbers_on, row_digests, unpacked
from surefoot.data.batching.loader import Layout, all_example_batches
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.cache import cache_key
from surefoot.methods.examples import constants_of, whole_layout
from surefoot.methods.losses.anchored import anchored_loss, distributions
from surefoot.methods.losses.logprobs import Reference, adapter_off, frozen
from surefoot.methods.method import LoadedModels, Notify, RunInputs, Task
from surefoot.methods.open_model import open_for_use
from surefoot.methods.policy import load_policy
from surefoot.models.bos import install_bos_scaling
from surefoot.models.facts import facts_of
from surefoot.models.fast.chunked_head import changes_logits, head_obstacle, loss_path
from surefoot.models.fast.packing import documents_fault, packed_attention
from surefoot.models.folder import base_fingerprint, resolve_folder
from surefoot.models.peft import PeftModel
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.planning.fast_paths import head_rows
from surefoot.planning.plan import PLAIN, Choice, RunPlan
from surefoot.planning.reference import ADAPTER_OFF, CACHED, MODEL, NONE
from surefoot.report.wording import duration_text
from surefoot.system import durable, hardware, plain_files, process
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.training.engine import Engine


def open_reference(run: RunInputs, loaded: LoadedModels, notify: Notify) -> Reference | None:
    """Open the reference; None if the loss has none. Raises InputError for a damaged model or another tokenizer."""
    config, plan = run.config, run.plan
    choice = plan.reference.value if plan.reference else NONE
    if choice == NONE:
        return None
    if choice == ADAPTER_OFF:
        assert isinstance(loaded.policy, PeftModel)
        return adapter_off(loaded.policy)
    if choice == MODEL:
        return frozen(_second_copy(config, plan, loaded.engine.device))
    if choice == CACHED:
        base, in_memory = _base_for_now(config, plan, loaded)
        return cached_reference(run, loaded, base, in_memory, notify)
    return _another(choice, plan, run.tokenizer, loaded.engine.device, notify)


def _base_for_now(config: RunConfig, plan: RunPlan, loaded: LoadedModels) -> tuple[Callable[[], Reference], bool]:
    """Return the base while its values are computed, and whether it is in memory already: under the adapter or, before
    step 1 of full fine-tuning, as the policy itself."""
    policy = loaded.policy
    if isinstance(policy, PeftModel):
        return lambda: adapter_off(policy), True
    if loaded.checkpoint is None:
        return lambda: frozen(policy), True
    return lambda: frozen(_second_copy(config, plan, loaded.engine.device)), False


def _second_copy(config: RunConfig, plan: RunPlan, device: torch.device) -> nn.Module:
    """Load the base as the policy started with it, with added rows and BOS factor."""
    base = resolve_folder(config.model.path, config.model.revision, weights=True)
    once = replace(plan.memory, gradient_checkpointing=Choice(False, "nothing flows back", "default"))
    model = load_policy(config, replace(plan, adapter=None, memory=once), base, None, device)
    install_bos_scaling(model, plan.tokenizer.bos_scale.value)
    if (form := plan.kernels.documents.value) != PLAIN:
        packed_attention(form).install(model)  # as in the policy, which has the same architecture and was tested
    return _frozen_model(model, plan)


@dataclass(frozen=True)
class ReferenceModel:
    """A model for log-probabilities per token. use: context in which it is the reference."""

    model: nn.Module
    use: Callable[[], AbstractContextManager[object]] = nullcontext


def start_anchored(run: RunInputs, loaded: LoadedModels) -> Task:
    """Give a loss of tokens its reference."""
    reference = open_reference_model(run, loaded)
    made = anchored_loss(run.config.sft.loss, constants_of(run.config), distributions(reference.model, reference.use))
    return replace(run.task, objective=made)


def open_reference_model(run: RunInputs, loaded: LoadedModels) -> ReferenceModel:
    """Open the reference as a model: the base under the adapter, or a copy."""
    assert run.plan.reference is not None
    if run.plan.reference.value == ADAPTER_OFF:
        assert isinstance(loaded.policy, PeftModel)
        trunk = SharedBackbone(loaded.policy)
        return ReferenceModel(loaded.policy, lambda: trunk.use_adapter(None))
    return ReferenceModel(_second_copy(run.config, run.plan, loaded.engine.device))


def _another(
    path: str, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device, notify: Notify
) -> Reference:
    """Open another model or adapter as the reference, in its own dtype."""
    opened = open_for_use(path, in_run=True)
    if not same_ids(opened.tokenizer, tokenizer):
        what = f"{path} has another tokenizer than the policy, so its ids mean other texts"
        raise InputError(
            Fault("alignment.reference", what, "name a model of the same family and vocabulary", code="SF-TOKENIZER")
        )
    ids = [opened.tokenizer.convert_tokens_to_ids(token) for token in plan.tokenizer.added.value]
    if tuple(ids) != plan.tokenizer.added_ids:
        what = f"{path} lacks a token that tokenizer.add names, or has it elsewhere"
        fix = "take the base itself as the reference, or add the tokens to both folders first"
        raise InputError(Fault("alignment.reference", what, fix, code="SF-TOKENIZER"))
    if opened.bos_scale != plan.tokenizer.bos_scale.value:
        notify(f"the reference multiplies the first embedding by {opened.bos_scale:g}, as it was trained to")
    for caution in opened.cautions:
        notify(f"reference: {caution}")
    model = _frozen_model(opened.model.to(device), plan)
    if (form := plan.kernels.documents.value) == PLAIN:
        return frozen(model)
    window = facts_of(opened.base).window
    why = documents_fault(model) if window is None else f"its layers look back {window} tokens"
    if why:
        notify(f"the reference gets padded rows: {why}")
        of_rows = frozen(model)
        return lambda rows: of_rows(unpacked(rows, plan.tokenizer.pad_id))
    packed_attention(form).install(model)
    return frozen(model)


def _frozen_model(model: nn.Module, plan: RunPlan) -> nn.Module:
    # A model that changes its logits rounds them in its own type, the chunked head does not: as in the policy.
    if plan.kernels.loss.value != PLAIN and changes_logits(model) and not head_obstacle(model):
        loss_path(head_rows(trains=False)).install(model)
    return model.eval().requires_grad_(False)


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both tokenizers give a text the same ids. Additional tokens of one, such as PAD, do not matter: no text
    contains them."""
    first, second = one.get_vocab(), other.get_vocab()
    if any(second[token] != number for token, number in first.items() if token in second):
        return False
    return _rules(one) == _rules(other)


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """How text is normalized and split, apart from the vocabulary."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "what is opened has a fast tokenizer"
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: backend.get(name) for name in ("normalizer", "pre_tokenizer", "model")}


_CHECKED = 4  # answers computed again to verify a cache
_EVERY = 20.0  # seconds between progress messages
# Same weights and ids in other batches: fp32 sums in another order, 16-bit products with other rounding.
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
_VALUES, _KEYS, _META = "values.npy", "keys.npy", "meta.json"


def cached_reference(
    run: RunInputs, loaded: LoadedModels, base: Callable[[], Reference], in_memory: bool, notify: Notify
) -> Reference:
    """Make a reference from log-probabilities that are computed once and stored in the cache folder.

    base: makes the reference itself.
    in_memory: whether `base` loads nothing.

    Collective: every rank must call it; each computes its share.
    """
    plan, data = run.plan, run.task.data
    folder = process.cache_folder() / "reference" / _key(run.config, plan, data)
    known = _agreed(_read(folder), loaded.engine)
    # A model is not loaded for the check alone: not having to is what the cache is for.
    if known is not None and in_memory:
        known = _agreed(_checked(known, plan, data, loaded, base, notify), loaded.engine)
    if known is None:
        known = _computed(plan, data, loaded, base, notify)
        if loaded.engine.rank == 0:
            try:
                _write(folder, known)
            except EnvironmentFault as error:  # it is computed again next time
                notify(f"reference: log-probabilities are not kept for the next start: {error}")
    else:
        notify(f"reference: log-probabilities of {len(known):,} answers found in the cache")
    return lambda rows: _look_up(known, rows)


def _agreed(known: dict[bytes, float] | None, engine: Engine) -> dict[bytes, float] | None:
    """Return None on every rank if any has None: machines may have separate caches, and all ranks must compute, or
    none."""
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
            # Other kernels sum in another order, so their last bits belong to another key.
            "attention": [plan.attention.implementation.value, list(plan.attention.kernels.value)],
            "device": plan.device.value,
            "versions": {name: hardware.versions().get(name) for name in ("torch", "transformers")},
        }
    )


def _computed(
    plan: RunPlan, data: PreparedData, loaded: LoadedModels, base: Callable[[], Reference], notify: Notify
) -> dict[bytes, float]:
    engine, reference = loaded.engine, base()
    sets = [one for one in (data.train, data.eval) if one is not None]
    total = sum(map(len, sets))
    notify(f"reference: computing the log-probabilities of {total:,} answers, once")
    started = notified = time.monotonic()
    keys: list[bytes] = []
    values: list[float] = []
    for round_of in _rounds(_all_rows(plan, data), engine.world):
        own = round_of[
            min(engine.rank, len(round_of) - 1)
        ]  # a rank without a batch repeats one, to take part in collectives
        found = _run(loaded, reference, own)
        lengths = [len(batch.lengths) for batch in round_of]
        places = np.cumsum([0, *lengths])
        # Zeros where another rank has the value, so that one sum over the ranks gathers them all.
        shared = np.zeros(places[-1])
        if engine.rank < len(round_of):
            shared[places[engine.rank] : places[engine.rank + 1]] = found.cpu().numpy()[: len(own.lengths)]
        values += engine.totals(shared.tolist())
        keys += [key for batch in round_of if batch.lengths for key in row_digests(batch)]
        if time.monotonic() - notified >= _EVERY:
            notified = time.monotonic()
            notify(f"reference: {len(values):,} of {total:,} answers")
    notify(f"reference: done in {duration_text(time.monotonic() - started)}")
    return dict(zip(keys, values, strict=True))


def _all_rows(plan: RunPlan, data: PreparedData) -> Iterator[Batch]:
    items = whole_layout(plan, data)
    layout = replace(items, most=None if items.most is None else items.most * data.rows_per_item)
    for dataset in (one for one in (data.train, data.eval) if one is not None):
        yield from all_example_batches(dataset, layout)


def _rounds(batches: Iterator[Batch], world: int) -> Iterator[list[Batch]]:
    """Group into one batch per rank, fewer at the end."""
    together: list[Batch] = []
    for batch in batches:
        together.append(batch)
        if len(together) == world:
            yield together
            together = []
    if together:
        yield together


def _run(loaded: LoadedModels, reference: Reference, rows: Batch) -> torch.Tensor:
    with loaded.settings.kernels(), loaded.settings.forward():
        return reference(rows.to(loaded.engine.device))


def _checked(
    known: dict[bytes, float],
    plan: RunPlan,
    data: PreparedData,
    loaded: LoadedModels,
    base: Callable[[], Reference],
    notify: Notify,
) -> dict[bytes, float] | None:
    """Return None if the cached values differ from the base's."""
    few = data.train.subset(np.linspace(0, len(data.train) - 1, min(_CHECKED, len(data.train))).astype(int))
    reference, tolerance = base(), _TOLERANCE[plan.precision.compute.value]
    expected: dict[bytes, float] = {}
    # Several batches where rows must have equally many pictures.
    for rows in all_example_batches(few, Layout(plan.tokenizer.pad_id)):
        expected |= zip(row_digests(rows), _run(loaded, reference, rows).tolist(), strict=True)
    for key, value in expected.items():
        if key not in known or abs(known[key] - value) > tolerance * max(1.0, abs(value)):
            notify("reference: what the cache holds is not what the base gives; computing it again")
            return None
    return known


def _look_up(known: Mapping[bytes, float], rows: Batch) -> torch.Tensor:
    """Look up rows. Empty rows get zeros: they have no weight, and their lengths are unknown."""
    if not rows.lengths:
        return torch.zeros(rows.sequences, device=rows.input_ids.device)
    return numbers_on(rows.input_ids.device, [known[key] for key in row_digests(rows)], torch.float32)


def _read(folder: Path) -> dict[bytes, float] | None:
    """Read a cache; None if it does not exist or is damaged."""
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
        np.save(staging / _KEYS, np.frombuffer(b"".join(known), dtype=np.uint8).reshape(-1, DIGEST_SIZE))
        np.save(staging / _VALUES, np.array(list(known.values()), dtype=np.float32))
        sha256 = {name: durable.sha256_file(staging / name) for name in (_KEYS, _VALUES)}
        durable.write_json(staging / _META, {"sha256": sha256})
