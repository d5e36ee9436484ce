"""The summary of a run before it starts, in about twenty lines; the full plan and audit are in the run folder."""

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

_OF_SOME = ("bos.scale", "alignment.", "ppo.", "reward.", "shared prompts")  # choices that only some runs have
_SAMPLE = 240  # characters shown of a long part of the example
_EXAMPLE = 480  # characters shown of its beginning, and as many of its end


def run_summary(config: RunConfig, plan: RunPlan, data: PreparedData, base: Path, times: Timetable) -> RenderableType:
    """The summary for `Console.show_summary`. base: folder of the base model."""
    shown = {what: value for what, value, _, _ in choice_rows(plan)}
    lines: list[tuple[str, str | Text]] = [
        ("model", _model(config, plan, base)),
        ("trains", _trained(config, plan, base, shown)),
        ("computes", _computing(plan, shown)),
        *_besides(shown),
        *_data(data),
        ("example", _example(data)),
        ("batch", _batch(config, plan, shown, times)),
        ("memory", f"forecast {size_text(plan.memory.total)} of {size_text(usable(plan.memory.available))} usable"),
        *_speed(config, plan, data, base, times),
        *_environment(plan),
    ]
    parts: list[RenderableType] = [
        Hanging(Text(f"{name:<12}", "bold"), Text(value) if isinstance(value, str) else value) for name, value in lines
    ]
    cautions = [*plan.cautions, *all_cautions(data)]
    parts += [Hanging(Text("caution: ", "yellow"), Text(one, "yellow")) for one in cautions]
    where = f"full plan and data audit: {config.output}/run.log, or on the screen with -v"
    return Group(*parts, Text(where, "dim"))


def _model(config: RunConfig, plan: RunPlan, base: Path) -> str:
    facts = facts_of(base)
    sizes = f"{plan.parameters:,} parameters, {facts.layers} layers of width {facts.hidden}"
    drawn = ", random weights by the seed" if config.model.weights == "random" else ""
    return f"{config.model.path}: {facts.model_type}, {sizes}{drawn}"


def _trained(config: RunConfig, plan: RunPlan, base: Path, shown: Mapping[str, str]) -> str:
    share = f"{plan.trainable:,} parameters ({plan.trainable / plan.with_adapter:.2%})"
    how = "all weights of the language model" if facts_of(base).wrapper_parameters else "all weights"
    if plan.trained:
        how = f"weights of {', '.join(plan.trained)}"
    if plan.adapter is not None:
        how = f"{plan.adapter.kind.value}, {shown['adapter.scale']}, on {shown['adapter.targets']}"
    if plan.vision:
        how += f", and all of {' and '.join(plan.vision)}"
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
    """Yield choices that only some runs have: a scaled BOS, and stages other than supervised fine-tuning."""
    own = [f"{what} {value}" for what, value in shown.items() if what.startswith(_OF_SOME)]
    if own:
        yield "also", "; ".join(own)


def _data(data: PreparedData) -> Iterator[tuple[str, str]]:
    yield "data", f"{_files(data.sources)}: {_counts(data.audit)}; template {data.template.name}"
    if data.eval_audit is not None:
        yield "evaluation", f"{_files(data.eval_sources)}: {_counts(data.eval_audit)}"


def _files(sources: tuple[Audit, ...]) -> str:
    return first_few([Path(audit.source.file).name for audit in sources], 3)


def _counts(audit: Audit) -> str:
    """Counts of examples, records and tokens, with the learned share if any are learned."""
    learned = "" if audit.kind == "prompts" else f", {audit.supervised_share:.1%} learned"
    return f"{audit.kept:,} {COUNTED[audit.kind]} of {audit.source.rows:,} records, {audit.tokens:,} tokens{learned}"


def _example(data: PreparedData) -> Text:
    """Show the shortest sample that is learned as good, or another if the audit has none."""
    sample = min(data.audit.samples, key=lambda one: (not one.learned_as_good, one.tokens))
    verdict = f" ({sample.verdict})" if sample.verdict else ""
    shown = sample_text(sample, _SAMPLE, _SAMPLE // 4, lines=False)
    return Text(f"row {sample.number}{verdict}: ") + _shortened(shown)


def _shortened(text: Text) -> Text:
    """The first and last characters of a long dialogue, and how many are left out between them."""
    left_out = len(text) - 2 * _EXAMPLE
    if left_out <= 0:
        return text
    return Text.assemble(text[:_EXAMPLE], f" … ({left_out:,} more characters) … ", text[-_EXAMPLE:])


def _batch(config: RunConfig, plan: RunPlan, shown: Mapping[str, str], times: Timetable) -> str:
    room = config.batch.row_tokens
    unit = config.method.counted if room is None else f"rows of {room} tokens"
    epochs = f"{times.epoch(times.total_steps):.3g}"
    steps = f"{counted(times.total_steps, 'step')} ({epochs} epoch{'' if epochs == '1' else 's'})"
    packed = f"packing {shown['data.packing']}"
    return f"{plan.batch.size.value} {unit} per step, in micro-batches of {shown['batch.micro']}; {packed}; {steps}"


def _speed(
    config: RunConfig, plan: RunPlan, data: PreparedData, base: Path, times: Timetable
) -> Iterator[tuple[str, str]]:
    """Yield a lower bound of the time, from the rate of matrix products if that was measured."""
    arithmetic = Arithmetic(facts_of(base), plan, config.stage)
    rate = measurements_from_json(plan.measurements).products.get(plan.precision.compute.value)
    if rate is None or not arithmetic.is_whole:
        return
    if plan.device.value == "cpu":
        rate *= plan.threads.value
    audit, tokens = data.audit, data.audit.tokens
    # By Jensen's inequality, the mean length underestimates the cost of squared lengths.
    needed = arithmetic.flops(Work(tokens, tokens * tokens // len(data.train), audit.supervised_tokens)).needed
    most = tokens * rate * plan.parallel.ranks.value / needed
    least = times.epoch(times.total_steps) * tokens / most
    yield (
        "speed",
        f"at most {most:,.0f} tok/s, so at least {duration_text(least)}, from the measured rate of matrix products",
    )


def _environment(plan: RunPlan) -> Iterator[tuple[str, str]]:
    if plan.environment:
        found = (f"{one.name}={one.value} {one.verdict}" for one in plan.environment)
        shown = ("".join(letter if letter.isprintable() else "?" for letter in one) for one in found)
        yield "environment", "; ".join(shown)
