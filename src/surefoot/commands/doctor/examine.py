"""Examine a machine, or a config on a machine, for problems, in the order in which a run would meet them.

    examine(None)            # only the machine
    examine(config)          # also the run

A refusal ends the examination, because later checks depend on what was refused. A check that finds nothing gets a line
that says so, or why it does not apply, so every code appears. Models and steps exist only in memory and in a temporary
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.commands.doctor.findings import CODES, Examination, Finding, caution, ok, refusals, unknown
from surefoot.commands.doctor.machine import (
    disk_line,
    environment_lines,
    hub_line,
    installed_version,
    kernel_lines,
    library_findings,
    packed_lines,
    product_lines,
    thread_lines,
    with_cost,
)
from surefoot.commands.doctor.numbers import gradient_line, leak_line, split_line
from surefoot.commands.doctor.parity import own_pass, parity_lines
from surefoot.commands.doctor.passes import gain_of_micro, observed_pass
from surefoot.commands.doctor.steps import (
    STEPS,
    attention_line,
    backward_line,
    compile_line,
    number_lines,
    product_line,
    take,
    waiting_line,
    workers_line,
)
from surefoot.config.schema import RunConfig
from surefoot.config.sections import ParallelConfig
from surefoot.data.audit import Audit, cautions
from surefoot.models.facts import facts_of
from surefoot.planning.attention import EAGER_ROUNDS, ORDER, mask_reason
from surefoot.planning.deterministic import with_deterministic
from surefoot.planning.environment import environment_without_plan
from surefoot.planning.measurements import Measurements, longest_example, measurements_from_json, measurements_to_json
from surefoot.planning.memory import fits, usable
from surefoot.planning.plan import Choice, DType, MemoryPlan
from surefoot.planning.probes.kept import Kept, open_kept
from surefoot.planning.probes.sizes import AttentionRequest
from surefoot.report.library_messages import captured_libraries
from surefoot.report.observer import silent_console
from surefoot.runs.make_plan import make_plan
from surefoot.runs.measured import (
    attention_request,
    largest_of,
    linear_shapes,
    measured_attention,
    measured_copy,
    measured_products,
    measured_tf32,
    measured_threads,
)
from surefoot.runs.output_folder import disk_of
from surefoot.runs.plan_with_data import lengths_of
from surefoot.runs.revisions import hub_names
from surefoot.runs.trial import Ready, ready
from surefoot.system import hardware as machine
from surefoot.system import process
from surefoot.system.errors import SurefootError
from surefoot.system.hardware import Hardware
from surefoot.system.messages import size_text

_OF_PASSES = [name for name, code in CODES.items() if code.group in ("numbers", "steps")]
_SHAPES = [(4096, 14336)]  # of an 8 B Llama, used without a config
_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_LENGTH = 4096


def examine(
    config: RunConfig | None, *, anew: bool = False, on_finding: Callable[[Finding], None] = lambda found: None
) -> Examination:
    """Run all checks. anew: ignore cached measurements of this machine. on_finding: called with each finding."""
    kept = open_kept()
    if anew:
        kept.forget()
    facts: dict[str, Any] = {"machine": machine.describe()}
    with silent_console() as silence, captured_libraries(silence), _threads_as_they_were():
        looked_at: list[Finding] = []
        for found in _lines(config, kept, facts):
            looked_at.append(found)
            on_finding(found)
    if not any(one.verdict == "fault" for one in looked_at):  # a refusal ends the examination
        looked_at += rest(config, looked_at)
    return Examination(tuple(looked_at), facts)


def _lines(config: RunConfig | None, kept: Kept, facts: dict[str, Any]) -> Iterator[Finding]:
    found = machine.detect()
    yield from library_findings(found, machine.accelerators(), installed_version)
    if config is None:
        yield from _machine_alone(found, kept, facts)
    else:
        yield from _of_a_run(config, found, kept, facts)


def _machine_alone(found: Hardware, kept: Kept, facts: dict[str, Any]) -> Iterator[Finding]:
    dtype: DType = "bf16" if found.bf16 else "fp32"
    request = AttentionRequest(
        tuple(_forms(found)), **_HEADS, length=_LENGTH, dtype=dtype, device=found.kind, masks=True
    )
    seen = _measure(found, kept, _SHAPES, request)
    facts["measurements"] = measurements_to_json(seen)
    threads = thread_lines(found.cores, machine.usable_cores(), seen.threads)
    variables = environment_without_plan(process.read_environment(), found.kind, found.cores)
    yield from _with_cost(environment_lines(variables, advised=threads), seen, _SHAPES, found)
    yield from threads
    yield from product_lines(seen.products, None, seen.tf32)
    yield from kernel_lines(seen.attention, (), dtype)
    yield disk_line(Path.cwd(), None)
    yield hub_line()


def _of_a_run(config: RunConfig, found: Hardware, kept: Kept, facts: dict[str, Any]) -> Iterator[Finding]:
    """Check the config as a run in this single process, ignoring `parallel`."""
    config = config.model_copy(update={"report_to": []})
    try:
        yield hub_line(hub_names(config))
        draft = make_plan(config, measure=False)
    except SurefootError as error:
        yield from refusals(error, "CONFIG")
        return
    yield disk_line(Path(config.output), disk_of(config, draft))
    targets = draft.adapter.targets.value if draft.adapter else ()
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    try:
        with ready(alone, STEPS) as one:
            seen = _measured_for(one, found, kept)
            facts["measurements"] = measurements_to_json(seen)
            yield from _on_this_machine(one, seen, found)
            yield from _planned(one, found)
            if lacking := _lacking(one.plan.memory, found):
                yield from (unknown(code, f"it needs {lacking}") for code in _OF_PASSES)
                return
            own = own_pass(one)
            yield from _taken(one, seen)
            plan = one.loaded.plan
            del one  # frees the model: the comparison below loads a second one
        yield from parity_lines(alone, plan, own, machine.detect().free)
    except SurefootError as error:
        yield from refusals(error, "DATA" if any(_is_record(one.where) for one in error.faults) else "MODEL", targets)


def _on_this_machine(one: Ready, seen: Measurements, found: Hardware) -> Iterator[Finding]:
    plan, compute = one.plan, one.plan.precision.compute.value
    threads = thread_lines(plan.threads.value, machine.usable_cores(), seen.threads)
    named = environment_lines(plan.environment, compiled=plan.compile.value != "off", advised=threads)
    yield from _with_cost(named, seen, linear_shapes(facts_of(one.run.base)), found, plan.precision.compute)
    yield from threads
    yield from product_lines(seen.products, compute, seen.tf32)
    implementation = plan.attention.implementation
    used = plan.attention.kernels.value or (implementation.value,)
    yield from kernel_lines(seen.attention, used, compute, only=implementation.source == "family")
    yield from packed_lines(seen.documents, plan.kernels.documents.value, compute)


def _with_cost(
    lines: Sequence[Finding],
    seen: Measurements,
    shapes: Sequence[tuple[int, int]],
    found: Hardware,
    compute: Choice[DType] | None = None,
) -> list[Finding]:
    """Add the measured cost of environment variables. compute: the run's type, None without one. If the plan chose it
    by speed, another type may be the fastest without the variables, so every type is compared with the chosen one."""
    from surefoot.planning.probes.matmul import rates_without

    here: Mapping[DType, float] = seen.products
    if compute is not None:
        types = seen.products if compute.source == "measured" else (compute.value,)
        here = dict.fromkeys(types, seen.products[compute.value])
    return with_cost(lines, here, lambda names: rates_without(names, largest_of(shapes), list(here), found.kind))


def _planned(one: Ready, found: Hardware) -> Iterator[Finding]:
    """Findings from the plan and the data."""
    plan, data = one.plan, one.run.task.data
    kernels = one.loaded.plan.kernels
    for name, choice in vars(plan.kernels).items():
        now = getattr(kernels, name)
        if now.value != choice.value:
            yield caution("FAST-PATH", now.reason, f"set kernels.{name}: plain", where=name)
    for sentence in plan.cautions:
        if "the forecast" not in sentence and not sentence.startswith(EAGER_ROUNDS):  # these have their own lines
            yield caution("PLAN", sentence, "`surefoot plan` shows every choice with its reason")
    tokens = plan.tokenizer
    yield ok("TOK-PAD", f"{tokens.pad_token.value} (id {tokens.pad_id}): {tokens.pad_token.reason}")
    audit = data.audit
    longer = _longer_fix(tokens.max_length.value, facts_of(one.run.base).max_positions)
    if audit.answers:
        yield _stops(audit, longer)
    if audit.kind != "prompts":
        said = f"{audit.supervised_tokens:,} of {audit.tokens:,} tokens"
        dropped = bool(audit.source.dropped)
        yield caution("LABEL-NONE", said, longer) if dropped else ok("LABEL-NONE", said)
    for sentence in cautions(audit):
        yield caution("DATA-AUDIT", sentence, "see `surefoot data`")
    yield _memory(one, found)


def _longer_fix(limit: int, positions: int) -> str:
    """The fix for examples that are cut. limit: tokens per example. positions: the model's maximum."""
    if limit < positions:
        return "raise data.max_length"
    return "shorten or drop long answers, or use a model with more positions"


