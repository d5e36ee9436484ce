"""The run's language model: loaded as planned, with its adapter, and saved in the format that other tools read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from surefoot.config.paths import nearest_path
from surefoot.config.schema import RunConfig
from surefoot.methods.method import ONE_GROUP, Built
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.decoder import decoder_of
from surefoot.models.embeddings import resize_vocabulary
from surefoot.models.facts import facts_of
from surefoot.models.folder import require_adapter, resolve_folder
from surefoot.models.forward import causal_model
from surefoot.models.load import draw_model, keep_left_out, load_model
from surefoot.models.modes import set_dropout
from surefoot.models.peft import PeftModel
from surefoot.models.precision import TORCH_DTYPE, quantize
from surefoot.models.qat import round_weights
from surefoot.models.save import load_adapter_weights, remember_start, resume_started, save_adapter, save_full
from surefoot.models.saved_adapter import SavedAdapter, check_shape, fitted, read_adapter, start_from
from surefoot.models.value_head import freeze_output_head
from surefoot.models.wrapped import freeze_others, train_vision
from surefoot.planning.plan import OFF, OWN_DROPOUT, ZERO, RunPlan
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import looks_local
from surefoot.training.checkpoint import Checkpoint


def load_policy(
    config: RunConfig, plan: RunPlan, base: Path, checkpoint: Checkpoint | None, device: torch.device
) -> nn.Module:
    """Load the model in training mode on `device`, with the planned adapter.

    base: folder of the base model.
    checkpoint: checkpoint to load weights from; None for the base model's.
    """
    full = plan.adapter is None
    packed = plan.precision.packed
    tokens = plan.tokenizer
    # Quantized layer by layer from the CPU: the device never holds the base in 16 or 32 bits.
    place, dtype = torch.device("cpu") if packed else device, TORCH_DTYPE[plan.precision.unpacked]
    attention, drawn = plan.attention.implementation.value, config.model.weights == "random"
    if drawn and checkpoint is None:
        model = draw_model(base, seed=config.seed, dtype=dtype, attention=attention, device=place)
    else:
        start = checkpoint.folder if full and checkpoint else base
        model = load_model(start, dtype=dtype, attention_implementation=attention, device=place)
    if tokens.rows is not None:
        of_tokens = max(tokens.added_ids, default=-1) + 1
        resize_vocabulary(model, tokens.rows, drawn=of_tokens, seed=config.seed)
    if full and checkpoint and not drawn:
        keep_left_out(model, base)  # take them from the base: the checkpoint will be deleted at some point
    if packed:
        quantize(model, packed, compute=TORCH_DTYPE[plan.precision.compute.value], device=device)
    if plan.precision.qat.value != OFF:
        round_weights(model, plan.precision.qat.value, plan.precision.qat_group)
    if (share := trained_dropout(config, plan)) is not None:
        set_dropout(model, share)
    # Written with the model, so that other programs stop where training taught it to.
    model.generation_config.eos_token_id = list(tokens.stop.value)
    model.generation_config.pad_token_id = tokens.pad_id
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(model, plan.memory.recomputed)
    if plan.compile.value != "off":
        decoder_of(model).compile(mode=plan.compile.value, dynamic=True)
    if plan.adapter is None:
        if plan.reward is not None:
            freeze_output_head(model)
        freeze_others(model, plan.trained)
        train_vision(model, plan.vision)
        return model.train()
    starts = plan.adapter.start != ZERO
    adapted = add_adapter(
        model,
        replace(plan.adapter, start=ZERO) if checkpoint else plan.adapter,
        seed=config.seed,
        base=config.model.path,
        revision=config.model.revision,
        autocast=plan.precision.compute.value != "fp32",
    )
    if checkpoint is not None:
        load = resume_started if starts else load_adapter_weights
        load(adapted, checkpoint.folder, save_embedding=tokens.added_rows > 0)
    elif starts:
        remember_start(adapted)
    elif (saved := find_initial(config, plan, base)) is not None:
        start_from(adapted, saved)
    return adapted.train()


def find_initial(config: RunConfig, plan: RunPlan, base: Path) -> SavedAdapter | None:
    """Return the adapter, converted to the modules of the base; None if the run starts with a new one.

    base: folder of the base model. Of both only settings and the headers of weights are read.

    Raises InputError if there is no such adapter, or if its kind, scale, rank or modules are not the plan's.
    """
    if config.adapter is None or config.adapter.initial is None or plan.adapter is None:
        return None
    named = config.adapter.initial
    if looks_local(named) and not Path(named).is_dir():
        what = f"folder {named} does not exist"
        raise InputError(Fault("adapter.initial", what, nearest_path(Path(named), ()), code="SF-FILE-MISSING"))
    folder = resolve_folder(named, config.adapter.initial_revision, weights=True)
    require_adapter(folder, named)
    facts = facts_of(base)
    saved = fitted(read_adapter(folder), facts)
    check_shape(saved, plan.adapter, facts)
    return saved


def trained_dropout(config: RunConfig, plan: RunPlan) -> float | None:
    """Dropout probability of the model's own layers in training; None keeps the values of its config.json."""
    if plan.dropout is not None:
        return None if plan.dropout.value == OWN_DROPOUT else plan.dropout.value
    if config.method.rollouts and config.model.dropout is None and not (plan.adapter and plan.adapter.dropout):
        return 0.0  # plans saved before `dropout` existed lack the choice; they trained like this
    return None if config.model.dropout == OWN_DROPOUT else config.model.dropout


def write_policy(policy: nn.Module, plan: RunPlan, folder: Path) -> None:
    """Save the adapter, or all weights if there is none."""
    if isinstance(policy, PeftModel):
        save_adapter(policy, folder, save_embedding=plan.tokenizer.added_rows > 0)
        causal_model(policy).generation_config.save_pretrained(folder)
    else:
        save_full(policy, folder)


def policy_alone(policy: nn.Module, plan: RunPlan) -> Built:
    """Of a method whose policy is all that trains."""
    return Built(policy, policy, ONE_GROUP, partial(write_policy, policy, plan), lambda folder: None, {})
