"""Convert the model of a run with `precision.qat`, and certify that its loss is the one seen in training.

The published weights are measured three times on the same rows: with the fake-quantized layers of training, as
converted, and as transformers loads the converted files. The first two must be equal (bit for bit on a CPU), and so
must the last two. surefoot's own kernels are off here, so the loss logged during training may differ by rounding; it is
recorded next to them.

An adapter is not converted: it is kept with its base, which is converted in memory for the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import IGNORE, Batch, Weighted
from surefoot.data.batching.subsets import in_padded_rows
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.method import LoadedModels
from surefoot.methods.policy import load_policy
from surefoot.models.bos import install_bos_scaling
from surefoot.models.modes import inference_mode
from surefoot.models.peft import PeftModel
from surefoot.models.qat import convert, emulate, save_converted
from surefoot.models.quiet import quiet_libraries
from surefoot.models.wrapped import auto_class
from surefoot.planning.plan import OFF
from surefoot.report.conversion import agrees, disagreement
from surefoot.runs.prepared import PreparedRun
from surefoot.system import durable
from surefoot.system.folders import QUANTISED
from surefoot.training.checkpoint import Checkpoint
from surefoot.training.report import EvalReport


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    record: see `surefoot.report.conversion`.
    files: names of the files written into the run folder.
    cautions: warnings for the user.
    """

    record: dict[str, Any]
    files: tuple[str, ...]
    cautions: tuple[str, ...]


def convert_run(run: PreparedRun, loaded: LoadedModels, checkpoint: Path, seen: EvalReport | None) -> Conversion | None:
    """Convert the model of a checkpoint and write it into the run folder; None if the run has no QAT.

    loaded: provides the settings of forward passes; the weights are read again.
    checkpoint: the checkpoint whose weights are published.
    seen: the run's own evaluation of them.
    """
    plan, device = run.plan, loaded.engine.device
    to, group = plan.precision.qat.value, plan.precision.qat_group
    if to == OFF:
        return None
    policy = load_policy(run.config, plan, run.base, Checkpoint(checkpoint, _step(checkpoint)), device)
    install_bos_scaling(policy, plan.tokenizer.bos_scale.value)
    trained, tokens = _loss(run, loaded, policy)
    layers = convert(policy, to, group)
    converted, _ = _loss(run, loaded, policy)
    record: dict[str, Any] = {
        "to": to,
        "group_size": group,
        "layers": layers,
        "step": _step(checkpoint),
        "rows": "held out" if run.task.eval_batches else "of step 1",
        "tokens": tokens,
        "device": device.type,
        "logged": seen.loss if seen and seen.unit == "tokens" else None,
        "trained": trained,
        "converted": converted,
    }
    files: tuple[str, ...] = ()
    if not isinstance(policy, PeftModel):
        folder = run.folder / QUANTISED
        with durable.staged_folder(folder, replace=True) as staging:
            save_converted(policy, to, group, staging)  # pyright: ignore[reportArgumentType]
            run.tokenizer.save_pretrained(staging)
        again = _as_transformers_reads(folder, run, device)
        emulate(again, to)
        install_bos_scaling(again, plan.tokenizer.bos_scale.value)
        record["reloaded"], _ = _loss(run, loaded, again)
        files = tuple(f"{QUANTISED}/{path.name}" for path in sorted(folder.iterdir()))
    record["agrees"] = agrees(record)
    return Conversion(record, files, () if record["agrees"] else (disagreement(record),))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _as_transformers_reads(folder: Path, run: PreparedRun, device: torch.device) -> nn.Module:
    from transformers import AutoConfig

    with quiet_libraries():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = auto_class(config).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=run.plan.attention.implementation.value,
            local_files_only=True,
            use_safetensors=True,
        )
    return model.to(device)


def _loss(run: PreparedRun, loaded: LoadedModels, model: nn.Module) -> tuple[float | None, int]:
    """Return the mean cross entropy of the supervised tokens in nats (None if not finite), and their number."""
    total, count, device = 0.0, 0, loaded.engine.device
    with inference_mode(model):
        for rows in _rows(run):
            with loaded.settings.kernels(), loaded.settings.forward():
                total += float(sft_loss(model, rows.to(device)).loss)
            count += int((rows.targets != IGNORE).sum())
    return (total / count if count and math.isfinite(total) else None), count


def _rows(run: PreparedRun) -> Iterator[Batch]:
    """Yield held-out rows, padded; rows of step 1 if nothing was held out."""
    batches: Iterator[Weighted] = run.task.eval_batches() if run.task.eval_batches else iter(run.task.step_batches(1))
    for batch in batches:
        yield in_padded_rows(batch, run.plan.tokenizer.pad_id).rows