def _stops(audit: Audit, longer: str) -> Finding:
    """A text longer than one example ends in its last piece; a pair has two answers. longer: the fix."""
    whole = audit.answers - audit.continued
    what = "texts" if audit.continued else "answers (two to a pair)" if audit.kind == "pairs" else "answers"
    said = f"{audit.ended:,} of {whole:,} {what} end with one"
    return caution("TOK-STOP", said, longer) if audit.ended < whole else ok("TOK-STOP", said)


def _memory(one: Ready, found: Hardware) -> Finding:
    memory = one.plan.memory
    free = "" if found.free is None else f", {size_text(found.free)} free now"
    said = f"{size_text(memory.total)} of {size_text(usable(memory.available))} usable{free}"
    if _has_room(memory, found):
        return ok("MEM-OVERSUBSCRIBED", said)
    micro = _micro_with_room(one, found)
    if micro is None:
        return caution("MEM-OVERSUBSCRIBED", said, "set gradient_checkpointing: on, or lower data.max_length")
    gain = None if _lacking(memory, found) else gain_of_micro(one, micro)
    return caution("MEM-OVERSUBSCRIBED", said, f"set batch.micro: {micro}", gain=gain)


def _lacking(memory: MemoryPlan, found: Hardware) -> str:
    """Needed and available memory, if trying would make the system kill this process or another; else empty."""
    if found.free is None or memory.total <= found.free:
        return ""
    return f"{size_text(memory.total)}, but only {size_text(found.free)} are free"


