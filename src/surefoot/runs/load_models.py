"""Carry out a plan: load the model, add the adapter, build optimizer and engine, restore a checkpoint, verify.

Everything here happens before step 1 and before anything in the run folder changes.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AddedToken, PreTrainedTokenizerBase

from surefoot.config.schema import OptimConfig, RunConfig
from surefoot.methods.method import ACTOR, CRITIC, Built, LoadedModels
from surefoot.methods.policy import load_policy, policy_alone
from surefoot.methods.table import functions_of
from surefoot.models.attention import attention_context
from surefoot.models.bos import install_bos_scaling
from surefoot.models.decoder import decoder_matrices
from surefoot.models.facts import is_router, layer_name, plain_parameter
from surefoot.models.fast.packing import NAME, documents_fault
from surefoot.models.load import load_tokenizer
from surefoot.models.modes import eager_mode
from surefoot.models.precision import TORCH_DTYPE, autocast, set_tf32
from surefoot.models.qat import unrounded
from surefoot.models.verify import verify_head, verify_model
from surefoot.planning.fast_paths import EXPERTS
from surefoot.planning.optimizer import rate_of, unfitting
from surefoot.planning.parallel import frees_casts, holds_narrow, sharder, shared_parts
from surefoot.planning.plan import PLAIN, RunPlan, TokenizerPlan
from surefoot.runs.parity.experts import experts_record
from surefoot.runs.profiling import Phases
from surefoot.runs.requirements import require_libraries
from surefoot.system import process
from surefoot.system.allocator import KeptMemory, mapped_bytes
from surefoot.system.errors import Fault, InputError
from surefoot.training.checkpoint import Checkpoint, load_state
from surefoot.training.engine import ALL, EngineChoice, make_engine
from surefoot.training.engine.make import count_elements, verify_share
from surefoot.training.optimizer import OptimizerSettings, make_optimizers, trainable_parameters
from surefoot.training.optimizer_state import tokens_per_moment_check
from surefoot.training.ranks import ALONE, Ranks
from surefoot.training.routing import Routing
from surefoot.training.state import LossScale, RunState
from surefoot.training.step import StepSettings


def planned_tokenizer(folder: Path, tokens: TokenizerPlan) -> PreTrainedTokenizerBase:
    """Load the tokenizer with the planned tokens, so that the published model reads texts and is padded like the run.

    A PAD id that has no token yet (a spare or an added row) gets one; it is the next free id.
    """
    tokenizer = load_tokenizer(folder)
    for token, number in zip(tokens.added.value, tokens.added_ids, strict=True):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=token in tokens.added_special)])
        if (found := tokenizer.convert_tokens_to_ids(token)) != number:
            what = f"the plan has {token} as id {number}, but the tokenizer assigns id {found}"
            raise InputError(Fault("tokenizer.add", what, "leave it out", code="SF-TOKENIZER"))
    if tokens.added_special and tokens.stop.value[0] != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens.stop.value[0])
    pad = tokens.pad_token.value
    if tokenizer.convert_tokens_to_ids(pad) == tokens.pad_id:
        tokenizer.pad_token = pad
    else:
        tokenizer.add_special_tokens({"pad_token": pad})
    if tokenizer.pad_token_id != tokens.pad_id:
        what = f"the plan has PAD {pad} as id {tokens.pad_id}, but the tokenizer assigns id {tokenizer.pad_token_id}"
        raise InputError(Fault("tokenizer.pad", what, "name an existing special token", code="SF-TOKENIZER"))
    return tokenizer


def load_models(
    config: RunConfig,
    plan: RunPlan,
    base: Path,
    checkpoint: Checkpoint | None,
    ranks: Ranks = ALONE,
    phases: Phases | None = None,
) -> LoadedModels:
    """Load, adapt and shard the models of a plan, restore a checkpoint, and compare the result with the plan.

    base: folder of the base model.
    checkpoint: where to continue; None at the start.
    ranks: the process group's ranks; all of them must call this.
    phases: records how long the policy's weights took.

    Raises InputError for a damaged model and EnvironmentFault if the loaded model differs from the plan.
    """
    require_libraries(config, plan.device.value)
    # Before any product: the number of threads decides how sums are split, and so their last bits.
    torch.set_num_threads(plan.threads.value)
    set_tf32(plan.precision)
    process.bound_product_caches(plan.device.value)
    allocator = process.settle_allocator(plan.device.value)
    kept = KeptMemory(plan.memory.total) if allocator else None
    device = torch.device(plan.device.value)
    choice = engine_choice(plan)
    # Sharded, or in 16 bits, the model may fit into the device where all of it in fp32 does not.
    whole_fits = choice.name in ("single", "ddp") and choice.narrow is None
    at_first = device if whole_fits else torch.device("cpu")
    policy = load_policy(config, plan, base, checkpoint, at_first)
    if phases is not None:
        phases.end("weights")
    install_bos_scaling(policy, plan.tokenizer.bos_scale.value)
    build = functions_of(config.stage).build
    # Before `build`, which may put more adapters into the policy.
    found = verify_model(policy, plan, at_first.type)
    built = build(config, plan, policy, base) if build else policy_alone(policy, plan)
    if checkpoint is not None:
        built.load(checkpoint.folder)
    if kept:
        kept.without(mapped_weights(built.model))
    # A pass of two tokens: compiling for it would take longer than all checks together. Inputs that are rounded by a
    # scale of the whole batch depend on later tokens.
    with eager_mode(policy), unrounded(policy):
        head = verify_head(policy, at_first)
    # Tested now: once weights are sharded, ranks wait for each other within a forward pass, and none may fail there.
    tested: dict[str, dict[str, Any]] = {}
    packs = plan.kernels.documents.value != PLAIN
    if packs and sharder(plan.parallel) and (fault := documents_fault(policy)):
        tested[NAME] = {"used": False, "fault": fault}
    if plan.kernels.adapter.value == EXPERTS:
        tested["adapter"] = experts_record(policy, ranks, resumed=checkpoint is not None)
    whole = count_elements(built.model)
    settings, decoder = optimizer_settings(config), decoder_matrices(built.model)
    factors = _rate_factors(config.optim, built)
    engine = make_engine(
        choice,
        built.model,
        built.groups,
        lambda groups: make_optimizers(groups, settings, decoder=decoder, factors=factors),
        ranks,
        device,
    )
    cut = shared_parts(choice.name, plan.parallel.zero_stage)
    share = verify_share(engine, choice.name, cut, whole)
    cached = not frees_casts(plan.parallel, plan.memory)
    state = RunState(scale=LossScale() if plan.precision.scaler.value else None)
    if checkpoint is not None:
        state, tensors = load_state(checkpoint)
        engine.load_state(tensors)
    return LoadedModels(
        plan=plan,
        model=engine.model,
        policy=policy,
        engine=engine,
        settings=StepSettings(
            seed=config.seed,
            max_grad_norm=_max_grad_norms(config, engine.groups),
            forward=lambda: autocast(plan.precision, device, cached=cached),
            kernels=lambda: attention_context(plan.attention),
            passes=lambda step: unrounded(policy) if step <= plan.precision.qat_after else nullcontext(),
            per_check=tokens_per_moment_check(whole.optimizer, whole.parameters, device.type),
            after_step=kept.after_step if kept else lambda: None,
            routing=_routing(policy, plan),
        ),
        state=state,
        write_weights=built.write,
        checkpoint=checkpoint,
        verified={
            **found,
            **built.verified,
            "head_difference": head,
            **({"allocator": allocator} if allocator else {}),
        },
        share=share,
        tested=tested,
    )


def engine_choice(plan: RunPlan) -> EngineChoice:
    """The engine that the plan names."""
    parallel = plan.parallel
    narrow = None
    if holds_narrow(parallel, plan.precision, plan.adapter):
        narrow = TORCH_DTYPE[plan.precision.compute.value]
    return EngineChoice(parallel.engine.value, parallel.zero_stage or 2, parallel.offload, narrow)  # type: ignore[arg-type]


def _routing(policy: nn.Module, plan: RunPlan) -> Routing | None:
    """None for a model without routers, and under torch.compile, which cannot trace the hooks."""
    routers = {layer_name(name): module for name, module in policy.named_modules() if is_router(module)}
    if not routers or plan.compile.value != "off":
        return None
    return Routing(routers, plan.balance.value if plan.balance else 0.0)


def mapped_weights(model: nn.Module) -> int:
    """Bytes of the model's CPU tensors that are memory-mapped from its files. Linux only."""
    on_cpu = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"]
    return mapped_bytes((tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in on_cpu)


def _max_grad_norms(config: RunConfig, groups: Collection[str]) -> dict[str, float | None]:
    """Maximum gradient norm of each parameter group."""
    own = {CRITIC: config.ppo.critic_max_grad_norm}
    return {name: own.get(name, config.optim.max_grad_norm) for name in groups}


def _rate_factors(optim: OptimConfig, built: Built) -> dict[str, float]:
    """Return parameter -> its rate as a multiple of optim.lr, for those that `optim.rates` names. The critic has none.
    Raises InputError for patterns that are found in no name."""
    critic = built.groups.get(CRITIC, lambda name: False)
    names = {name: plain_parameter(name) for name in trainable_parameters(built.model) if not critic(name)}
    if unfit := unfitting(optim, names.values()):
        raise InputError(unfit)
    rates = {name: rate_of(plain, optim) for name, plain in names.items()}
    return {name: rate / optim.lr for name, rate in rates.items() if rate != optim.lr}


def optimizer_settings(config: RunConfig) -> dict[str, OptimizerSettings]:
    """Optimizer settings of every parameter group that a stage may have; the critic has its own weight decay."""
    optim = config.optim
    main = OptimizerSettings(optim.name, optim.betas, optim.momentum, optim.eps, optim.weight_decay)
    return {ALL: main, ACTOR: main, CRITIC: replace(main, weight_decay=config.ppo.critic_weight_decay)}
