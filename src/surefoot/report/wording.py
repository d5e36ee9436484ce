"""Format numbers with units and events as sentences, identically for the screen, run.log and the last lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from surefoot.report.pace import Timing, clock_text
from surefoot.system.messages import size_text
from surefoot.training.report import EvalReport, StepProfile, StepReport, example_list

_SHOWN = (  # metrics of a step, most important first
    ("reward_accuracy", "accuracy", ".1%"),
    ("reward_margin", "margin", ".3g"),
    ("reward", "reward", ".4g"),
    ("kl", "kl", ".3g"),
    ("aux_loss", "aux", ".3f"),
)


_DETAIL = 6  # from this priority on, a field is left out where a line has no width to fit


@dataclass(frozen=True)
class Field:
    """A part of a line.

    spare: priority for leaving it out on a narrow terminal: the highest number goes first, the last among equals; 0 is
        always shown.
    joined: whether it belongs to the field before it.
    """

    text: str
    spare: int = 0
    joined: bool = False


def fitted(fields: Sequence[Field], width: int | None = None) -> str:
    """Join the fields that fit. width: in columns, None for no limit."""
    kept = list(fields)
    while True:
        line = "".join(f"{' ' if one.joined else ' · '}{one.text}" for one in kept).removeprefix(" · ")
        last = max(range(len(kept)), key=lambda place: (kept[place].spare, place), default=None)
        if width is None or cell_len(line) <= width or last is None or not kept[last].spare:
            return line
        del kept[last]


def shown_fields(fields: Sequence[Field], width: int | None) -> str:
    """The line for the screen. width: in columns; None for a file or a pipe, which gets the same fields in every
    line."""
    return fitted(fields, width) if width is not None else fitted([one for one in fields if one.spare < _DETAIL])


def step_line(
    report: StepReport, total_steps: int, timing: Timing, state: str, last_eval: EvalReport | None
) -> list[Field]:
    """The fields of a step's line. state: the guard's state."""
    fields = [Field(f"step {report.step}/{total_steps}"), *step_numbers(report, timing, last_eval)]
    if timing.remaining is not None:
        fields.append(Field(f"eta {eta_text(timing.remaining)}", 1))
    watched = "traced" if report.traced else "clocked" if report.profile else ""
    return [*fields, Field(state), *([Field(f"({watched})", joined=True)] if watched else [])]


def step_numbers(report: StepReport, timing: Timing, last_eval: EvalReport | None) -> list[Field]:
    """The measurements of a step, most important first."""
    evaluation = (
        [] if last_eval is None else [Field(f"(eval {_headline(last_eval)} @ {last_eval.step})", 6, joined=True)]
    )
    unmeasured = report.decision == "held" and report.non_finite is None and report.loss is None
    loss = [] if unmeasured else [Field(f"loss {number(report.loss)}")]
    metrics = _shown(report.metrics)
    if "reward" in report.metrics:  # what a stage with rollouts is about; its loss is near 0 whatever is learned
        fields = [*metrics[:1], *evaluation, *loss, *metrics[1:]]
    else:
        fields = [*loss, *(evaluation if loss else []), *metrics]
    fields += [
        Field(f"lr {report.lr:.3g}", 5),
        *([] if unmeasured else [Field(f"grad {number(report.grad_norm, 3)}")]),
    ]
    if timing.throughput is not None:
        fields.append(Field(f"{timing.throughput:,.0f} tok/s", 3))
        if timing.supervised_throughput is not None:
            fields.append(Field(f"({timing.supervised_throughput:,.0f} supervised)", 8, joined=True))
    if timing.peak_memory is not None:
        fields.append(Field(f"mem {size_text(timing.peak_memory)}", 7))
    return fields


def guard_state(report: StepReport, consecutive: int, skipped: int) -> str:
    """The guard's state in words. consecutive, skipped: non-finite steps in a row, and in the whole run."""
    if report.decision == "non_finite":
        return f"skipped {consecutive}"
    if report.decision == "scaler":
        return "skipped: scaler"
    if report.decision == "held":
        return f"held: {report.held}"
    return f"ok ({skipped} skipped)" if skipped else "ok"


