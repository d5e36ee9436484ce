"""The plan as tables: every choice with its source and reason, memory by kind, environment, cautions; and --scale.

Tables have no frames, so that the text lines up on a terminal, in a pipe and in run.log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.config.keys import all_keys
from surefoot.families.templates import IN_CONFIG, is_jinja
from surefoot.method_facts.losses import REWARD_LOSSES
from surefoot.planning.memory import fits, usable
from surefoot.planning.plan import OFF, PLAIN, ZERO, Choice, ParallelPlan, RunPlan
from surefoot.planning.scale import ScaleRow
from surefoot.planning.vision import parts_reached
from surefoot.system.messages import size_text

Row = tuple[str, str, str, str]  # what, value, source, reason
_VALUE_WIDTH = 38  # columns; "<|reserved_special_token_0|> (128002)" stays on one line


def plan_table(plan: RunPlan) -> RenderableType:
    """The tables for `Console.show`; environment and cautions are left out if empty."""
    parts: list[RenderableType] = [_choices(plan), *_coverage(plan), Text(), _memory(plan)]
    if plan.environment:
        parts += [Text(), _environment(plan)]
    for caution in plan.cautions:
        parts += [Text(), Text(f"caution: {caution}", style="yellow")]
    return Group(*parts)


def _table(*columns: str) -> Table:
    """The last column takes the remaining width; of the others only values wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns[:-1]:
        value = name == "value"
        table.add_column(name, no_wrap=not value, overflow="fold", max_width=_VALUE_WIDTH if value else None)
    table.add_column(columns[-1], overflow="fold", ratio=1)
    return table


def _choices(plan: RunPlan) -> Table:
    table = _table("choice", "value", "by", "why")
    for what, value, source, reason in choice_rows(plan):
        table.add_row(what, value, source, Text(reason, style="dim"))
    return table


def plan_changes(before: RunPlan, now: RunPlan) -> list[str]:
    """One line per choice that differs, and for the memory forecast; empty if nothing differs."""
    then, rows = {what: value for what, value, _, _ in choice_rows(before)}, list(choice_rows(now))
    lines = [
        f"{what} was {then.get(what, 'not planned')}, is {value}: {reason}"
        for what, value, _, reason in rows
        if then.get(what) != value
    ]
    lines += [f"{what} was {then[what]}, is not planned" for what in then if what not in {row[0] for row in rows}]
    totals = [size_text(plan.memory.total) for plan in (before, now)]
    return lines + [f"memory forecast was {totals[0]}, is {totals[1]}"] * (totals[0] != totals[1])


def choice_rows(plan: RunPlan) -> Iterator[Row]:
    """Yield every choice of the plan in the order in which a run uses them. The source of a choice that follows from
    another tool's default, not from its config, is "dialect" instead of "user"."""
    for what, value, source, reason in _rows(plan):
        yield what, value, *who_and_why(plan, what, source, reason)


def who_and_why(plan: RunPlan, what: str, source: str, reason: str) -> tuple[str, str]:
    """Return source and reason. what: the choice's name in the rows."""
    if source != "user" or plan.origin is None:
        return source, reason
    keys = _KEYS.get(what, (what,) if what in all_keys() else ())
    if not keys or any(_within(one, keys) for one in plan.origin.said):
        return source, reason
    return "dialect", reason.replace("asked for", f"{plan.origin.tool}'s default")


