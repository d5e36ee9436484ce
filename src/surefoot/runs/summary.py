"""What a run is about to do, in some twenty lines for the screen: the whole plan and audit stand in the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from surefoot.config.schema import RunConfig
from surefoot.data.audit import Audit
from surefoot.data.prepare import PreparedData
from surefoot.method_facts.methods import COUNTED
from surefoot.models.facts import facts_of
from surefoot.planning.limits import Work
from surefoot.planning.measurements import measurements_from_json
from surefoot.planning.memory import usable
from surefoot.planning.plan import RunPlan
from surefoot.report.console import Hanging
from surefoot.report.data_audit import all_cautions
from surefoot.report.tables.audit import sample_text
from surefoot.report.tables.plan import choice_rows
from surefoot.report.wording import duration_text
from surefoot.runs.prepared import Timetable
from surefoot.runs.profiling import Arithmetic
from surefoot.system.messages import counted, first_few, size_text

_OF_SOME = ("bos.scale", "alignment.", "ppo.", "reward.", "shared prompts")  # of the plan's choices
_SAMPLE = 240  # characters of the example


def run_summary(config: RunConfig, plan: RunPlan, data: PreparedData, base: Path, times: Timetable) -> RenderableType:
    """For `Console.show_summary`. base: folder of the model."""
    shown = {what: value for what, value, _, _ in choice_rows(plan)}
    lines: list[tuple[str, str | Text]] = [
        ("model", _model(config, plan, base)),
        ("trains", _trained(config, plan, shown)),
        ("computes", _computing(plan, shown)),
        *_besides(shown),
        *_data(data),
        ("example", _example(data)),
        ("batch", _batch(config.method.counted, plan, shown, times)),
        ("memory", f"{size_text(plan.memory.total)} by the forecast, of {size_text(usable(plan.memory.available))}"),
        ("speed", _speed(config, plan, data, base, times)),
        *_environment(plan),
    ]
    parts: list[RenderableType] = [
        Hanging(Text(f"{name:<12}", "bold"), Text(value) if isinstance(value, str) else value) for name, value in lines
    ]
    cautions = [*plan.cautions, *all_cautions(data)]
    parts += [Hanging(Text("caution: ", "yellow"), Text(one, "yellow")) for one in cautions]
    where = f"all of the plan and the data's audit: {config.output}/run.log; here with -v"
    return Group(*parts, Text(where, "dim"))


def _model(config: RunConfig, plan: RunPlan, base: Path) -> str:
    facts = facts_of(base)
    sizes = f"{plan.parameters:,} parameters, {facts.layers} layers {facts.hidden} wide"
    return f"{config.model.path}: {facts.model_type}, {sizes}"


def _trained(config: RunConfig, plan: RunPlan, shown: Mapping[str, str]) -> str:
    share = f"{plan.trainable:,} parameters ({plan.trainable / plan.with_adapter:.2%})"
    how = "all weights"
    if plan.adapter is not None:
        how = f"{plan.adapter.kind.value}, {shown['adapter.scale']}, on {shown['adapter.targets']}"
    return f"{how}: {share}; {shown['optimizer']}, lr {config.optim.lr:g}"


def _computing(plan: RunPlan, shown: Mapping[str, str]) -> str:
    device, types = plan.device, [f"products in {shown['precision.compute']}"]
    if plan.adapter is not None:
        types.append(f"base in {shown['precision.base']}")
    ranks = plan.parallel.ranks.value
    where = (
        f"{device.value} ({device.reason})" if ranks == 1 else f"{ranks} x {device.value}, {shown['parallel.engine']}"
    )
    threads = f", {counted(plan.threads.value, 'thread')}" if device.value == "cpu" else ""
    kernel = plan.attention.expected.value
    attention = f"attention {shown['attention']}" + (f" ({kernel})" if kernel != shown["attention"] else "")
    return f"{where}{threads}; {', '.join(types)}; {attention}; compile {shown['compile']}"


def _besides(shown: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What only some runs choose: a scaled BOS, and stages other than supervised training."""
    own = [f"{what} {value}" for what, value in shown.items() if what.startswith(_OF_SOME)]
    if own:
        yield "besides", "; ".join(own)


def _data(data: PreparedData) -> Iterator[tuple[str, str]]:
    yield "data", f"{_files(data.sources)}: {_counts(data.audit)}; template {data.template.name}"
    if data.eval_audit is not None:
        yield "evaluation", f"{_files(data.eval_sources)}: {_counts(data.eval_audit)}"


def _files(sources: tuple[Audit, ...]) -> str:
    return first_few([Path(audit.source.file).name for audit in sources], 3)


def _counts(audit: Audit) -> str:
    """In tokens, of which some are learned where anything is."""
    learned = "" if audit.kind == "prompts" else f", {audit.supervised_share:.1%} of them learned"
    return f"{audit.kept:,} {COUNTED[audit.kind]} of {audit.source.rows:,} records, {audit.tokens:,} tokens{learned}"


def _example(data: PreparedData) -> Text:
    """The shortest of the audit's."""
    sample = min(data.audit.samples, key=lambda one: one.tokens)
    return Text(f"row {sample.number}: ") + sample_text(sample, _SAMPLE, _SAMPLE // 4, lines=False)


def _batch(unit: str, plan: RunPlan, shown: Mapping[str, str], times: Timetable) -> str:
    """unit: what the batch size counts."""
    epochs = f"{times.epoch(times.total_steps):.3g}"
    steps = f"{counted(times.total_steps, 'step')} ({epochs} epoch{'' if epochs == '1' else 's'})"
    packed = f"packing {shown['data.packing']}"
    return f"{plan.batch.size.value} {unit} a step, in passes of {shown['batch.micro']}; {packed}; {steps}"


def _speed(config: RunConfig, plan: RunPlan, data: PreparedData, base: Path, times: Timetable) -> str:
    """By the rate of the matrix products alone, where that was measured: no step is faster."""
    arithmetic = Arithmetic(facts_of(base), plan, config.stage)
    rate = measurements_from_json(plan.measurements).products.get(plan.precision.compute.value)
    if rate is None or not arithmetic.is_whole:
        return "not foretold; every line of progress says how long the rest takes"
    if plan.device.value == "cpu":
        rate *= plan.threads.value
    audit, tokens = data.audit, data.audit.tokens
    # Lengths squared: at least as much as if all examples had the mean length.
    needed = arithmetic.flops(Work(tokens, tokens * tokens // len(data.train), audit.supervised_tokens)).needed
    most = tokens * rate * plan.parallel.ranks.value / needed
    least = times.epoch(times.total_steps) * tokens / most
    return f"{most:,.0f} tok/s at most and so {duration_text(least)} at least, by the rate of products measured here"


def _environment(plan: RunPlan) -> Iterator[tuple[str, str]]:
    if plan.environment:
        found = (f"{one.name}={one.value} {one.verdict}" for one in plan.environment)
        shown = ("".join(letter if letter.isprintable() else "?" for letter in one) for one in found)
        yield "environment", "; ".join(shown)