def skip_sentence(report: StepReport, consecutive: int) -> str:
    what = {"loss": "loss", "moment": f"optimizer's {report.moment}"}.get(report.non_finite or "", "gradient")
    return (
        f"step {report.step}: {what} not finite; weights and moments unchanged; {consecutive} in a row; "
        f"examples {example_list(report.examples)}"
    )


def worse_than_guessing(loss: float, guess: float) -> str:
    return (
        f"caution: the first loss, {number(loss)}, is above {number(guess)}, that of a model which gives every token "
        "the same probability: such a base usually has weights of another model or another tokenizer"
    )


def spike_sentence(report: StepReport) -> str:
    return (
        f"step {report.step}: gradient norm {report.grad_norm:.4g} is far above those of earlier steps; "
        f"clipped to {report.spike:.4g}; examples {example_list(report.examples)}"
    )


def profile_line(step: int, profile: StepProfile) -> str:
    """Mean times per micro-batch, in the format of train_sft.py."""
    parts = [f"[profile] forward {profile.forward_ms:.1f}ms", f"backward {profile.backward_ms:.1f}ms"]
    parts.append("(no optimizer.step)")
    if profile.tokens_per_second is not None:
        parts.append(f"tps {profile.tokens_per_second:.0f}")
    passes = "1 micro-batch" if profile.micro_batches == 1 else f"mean of {profile.micro_batches} micro-batches"
    return "  ".join([*parts, f"step {step}, {passes}"])


def eval_fields(report: EvalReport, improved: bool) -> list[Field]:
    counted = f"{report.weight:,} {report.unit.replace('_', ' ')}"
    known = {name for name, _, _ in _SHOWN}
    return [
        Field(f"evaluation after step {report.step}: {_headline(report, 'loss ')}"),
        *([] if report.perplexity is None else [Field(f"perplexity {report.perplexity:.4g}", 4)]),
        *([] if report.accuracy is None else [Field(f"accuracy {report.accuracy:.1%}", 1)]),
        Field(counted if report.accuracy is None else f"of {counted}", 5, joined=report.accuracy is not None),
        *_shown({name: one for name, one in report.metrics.items() if name != "reward" or not _is_of_rewards(report)}),
        *(
            Field(f"{name.replace('_', ' ')} {value:.4g}", 2)
            for name, value in report.metrics.items()
            if name not in known
        ),
        Field(f"{report.seconds:.1f} s", 3),
        *([Field("best so far", 2)] if improved else []),
    ]


def _headline(report: EvalReport, said: str = "") -> str:
    """What an evaluation is about: its loss, or the mean reward where the loss is only minus that. said: before a
    loss."""
    return f"reward {report.metrics['reward']:.4g}" if _is_of_rewards(report) else f"{said}{report.loss:.4g}"


def _is_of_rewards(report: EvalReport) -> bool:
    return report.unit == "response_tokens" and "reward" in report.metrics


def _shown(metrics: Mapping[str, float]) -> list[Field]:
    return [Field(f"{said} {metrics[name]:{form}}", 2) for name, said, form in _SHOWN if name in metrics]


def eval_sentence(report: EvalReport, improved: bool) -> str:
    return fitted(eval_fields(report, improved))


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def number(value: float | None, digits: int = 4) -> str:
    """Format with significant digits, keeping zeros: 1.200, not 1.2."""
    return "not finite" if value is None else f"{value:#.{digits}g}".removesuffix(".")


def eta_text(seconds: float) -> str:
    """MM:SS below an hour, H:MM:SS above."""
    return clock_text(seconds) if seconds >= 3600 else f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def duration_text(seconds: float) -> str:
    """`41 s`, `12 min 05 s`, `3 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sample_text(step: int, prompt: str, answer: str) -> str:
    """A generated answer under its prompt, indented; long texts are marked as cut."""
    return f"sample at step {step}\n  prompt: {_indented(prompt)}\n  answer: {_indented(answer)}"


def _indented(text: str) -> str:
    return shortened(text, 400).replace("\n", "\n          ")


def shortened(text: str, head: int, tail: int = 0) -> str:
    """The first `head` and last `tail` characters of a long text, and how many are left out between them."""
    left_out = len(text) - head - tail
    if left_out <= 0:
        return text
    return f"{text[:head]} … ({left_out:,} more characters){f' … {text[-tail:]}' if tail else ''}"