def _within(said: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of the keys, a part of one or the group of one."""
    return any(f"{said}.".startswith(f"{key}.") or key.startswith(f"{said}.") for key in keys)


_KEYS = {
    "attention": ("attention.implementation",),
    "attention.kernels": tuple(f"attention.{kernel}" for kernel in ("flash", "mem_efficient", "cudnn", "math")),
    "tokenizer.bos": ("bos.prepend", "bos.scale"),
    "template": ("data.template",),
    "max_length": ("data.max_length",),
    "adapter": ("adapter.kind",),
    "adapter.scale": ("adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.rslora"),
    "optimizer": ("optim.name",),
    "alignment.reference": ("alignment.reference",),
    "parallel.ranks": ("parallel.nproc",),
}
"""Config keys that a choice comes from, if its name is not a key."""


def _rows(plan: RunPlan) -> Iterator[Row]:
    yield _row("device", plan.device)
    if plan.parallel.engine.value != "single" or plan.parallel.offload != "none":
        yield from _parallel_rows(plan.parallel)
    precision = plan.precision
    yield _row("precision.compute", precision.compute)
    yield _row("precision.base", precision.base)
    yield _row("precision.trainable", precision.trainable)
    yield _row("precision.scaler", precision.scaler)
    yield _row("precision.tf32", precision.tf32)
    if precision.qat.value != OFF:
        yield _row("precision.qat", precision.qat)
    attention = plan.attention
    yield _row("attention", attention.implementation)
    yield _row("attention.kernels", attention.kernels)
    yield _row("attention.expected", attention.expected)
    if plan.device.value == "cuda":
        yield _row("attention.deterministic", attention.deterministic)
    tokens = plan.tokenizer
    if tokens.added.value:
        yield _row("tokenizer.add", tokens.added)
    yield _row("tokenizer.pad", tokens.pad_token, f"{tokens.pad_token.value} ({tokens.pad_id})")
    yield _row("tokenizer.bos", tokens.bos)
    if tokens.bos_scale.value != 1:
        yield _row("bos.scale", tokens.bos_scale)
    yield _row("tokenizer.stop", tokens.stop)
    yield _row("template", tokens.template, IN_CONFIG if is_jinja(tokens.template.value) else "")
    yield _row("max_length", tokens.max_length)
    yield from _adapter_rows(plan)
    yield from _balance_rows(plan)
    if plan.dropout is not None and plan.dropout.source != "family":
        yield _row("model.dropout", plan.dropout, "0" if plan.dropout.value == 0 else "")
    yield from _reward_rows(plan)
    if plan.reference is not None:
        yield _row("alignment.reference", plan.reference)
    if plan.teacher is not None:
        yield _row("distill.teacher", plan.teacher)
    yield from _ppo_rows(plan)
    yield _row("optimizer", plan.optimizer)
    if plan.rates.value:
        yield _row("optim.rates", plan.rates)
    yield _row("batch.size", plan.batch.size)
    yield _row("batch.micro", plan.batch.micro, _micro(plan))
    packing = plan.kernels.documents
    yield _row("data.packing", packing, "off" if packing.value == PLAIN else f"on ({packing.value})")
    yield _row("gradient_checkpointing", plan.memory.gradient_checkpointing)
    if plan.adapter is not None:
        yield _row("kernels.adapter", plan.kernels.adapter)
    yield _row("kernels.loss", plan.kernels.loss)
    yield _row("kernels.last_block", plan.kernels.last_block)
    yield _row("kernels.pointwise", plan.kernels.pointwise)
    if plan.device.value == "cuda":
        yield _row("kernels.rotary", plan.kernels.rotary)
        yield _row("kernels.gated", plan.kernels.gated)
    yield _row("compile", plan.compile)
    yield _row("threads", plan.threads)
    if plan.report_to.value:
        yield _row("report_to", plan.report_to)


def _micro(plan: RunPlan) -> str:
    """Size of a micro-batch x micro-batches per rank and step."""
    batch = plan.batch
    if batch.tokens is None:
        return f"{batch.micro.value} x {batch.accumulation}"
    return f"up to {batch.tokens} tokens x {batch.accumulation}"


def _reward_rows(plan: RunPlan) -> Iterator[Row]:
    reward = plan.reward
    if reward is None:
        return
    yield _row("reward.loss", reward.loss)
    facts = REWARD_LOSSES.get(reward.loss.value)  # None for a custom loss
    reads_padding = facts is not None and "num_padding_at_beginning" in facts.keys
    if reads_padding or reward.num_padding_at_beginning.source == "user":
        yield _row("reward.num_padding_at_beginning", reward.num_padding_at_beginning)
    if reward.center:
        yield "reward.center", f"{reward.center:g}", "user", "asked for: holds scores around 0"
    yield _row("reward.head", reward.head)
    yield _row("shared prompts", reward.shared_prompts)
    frozen = f"; the output head's {reward.frozen:,} are unused and stay unchanged" if reward.frozen else ""
    yield "value head", "fp32", "default", f"{reward.head_parameters:,} more parameters are trained{frozen}"


def _ppo_rows(plan: RunPlan) -> Iterator[Row]:
    for choice in plan.reward_models:
        yield _row("grpo.rewards", choice)
    if plan.ppo is None:
        return
    yield _row("ppo.actor", plan.ppo.actor)
    yield _row("ppo.critic", plan.ppo.critic)
    yield _row("ppo.reference", plan.ppo.reference)
    yield _row("ppo.reward", plan.ppo.reward)
    yield (
        "value head",
        "fp32",
        "default",
        f"{plan.ppo.critic_parameters:,} parameters of the critic are trained as well",
    )


def _parallel_rows(parallel: ParallelPlan) -> Iterator[Row]:
    stage = f" ZeRO-{parallel.zero_stage}" if parallel.zero_stage else ""
    yield _row("parallel.engine", parallel.engine, f"{parallel.engine.value}{stage}")
    yield _row("parallel.ranks", parallel.ranks)
    if parallel.offload != "none":
        yield "parallel.offload", parallel.offload, "user", "kept in host memory between its uses"


def _adapter_rows(plan: RunPlan) -> Iterator[Row]:
    share = (
        f"{plan.trainable:,} of {plan.with_adapter:,} parameters are trained ({plan.trainable / plan.with_adapter:.2%})"
    )
    adapter = plan.adapter
    if adapter is None:
        yield "adapter", "none", "default", f"full fine-tuning: {share}"
        yield from _vision_rows(plan)
        return
    yield "adapter", adapter.kind.value, adapter.kind.source, share
    scale = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
    sizes = f"rank {adapter.rank}, alpha {adapter.alpha:g}"
    yield "adapter.scale", sizes, "user", f"scale is {scale}; dropout {adapter.dropout:g}"
    if adapter.start != ZERO:
        held = f"the base keeps the rest; folders hold rank {2 * adapter.rank} over all of it"
        yield "adapter.start", adapter.start, "user", held
    targets = adapter.targets
    # A router is known by its module: its parameter is called "weight".
    parameters = (name.removesuffix(".weight") for name in adapter.parameters)
    names = _last_components((*targets.value, *parameters))
    yield "adapter.targets", names, targets.source, targets.reason
    if adapter.modules_to_save:
        yield "adapter.modules_to_save", ", ".join(adapter.modules_to_save), "user", "trained in full"
    yield from _vision_rows(plan)


def _vision_rows(plan: RunPlan) -> Iterator[Row]:
    if plan.trained:
        yield "model.trained", ", ".join(plan.trained), "user", "the modules that train; the others stay frozen"
    if plan.vision:
        yield "vision", ", ".join(plan.vision), "user", "trained in full, in addition to the language model"
    if adapted := parts_reached(plan.adapter):
        yield "vision", ", ".join(adapted), "user", "adapter.targets reach it"


def _balance_rows(plan: RunPlan) -> Iterator[Row]:
    if plan.balance is not None:
        yield _row("router_aux_loss_coef", plan.balance, f"{plan.balance.value:g}")


_AHEAD = "grpo.ahead: waiting answers, the weights that drew them"


def memory_rows(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    """Yield (part, forecast, remark) for each part that uses memory, and for the total."""
    memory = plan.memory
    yield "weights", size_text(memory.weights), "base, adapter, cast copies"
    if memory.gathered:
        yield "gathered", size_text(memory.gathered), "whole on each rank for a moment: layers, embeddings, head"
    for part in ("gradients", "optimizer", "activations", "logits"):
        yield part, size_text(getattr(memory, part)), ""
    if memory.beside:
        yield "frozen models", size_text(memory.beside), "in addition to the trained model"
    if memory.ahead:
        yield "rollouts ahead", size_text(memory.ahead), _AHEAD
    if memory.holes:
        yield "fragmentation", size_text(memory.holes), "of the C library's allocator, as measured"
    if memory.apart:
        different = "logits, gradients and activations peak at different moments"
        yield "overlap", f"-{size_text(memory.apart)}", different
    if memory.drawing:
        what = f"{memory.drawn} answers are drawn at once, which takes more than an update"
        yield "rollouts", size_text(memory.drawing), what
    if memory.host:
        room = "" if memory.host_available is None else f" of {size_text(memory.host_available)}"
        if memory.host > memory.host_ahead:
            what = f"fp32 weights, gradients, optimizer{room}; not in the total"
            yield "host memory", size_text(memory.host - memory.host_ahead), what
        if memory.host_ahead:
            yield "host memory", size_text(memory.host_ahead), f"{_AHEAD}{room}; not in the total"
    verdict = "fits" if fits(memory) else "more than"
    room = f"{verdict} {size_text(usable(memory.available))} usable of {size_text(memory.available)}"
    yield "total" if plan.parallel.ranks.value == 1 else "total per rank", size_text(memory.total), room


COVERAGE = ("layers", "weights", "adapted or trained", "trained parameters")


def coverage_rows(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    """One row per kind of layer with a text for each of `COVERAGE`; empty for plans of earlier versions."""
    for row in plan.coverage:
        share = f" ({row.reached / row.weights:.0%})" if row.weights and row.reached else ""
        yield row.kind, f"{row.weights:,}", f"{row.reached:,}{share}", f"{row.trained:,}"


def _coverage(plan: RunPlan) -> list[RenderableType]:
    table = _table(*COVERAGE)
    for row in coverage_rows(plan):
        table.add_row(*row)
    return [Text(), table] if plan.coverage else []


def _memory(plan: RunPlan) -> Table:
    table = _table("memory", "forecast", "")
    for row in memory_rows(plan):
        table.add_row(*row)
    if plan.device.value == "cpu":
        table.add_row("not included", "", "Python and its libraries, about 400 MiB, which `mem` in the log includes")
    return table


def _environment(plan: RunPlan) -> Table:
    table = _table("environment", "verdict", "effect")
    for finding in plan.environment:
        shown = "".join(letter if letter.isprintable() else "?" for letter in f"{finding.name}={finding.value}")
        table.add_row(shown, finding.verdict, finding.effect)
    return table


def _row(what: str, choice: Choice, value: str = "") -> Row:
    return what, value or _shown(choice.value), choice.source, choice.reason


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _last_components(names: tuple[str, ...]) -> str:
    """Last components of names without repetitions: q_proj, k_proj, …; plan.json has the full names."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


_COLUMNS = ("GPUs", "engine", "memory each", "fits", "tokens/step", "compute", "traffic", "tokens/s")


def scale_cells(row: ScaleRow) -> tuple[str, ...]:
    """One text per column."""
    fits = "no" if not row.fits else "checkpointed" if row.checkpointing else "yes"
    rates = [f"{float(f'{rate:.3g}'):,.0f}" for rate in (row.slowest, row.fastest)] if row.fits else ["", ""]
    return (
        str(row.gpus),
        row.engine,
        size_text(row.memory),
        fits,
        f"{row.tokens:,}",
        _seconds(row.compute),
        _seconds(row.traffic),
        rates[0] if rates[0] == rates[1] else " to ".join(rates),
    )


def _seconds(value: float) -> str:
    """Format with a suitable unit: a tiny model's step takes microseconds."""
    if value >= 0.1 or value == 0:
        return f"{value:.2f} s" if value else "none"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def scale_table(rows: Sequence[ScaleRow]) -> Table:
    """The table for `Console.show`. tokens/s: from no overlap of traffic with compute to full overlap."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in ("engine", "fits") else "right")
    for row in rows:
        table.add_row(*scale_cells(row), style="" if row.fits else "dim")
    return table
