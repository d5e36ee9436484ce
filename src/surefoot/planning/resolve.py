"""Resolve a request and facts into a plan: every choice is made here, before anything is loaded.

Pure: the same arguments give the same plan on any machine. All conflicts are raised in one InputError. Facts that are
expensive to obtain (measurements, lengths of the examples) are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from surefoot.config.contradictions import contradictions
from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.families.tokenizer_facts import TokenizerFacts
from surefoot.planning.adapter import plan_adapter, with_new_tokens, with_rest
from surefoot.planning.ahead import ahead_bytes
from surefoot.planning.attention import mask_reason, plan_attention
from surefoot.planning.batch import plan_batch
from surefoot.planning.coverage import coverage
from surefoot.planning.deterministic import plan_deterministic
from surefoot.planning.drawing import with_answers
from surefoot.planning.environment import environment_findings, plan_threads
from surefoot.planning.experts import plan_balance
from surefoot.planning.fast_paths import plan_kernels
from surefoot.planning.measurements import (
    LengthFacts,
    Measurements,
    longest_document,
    longest_example,
    measurements_to_json,
)
from surefoot.planning.memory import base_bytes, forecast
from surefoot.planning.notes import Notes, as_trained, plan_dropout, plan_hazards
from surefoot.planning.optimizer import (
    VALUE_HEAD,
    caution_rate,
    plan_optimizer,
    plan_rates,
    state_bytes,
    trainable_tensors,
)
from surefoot.planning.packing import may_share, plan_packing, plan_shared_prompts
from surefoot.planning.parallel import (
    ONE_RANK,
    RanksFacts,
    caution_loading,
    check_average,
    check_server,
    check_shareable,
    plan_parallel,
    sharder,
    with_offload,
)
from surefoot.planning.plan import PLAIN, Choice, MemoryPlan, ParallelPlan, RewardPlan, RunPlan, TokenizerPlan
from surefoot.planning.ppo import Roles, plan_ppo, plan_reward_models
from surefoot.planning.precision import check_packed_base, plan_precision, plan_qat
from surefoot.planning.reference import TeacherFacts, plan_reference, plan_teacher, with_reference
from surefoot.planning.reward import plan_reward
from surefoot.planning.tokenizer import plan_tokenizer, tokenizer_of
from surefoot.planning.trained import check_trained, only_trained, with_layers
from surefoot.planning.vision import (
    adaptable,
    check_adapted,
    check_calls,
    check_engine,
    check_pictures,
    plan_vision,
    with_trained_vision,
)
from surefoot.planning.workload import Workload, with_kernels, workload_of
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware
from surefoot.system.messages import size_text


def resolve(
    config: RunConfig,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    hardware: Hardware,
    *,
    measurements: Measurements | None,
    environment: Mapping[str, str],
    lengths: LengthFacts | None = None,
    ranks: RanksFacts = ONE_RANK,
    roles: Roles = Roles(),  # noqa: B008  # frozen
    teacher: TeacherFacts | None = None,
) -> RunPlan:
    """Return the plan of the run.

    environment: relevant environment variables, by name.
    roles: the models of stages ppo and grpo.
    teacher: that of stage distill.

    Raises InputError with every conflict.
    """
    notes = Notes()
    for problem in contradictions(config):  # a config built in Python has not been checked by the file reader
        notes.refuse(problem.key, problem.what, problem.fix)
    seen = measurements or Measurements()
    model = as_trained(model, config)
    config = with_layers(config, model, notes)
    tokens = plan_tokenizer(config, model, tokenizer, notes)
    tokenizer = tokenizer_of(config, tokenizer)
    if config.adapter is not None:
        adapted = with_rest(config.adapter, model, head=not config.method.scores)
        if tokens.added.value:
            adapted = with_new_tokens(adapted, model, head=not config.method.scores)
        config = config.model_copy(update={"adapter": adapted})
    precision = plan_precision(config, model, hardware, seen, environment, notes)
    longest = longest_example(tokens.max_length.value, lengths)
    plan_hazards(model, precision.compute.value, longest, notes)
    caution_rate(config.optim, notes)
    documents = plan_packing(
        config,
        model,
        hardware,
        compute=precision.compute.value,
        longest=longest_document(tokens.max_length.value, lengths),
        lengths=lengths,
        trials=seen.documents,
        notes=notes,
        shares=may_share(config, model, hardware.kind),
    )
    packs = documents.value != PLAIN
    pictures = bool(lengths and lengths.pictures)
    both_ways = pictures and model.both_ways
    if both_ways and config.attention.implementation == "flash_attention_2":
        what = "flash_attention_2 takes no mask, and this model's image tokens attend to each other in both directions"
        notes.refuse("attention.implementation", what, "leave it out")
    attention = plan_attention(
        config.attention,
        hardware=hardware,
        compute=precision.compute.value,
        head_dim=model.head_dim,
        dropout=model.attention_dropout,
        # A run with packed rows also has padded ones (generation), which use SDPA.
        trials=[trial for trial in seen.attention if not (packs and trial.form == "eager")],
        notes=notes,
        masked=mask_reason(model.window, longest, both_ways),
        without_sdpa=model.without_sdpa,
        attends=model.attends,
        odd_heads=model.odd_heads,
        pictures=pictures,
        uniform=bool(lengths and lengths.uniform and not config.draws),  # answers that it draws have many lengths
    )
    attention = replace(
        attention,
        deterministic=plan_deterministic(
            config.attention.deterministic,
            documents.value if packs and documents.value != "sdpa" else attention.expected.value,
            hardware,
            # SDPA document by document has few rows at a time: what padded rows cost says nothing of it.
            [] if documents.value == "sdpa" else [*seen.documents, *seen.attention],
            config.compile != "off",
            notes,
        ),
    )
    vision = plan_vision(config, model, notes)
    adapter = None
    if config.adapter is not None:
        beside = adaptable(model, vision)
        adapter = plan_adapter(config.adapter, model, tokens.added_rows, notes, beside=beside)
        check_adapted(adapter, vision, notes)
    check_trained(config, model, notes)
    adapter = with_trained_vision(adapter, vision, model)
    if packed := precision.packed:
        check_packed_base(packed, model, adapter, notes)
    work = workload_of(config, model, hardware, tokens, precision, attention, adapter, documents.value, lengths, vision)
    reference = plan_reference(config, notes)
    work = with_reference(reference, config, work)
    ppo = None
    if config.method.critic:
        ppo, work = plan_ppo(config, roles, work, notes, tokens.added_rows)
    reward_models, work = plan_reward_models(roles, work)
    taught, work = plan_teacher(teacher, work)
    available = hardware.memory // ranks.local if hardware.kind == "cpu" else hardware.memory
    parallel = _parallel(config, ranks, work, available, notes)
    qat, qat_group = plan_qat(config.precision, model, adapter, parallel.engine.value, notes)
    precision = replace(precision, qat=qat, qat_group=qat_group, qat_after=config.precision.qat_after)
    work = replace(work, precision=precision)
    work = with_offload(work, parallel, config.optim, only_trained(config, model), tokens.added_rows)
    trained = list(trainable_tensors(only_trained(config, model), adapter, tokens.added_rows))
    names = [tensor.name for tensor in (*trained, *vision.tensors) if tensor.numbers]
    names += [VALUE_HEAD] if config.method.scores else []
    check_pictures(names, model, lengths, notes)
    check_calls(parallel, model, lengths, notes)
    check_engine(config, lengths, notes)
    rates = plan_rates(config.optim, names, notes)
    work = replace(work, ahead=ahead_bytes(config, work, parallel, trained, longest))
    balance = plan_balance(config, model, notes)
    kernels = plan_kernels(
        config,
        model,
        adapter,
        hardware,
        packed=packed,
        qat=qat.value,
        base=precision.base.value,
        sharder=sharder(parallel),
        bos_scale=tokens.bos_scale.value,
        documents=documents,
        balanced=balance is not None and balance.value > 0,
        trials=seen.pointwise,
        notes=notes,
    )
    work = with_answers(config, with_kernels(work, kernels, config), longest)
    batch, memory = plan_batch(
        config.batch,
        config.gradient_checkpointing,
        work,
        length=tokens.max_length.value,
        lengths=lengths,
        kind=hardware.kind,
        available=available,
        host=None if hardware.host is None else hardware.host // ranks.local,
        notes=notes,
        parallel=parallel,
        documents=config.method.packs,
        experts_frozen=None if ppo else _experts_frozen(config, model, work, tokens.added_rows),
    )
    reward = _reward(config, model, tokenizer, tokens, memory, parallel, hardware, pictures, notes)
    _check_free(memory, hardware, ranks.local, notes)
    compile_choice = _compile(config, notes)
    if notes.faults:
        raise InputError(notes.faults)
    plan = RunPlan(
        device=Choice(hardware.kind, hardware.name, "hardware"),
        precision=precision,
        attention=attention,
        tokenizer=tokens,
        adapter=adapter,
        optimizer=plan_optimizer(config.optim),
        rates=rates,
        memory=memory,
        batch=batch,
        compile=compile_choice,
        threads=plan_threads(model, hardware, environment, seen.threads),
        trainable=work.trainable,
        parameters=work.parameters,
        environment=(),
        cautions=tuple(notes.cautions),
        measurements={} if measurements is None else measurements_to_json(measurements),
        report_to=_trackers(config),
        parallel=parallel,
        reward=reward,
        reference=reference,
        ppo=ppo,
        reward_models=reward_models,
        teacher=taught,
        kernels=kernels,
        dropout=plan_dropout(config),
        balance=balance,
        coverage=coverage(model, adapter, vision.parts, only_trained(config, model)),
        vision=vision.parts,
        trained=tuple(config.model.trained or ()),
    )
    return replace(plan, environment=environment_findings(environment, plan))


def _experts_frozen(config: RunConfig, model: ModelFacts, work: Workload, added_rows: int) -> Workload | None:
    """Return the same workload with `adapter.experts: false`; None if that changes nothing or leaves no adapter."""
    if config.adapter is None or work.adapter is None or not work.adapter.parameters:
        return None
    request = config.adapter.model_copy(update={"experts": False})
    adapter = plan_adapter(request, model, added_rows, Notes())
    if not adapter.trainable or adapter.trainable == work.adapter.trainable:
        return None
    moments = state_bytes(config.optim, trainable_tensors(only_trained(config, model), adapter, added_rows))
    return replace(work, adapter=adapter, trainable=adapter.trainable, optimizer=moments)


def _parallel(config: RunConfig, ranks: RanksFacts, work: Workload, available: int, notes: Notes) -> ParallelPlan:
    """available: memory of one rank in bytes."""
    parallel = plan_parallel(config.parallel, ranks, _states(work, available), notes)
    check_shareable(parallel, config.optim.name, work.precision.packed is not None, notes)
    check_average(parallel, config.ppo.ema, notes)
    if config.draws:
        check_server(parallel, config.rollout.engine, f"{config.method.section}.engine", notes)
    caution_loading(parallel, ranks, base_bytes(work), notes)
    return parallel


def _reward(
    config: RunConfig,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    tokens: TokenizerPlan,
    memory: MemoryPlan,
    parallel: ParallelPlan,
    hardware: Hardware,
    pictures: bool,
    notes: Notes,
) -> RewardPlan | None:
    """Return None if the stage trains no reward model."""
    if not config.method.scores:
        return None
    recomputed, engine = memory.gradient_checkpointing.value, sharder(parallel)
    shared = plan_shared_prompts(
        config, model, device=hardware.kind, checkpointing=recomputed, sharder=engine, pictures=pictures
    )
    return plan_reward(config, model, tokenizer, tokens, shared, notes)


def _states(work: Workload, available: int) -> MemoryPlan:
    """Forecast the memory of one process without any example."""
    off = Choice(False, "", "default")
    return forecast(work, examples=0, length=1, supervised=0.0, checkpointing=off, available=available)


def _check_free(memory: MemoryPlan, hardware: Hardware, ranks: int, notes: Notes) -> None:
    """Warn if less memory is free now than forecast. The plan itself uses total memory, so that it is reproducible.

    ranks: number of processes that share the host.
    """
    if hardware.free is not None and memory.total > hardware.free:
        notes.caution(f"the forecast is {size_text(memory.total)}, but only {size_text(hardware.free)} are free now")
    if hardware.host_free is not None and (host := ranks * memory.host) > hardware.host_free:
        notes.caution(
            f"{size_text(host)} of host memory are needed, but only {size_text(hardware.host_free)} are free now"
        )


def _compile(config: RunConfig, notes: Notes) -> Choice[str]:
    if config.compile == "off":
        source = "user" if "compile" in config.model_fields_set else "default"
        return Choice("off", "it recompiles for new shapes, which can cost more than it saves", source)
    notes.caution(f"compile: {config.compile} takes minutes before step 1, and again for new shapes")
    if config.adapter is not None and config.adapter.kind == "dora":
        notes.caution(
            "torch.compile has a graph break at every DoRA layer (PEFT's code cannot be traced): expect no gain"
        )
    if config.compile == "max-autotune":
        notes.caution("max-autotune selects kernels by timing: a resumed run may use others and differ by rounding")
    return Choice(config.compile, "asked for", "user")


def _trackers(config: RunConfig) -> Choice[tuple[str, ...]]:
    if not config.report_to:
        return Choice((), "no tracker is configured", "default")
    return Choice(tuple(config.report_to), "installed; each gets every row of trainer_log.jsonl", "user")
