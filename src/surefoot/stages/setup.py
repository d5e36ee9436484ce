"""Carry out a plan: load the model, put the adapter in, build optimizer and engine, restore a checkpoint, verify.

Everything here happens before step 1 and before anything in the run folder changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.errors import Fault, InputError
from surefoot.models.adapters import add_adapter
from surefoot.models.attention import attention_context
from surefoot.models.bos import install_bos_scaling
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.decoder import decoder_matrices
from surefoot.models.forward import causal_model
from surefoot.models.load import load_model, load_tokenizer
from surefoot.models.peft import PeftModel
from surefoot.models.precision import TORCH_DTYPE, autocast, set_tf32
from surefoot.models.quantised import quantise
from surefoot.models.save import load_adapter_weights, save_adapter, save_full
from surefoot.models.verify import verify_head, verify_model
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.stages.required import require_libraries
from surefoot.training.checkpoint import Checkpoint, load_state
from surefoot.training.engine import SingleEngine
from surefoot.training.optimizer import OptimizerSettings, make_optimizer, trainable_parameters
from surefoot.training.optimizer_state import load_optimizer_tensors
from surefoot.training.scaling import LossScale
from surefoot.training.state import RunState
from surefoot.training.step import StepSettings


@dataclass(frozen=True)
class Setup:
    """What the loop needs. write_model: weights, config and tokenizer into a folder, as others read them.
    verified: what was found when reality was held against the plan."""

    model: nn.Module
    engine: SingleEngine
    settings: StepSettings
    state: RunState
    write_model: Callable[[Path], None]
    verified: dict[str, Any]


def planned_tokenizer(folder: Path, tokens: TokenizerPlan) -> PreTrainedTokenizerBase:
    """The tokenizer with the planned PAD, so that whoever loads the run pads as the run did.

    A PAD without a token of its own (a spare or an added row) becomes one: its id is the next free one.
    """
    tokenizer = load_tokenizer(folder)
    pad = tokens.pad_token.value
    if tokenizer.convert_tokens_to_ids(pad) == tokens.pad_id:
        tokenizer.pad_token = pad
    else:
        tokenizer.add_special_tokens({"pad_token": pad})
    if tokenizer.pad_token_id != tokens.pad_id:
        what = f"planned PAD {pad} as id {tokens.pad_id}, but the tokenizer gives it {tokenizer.pad_token_id}"
        raise InputError(Fault("tokenizer.pad", what, "name an existing special token"))
    return tokenizer


def set_up(
    config: RunConfig,
    plan: RunPlan,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
) -> Setup:
    """base: folder of the base model. checkpoint: where to continue, None at the start.

    Raises InputError for a model that is not intact and EnvironmentFault where reality differs from the plan.
    """
    require_libraries(config, plan.device.value)
    torch.set_num_threads(plan.threads.value)
    set_tf32(plan.precision)
    device = torch.device(plan.device.value)
    model = _load(config, plan, base, checkpoint, device)
    install_bos_scaling(model, plan.tokenizer.bos_scale.value)
    parameters = trainable_parameters(model)
    optim = config.optim
    chosen = OptimizerSettings(optim.name, optim.betas, optim.momentum, optim.eps, optim.weight_decay)
    optimizer = make_optimizer(parameters, chosen, decoder=decoder_matrices(model))
    state = RunState(scale=LossScale() if plan.precision.scaler.value else None)
    if checkpoint is not None:
        state, tensors = load_state(checkpoint)
        load_optimizer_tensors(optimizer, parameters, tensors)
    return Setup(
        model=model,
        engine=SingleEngine(model, parameters, optimizer),
        settings=StepSettings(
            seed=config.seed,
            max_grad_norm=optim.max_grad_norm,
            forward=lambda: autocast(plan.precision, device),
            kernels=lambda: attention_context(plan.attention),
        ),
        state=state,
        write_model=_writer(model, tokenizer, plan),
        verified={**verify_model(model, plan), "head_difference": verify_head(model, device)},
    )


def _load(
    config: RunConfig, plan: RunPlan, base: Path, checkpoint: Checkpoint | None, device: torch.device
) -> nn.Module:
    full = plan.adapter is None
    packed = plan.precision.base.value == "nf4"
    tokens = plan.tokenizer
    model: PreTrainedModel = load_model(
        checkpoint.folder if full and checkpoint else base,
        dtype=TORCH_DTYPE[plan.precision.unpacked],
        attention_implementation=plan.attention.implementation.value,
        device=torch.device("cpu") if packed else device,
        vocab_rows=tokens.pad_id + 1 if tokens.added_rows else None,
    )
    if packed:
        quantise(model, compute=TORCH_DTYPE[plan.precision.compute.value], device=device)
    model.generation_config.eos_token_id = list(tokens.stop.value)
    model.generation_config.pad_token_id = tokens.pad_id
    if plan.memory.gradient_checkpointing.value:
        enable_gradient_checkpointing(model)
    if plan.compile.value != "off":
        model.get_decoder().compile(mode=plan.compile.value, dynamic=True)
    if plan.adapter is None:
        return model.train()
    adapted = add_adapter(
        model,
        plan.adapter,
        seed=config.seed,
        base=config.model.path,
        revision=config.model.revision,
        autocast=plan.precision.compute.value != "fp32",
    )
    if checkpoint is not None:
        load_adapter_weights(adapted, checkpoint.folder, save_embedding=tokens.added_rows > 0)
    return adapted.train()


def _writer(model: nn.Module, tokenizer: PreTrainedTokenizerBase, plan: RunPlan) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if isinstance(model, PeftModel):
            save_adapter(model, folder, save_embedding=plan.tokenizer.added_rows > 0)
            causal_model(model).generation_config.save_pretrained(folder)
        else:
            save_full(model, folder)
        tokenizer.save_pretrained(folder)

    return write