def _has_room(memory: MemoryPlan, found: Hardware) -> bool:
    return fits(memory) and not _lacking(memory, found)


def _micro_with_room(one: Ready, found: Hardware) -> int | None:
    """The largest of 1/2, 1/4, … of the run's micro-batch that fits; None if none does."""
    config, lengths = one.run.config, lengths_of(one.run.config, one.run.task.data)
    micro = one.plan.batch.micro.value
    while micro > 1:
        micro //= 2
        smaller = config.model_copy(update={"batch": config.batch.model_copy(update={"micro": micro})})
        plan = make_plan(smaller, measurements=one.plan.measurements, lengths=lengths)
        if _has_room(plan.memory, found):
            return micro
    return None


def _taken(one: Ready, seen: Measurements) -> Iterator[Finding]:
    """Checks that need passes of the real model; those that change the weights come last."""
    run = one.run
    yield split_line(one)
    yield leak_line(one)
    yield gradient_line(one)
    observed = observed_pass(one)
    yield attention_line(one, observed, seen)
    yield product_line(one, observed, run.plan.precision.compute.value, seen)
    taken = take(one)
    yield from number_lines(taken, run.plan.precision.compute.value, falls=not run.config.method.rollouts)
    yield backward_line(one, taken, seen)
    yield waiting_line(taken, run.config.data.workers)
    yield workers_line(one, taken, run.config.data.workers)
    yield compile_line(taken, run.plan, one)


