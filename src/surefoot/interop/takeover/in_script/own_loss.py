"""Compute a trainer's own loss of some rows, as it is before the first step."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .rows import NO_LABEL, Collate, collated, is_sided, without_led


def loss_of(
    trainer: Any, kind: type, rows: Any, collate: Collate, places: Sequence[int], dropped: Sequence[str], *, own: bool
) -> dict[str, Any]:
    """Return the trainer's loss and gradient norm of these rows, in fp32 and without dropout, per learned token.

    kind: the class whose compute_loss counts.
    dropped: names of what the user has given up.
    own: whether the loss is the script's own, which is told no number of tokens.

    Returns loss and norm; counted, the tokens by which the trainer itself divides, for each learned one; led, the rows
    whose first token it learns from padding before it, which is left out here.
    """
    import torch

    model = trainer.model
    models = [one for one in (model, getattr(trainer, "ref_model", None)) if one is not None]
    total, counted, led = 0.0, 1.0, 0
    with ExitStack() as stack, torch.enable_grad():
        for one in models:
            stack.enter_context(_plain(one))
        stack.enter_context(_alone(trainer, "compute_loss_func" in dropped))
        model.zero_grad()
        # TRL 0.12 leaves out the last token of the longest row where rows are padded: each is computed alone
        sided = is_sided(collated(rows, collate, [places[0]]))
        parts = [[place] for place in places] if sided else [places]
        for part in parts:
            batch, first = without_led(collated(rows, collate, list(part)))
            loss, counted = _computed(trainer, kind, batch, models[-1], own=own)
            (loss / len(parts)).backward()
            total, led = total + float(loss.detach()) / len(parts), led + first
        squares = [float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None]
    return {"loss": total * counted, "norm": math.sqrt(sum(squares)) * counted, "counted": counted, "led": led}


def _computed(trainer: Any, kind: Any, batch: dict[str, Any], reference: Any, *, own: bool) -> tuple[Any, float]:
    """Return the loss of a batch, and the tokens by which the trainer divides for each learned one."""
    device = next(trainer.model.parameters()).device
    batch = {name: one.to(device) if hasattr(one, "to") else one for name, one in batch.items()}
    batch, more = _with_count(trainer, batch, device)
    if own:
        more = {}  # it is then a mean over its tokens, as it would be without Trainer
    if "ref_chosen_logps" in batch:  # computed in the script's own dtype
        found = trainer.compute_ref_log_probs(reference, batch)
        batch["ref_chosen_logps"], batch["ref_rejected_logps"] = found
    loss = kind.compute_loss(trainer, trainer.model, batch, **more)
    # Transformers before 5 count the first token of each row as well, which nothing predicts.
    learned = int((batch["labels"][..., 1:] != NO_LABEL).sum()) if "labels" in batch else 0
    return loss, int(more.get("num_items_in_batch") or learned) / learned if learned else 1.0


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Let the model compute in fp32, without dropout and with attention that takes fp32; restore it afterwards."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    dtypes = [one.dtype for one in tensors]
    training, attention = model.training, getattr(model.config, "_attn_implementation", None)
    model.eval()
    if getattr(model.config, "quantization_config", None) is None:
        for one in tensors:
            one.data = one.data.float()
    if attention not in (None, "eager", "sdpa"):
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.zero_grad()
        for one, dtype in zip(tensors, dtypes, strict=True):
            one.data = one.data.to(dtype)  # exact: the values came from this dtype
        if attention not in (None, "eager", "sdpa"):
            model.set_attn_implementation(attention)
        model.train(training)


@contextmanager
def _alone(trainer: Any, without_function: bool) -> Iterator[None]:
    """Let the trainer compute as on one device, and without its own loss function if that was given up."""
    devices, function = trainer.args.n_gpu, getattr(trainer, "compute_loss_func", None)
    # TRL adds to them in compute_loss
    logged = {
        name: copy.deepcopy(one) for name, one in vars(trainer).items() if name in ("_metrics", "_stored_metrics")
    }
    trainer.args._n_gpu = min(1, devices)
    trainer.current_gradient_accumulation_steps = 1  # else set in train(), and read by TRL beside routers
    if without_function:
        trainer.compute_loss_func = None
    try:
        yield
    finally:
        trainer.args._n_gpu, trainer.compute_loss_func = devices, function
        vars(trainer).update(logged)


def counts(trainer: Any) -> bool:
    """Whether this version of transformers divides by the tokens of a whole step (4.46 and later)."""
    return hasattr(trainer, "get_batch_samples")


def _with_count(trainer: Any, batch: Any, device: Any) -> tuple[Any, dict[str, Any]]:
    """Return the batch, and the arguments of compute_loss that count its items."""
    if not counts(trainer):
        return batch, {}
    given = (iter([batch]), 1, device)[: len(inspect.signature(trainer.get_batch_samples).parameters)]
    samples, count = trainer.get_batch_samples(*given)
    return samples[0], {"num_items_in_batch": count}