def _measured_for(one: Ready, found: Hardware, kept: Kept) -> Measurements:
    """Measure at the model's shapes and the data's lengths, even if the plan did not need it; packed attention and
    pointwise operators as the plan measured them. The request is the plan's first one, with the micro-batch before any
    measurement, so its answer is already cached."""
    model = facts_of(one.run.base)
    lengths = lengths_of(one.run.config, one.run.task.data)
    dtype = one.plan.precision.compute.value
    longest = longest_example(one.plan.tokenizer.max_length.value, lengths)
    window = model.window if mask_reason(model.window, longest) else None
    rows = make_plan(one.run.config, measure=False, lengths=lengths).batch.micro.value
    masks = lengths.pictures
    request = attention_request(model, _forms(found), lengths.typical, dtype, found.kind, rows, window, masks=masks)
    planned = measurements_from_json(one.plan.measurements)
    seen = _measure(found, kept, linear_shapes(model), request)
    return replace(seen, documents=planned.documents, pointwise=planned.pointwise)


def _forms(found: Hardware) -> Sequence[str]:
    return with_deterministic([*ORDER, "eager"]) if found.kind == "cuda" else ["flash", "math", "eager"]


def _measure(found: Hardware, kept: Kept, shapes: Sequence[tuple[int, int]], request: AttentionRequest) -> Measurements:
    device, dtype = torch.device(found.kind), request.dtype
    dtypes: list[DType] = ["fp32", "bf16" if dtype == "fp32" else dtype]
    return Measurements(
        products=measured_products(shapes, device, dtypes, kept),
        attention=measured_attention(request, kept),
        attention_dtype=dtype,
        attention_length=request.length,
        threads=measured_threads(shapes, found.cores, kept) if found.kind == "cpu" else {},
        tf32=measured_tf32(shapes, device, kept),
        copy=measured_copy(device, kept),
    )


def _is_record(where: str) -> bool:
    """Whether a place is a line of a data file, or a config key under data."""
    return where.startswith("data") or where.rpartition(":")[2].isdecimal()


@contextmanager
def _threads_as_they_were() -> Iterator[None]:
    """Restore torch's thread count, which the probes change, also after an error."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Checks made along the way, which report only problems, with the text for "no problem".
_IN_ORDER = {
    "ENV-UNREAD": "none is set",
    "CONFIG": "no conflict",
    "ENVIRONMENT": "all there",
    "PLAN": "no warnings",
    "DTYPE-CONFLICT": "compatible",
    "DATA": "every record was read",
    "DATA-AUDIT": "no warnings",
    "MODEL": "complete and finite",
}
_NOT_IN_PPO = {
    "TOK-STOP": "does not apply: stage ppo trains on generated answers",
    "LABEL-NONE": "does not apply: stage ppo trains on generated answers",
    "LOSS-FALLING": "does not apply: stage ppo raises the reward, and losses of different answers do not compare",
}


def rest(config: RunConfig | None, seen: Iterable[Finding]) -> list[Finding]:
    """A line for every remaining code after an examination without a fault; without a config only the machine's."""
    covered = {one.code for one in seen}
    groups = {"machine"} if config is None else {code.group for code in CODES.values()}
    left = [name for name, code in CODES.items() if code.group in groups and name not in covered]
    return [ok(name, _why(name, config)) for name in left]


def _why(name: str, config: RunConfig | None) -> str:
    if name in _IN_ORDER or config is None:
        return _IN_ORDER.get(name, "nothing to measure on this machine")
    adapter = config.adapter
    if name == "ADAPTER-TARGETS":
        return "all exist and are linear" if adapter else "does not apply: no adapter, all weights are trained"
    if name == "ROW-ZERO-NORM":
        return "none" if adapter and adapter.kind == "dora" else "does not apply: only DoRA divides by norms"
    if config.method.rollouts and name in _NOT_IN_PPO:
        return _NOT_IN_PPO[name]
    return "does not apply to these steps"
