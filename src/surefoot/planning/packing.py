"""Whether examples go through the model as one packed row, and whether a pair's common prompt is computed once.

Padded rows, grouped by length, are the default. Rows are packed where a form passed the accuracy check on this machine
and there is something to gain: less padding, or attention that is clearly faster on documents of the run's lengths. How
much is padding is counted, not timed, and what is timed has to differ clearly, so that the next start of the same run
finds the same.

A reward model can compute what both answers of a pair begin with once, in padded rows (`plan_shared_prompts`); a packed
row holds it twice. Of the two, the one that sends fewer tokens through the model is taken, by count. Sharing has no
key: it changes no number but by rounding, and is used only where it was measured to be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.attention import mask_reason
from surefoot.planning.measurements import PADDED, AttentionTrial, LengthFacts, times_of
from surefoot.planning.notes import Notes
from surefoot.planning.plan import PLAIN, Choice, DType, RunPlan, Source
from surefoot.system.hardware import Hardware

Form = Literal["matmul", "sdpa", "varlen"]
_PADDING = 0.05  # of all tokens of padded micro-batches; less is not worth another order of sums
_GAIN = 1.5  # how many times as fast attention must be where there is no padding to save
_LOSS = 0.8  # how many times as fast it must be where there is
_CLEAR = 1.2  # how many times as fast another form must be than the usual one


def plan_packing(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    *,
    compute: DType,
    longest: int,
    lengths: LengthFacts | None,
    trials: Sequence[AttentionTrial],
    notes: Notes,
    shares: bool = False,
) -> Choice[str]:
    """plain, or a form.

    longest: tokens of the longest example.
    trials: of the forms that `open_forms` names and of PADDED; empty where nobody measured.
    shares: padded rows would compute prompts once.
    """
    request = config.data.packing
    if request == "off":
        return Choice(PLAIN, "asked for", "user")
    forms = open_forms(config, model, hardware, compute, longest, pictures=bool(lengths and lengths.pictures))
    if isinstance(forms, str):
        if request == "on":
            notes.refuse("data.packing", f"is on, but {forms}", "leave it out")
        return Choice(PLAIN, forms, "default")
    timed = [trial for trial in trials if trial.form in forms]
    passed = [trial for trial in timed if trial.passed]
    failures = "; ".join(f"{trial.form}: {trial.failure}" for trial in timed if trial.failure)
    if timed and all(trial.failure for trial in timed):
        if request == "on":
            notes.refuse(
                "data.packing", f"is on, but no form of it passed the accuracy check: {failures}", "turn it off"
            )
        return Choice(PLAIN, f"no form passed the accuracy check ({failures})", "measured")
    if not passed:
        wrong = [trial.form for trial in timed if trial.failure]
        return _unmeasured(request, [form for form in forms if form not in wrong])
    best = _clearly_best(passed, _usual(forms, compute))
    times = _times(trials)
    if request == "on":
        return Choice(best.form, f"asked for; {times}", "user")
    return _measured(best, trials, lengths, times, shares=shares)


def without_packing(plan: RunPlan, reason: str, source: Source) -> RunPlan:
    """The plan with padded rows."""
    return replace(plan, kernels=replace(plan.kernels, documents=Choice(PLAIN, reason, source)))


def open_forms(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    compute: DType,
    longest: int,
    *,
    pictures: bool = False,
) -> tuple[Form, ...] | str:
    """The forms that could run, the first of them the usual one, or why none can.

    pictures: some examples have pictures.
    """
    if pictures:
        return "examples have pictures, whose places in height and width are counted in rows of their own"
    if not config.method.packs:
        return f"stage {config.stage} does not pack"
    if hardware.kind not in ("cpu", "cuda"):
        return f"there is no form of it for {hardware.kind}"
    if config.compile != "off":
        return "torch.compile would compile anew for each row"
    if config.attention.implementation not in ("auto", "sdpa"):
        return f"attention: {config.attention.implementation} was asked for"
    if model.without_sdpa:
        return model.without_sdpa
    if model.recurrent:
        return "some layers carry a state along the row, and so from one document into the next"
    if model.attention_dropout:
        return f"no form has dropout, and the model has attention_dropout {model.attention_dropout:g}"
    if masked := mask_reason(model.window, longest):
        return f"{masked[: -len(' needs one')]} is shorter than a document may be"
    request = config.attention
    switched = any(switch != "auto" for switch in (request.flash, request.mem_efficient, request.cudnn, request.math))
    if request.implementation == "sdpa" or switched:  # then SDPA, and its kernels as switched, take each document
        return ("sdpa",)
    if hardware.kind == "cpu":
        return ("sdpa", "matmul")
    return ("varlen",) if compute != "fp32" else ("sdpa",)


def _unmeasured(request: str, forms: Sequence[Form]) -> Choice[str]:
    if request == "on":
        return Choice(forms[0], "asked for; nothing was measured", "user")
    return Choice(PLAIN, "padded rows of like lengths, as nothing was measured", "default")


def _usual(forms: Sequence[Form], compute: DType) -> Form:
    """Of forms that were measured. On a CPU in 16 bits whole steps took a tenth longer with sdpa, whose backward pass
    makes a kernel for each length; timing one length again and again does not show that."""
    return "matmul" if "matmul" in forms and compute != "fp32" else forms[0]


def _clearly_best(passed: Sequence[AttentionTrial], usual: str) -> AttentionTrial:
    """The usual form where it passed and none is clearly faster, so that the next start finds the same."""
    best = min(passed, key=lambda trial: trial.seconds)
    plain = next((trial for trial in passed if trial.form == usual), best)
    return best if plain.seconds >= _CLEAR * best.seconds else plain


def _measured(
    best: AttentionTrial, trials: Sequence[AttentionTrial], lengths: LengthFacts | None, times: str, *, shares: bool
) -> Choice[str]:
    padded = next((trial.seconds for trial in trials if trial.form == PADDED), 0.0)
    padding = lengths.padding if lengths else 0.0
    share = f"{padding:.0%} of the tokens of padded rows are padding"
    # By count, not by time: both are shares of the tokens of padded rows, and the smaller one wins.
    if shares and lengths and lengths.shared <= 1 - padding:
        left = f"{lengths.shared:.0%} of the tokens of padded rows, packing {1 - padding:.0%}"
        return Choice(PLAIN, f"prompts that are computed once leave {left}", "measured")
    failed = next((trial.trouble for trial in trials if trial.form == PADDED), "")
    if failed:
        return Choice(PLAIN, f"padded rows, to compare with, {failed}; {times}", "measured")
    gain = padded / best.seconds
    if gain >= _GAIN or (padding >= _PADDING and gain >= _LOSS):
        return Choice(best.form, f"{share}; {times}", "measured")
    return Choice(PLAIN, f"little to gain: {share}; {times}", "measured")


def _times(trials: Sequence[AttentionTrial]) -> str:
    return f"milliseconds of attention {times_of(trials)}"


def plan_shared_prompts(
    config: RunConfig, model: ModelFacts, *, device: str, checkpointing: bool, engine: str
) -> Choice[bool]:
    """Whether what both answers of a pair begin with is computed once.

    model: with the dropout that it trains with.
    device: cpu | cuda | mps.
    checkpointing: activations are computed again.
    engine: as planned.
    """
    reasons = _obstacles(config, model, device, checkpointing, engine)
    if (found := next(reasons, None)) is not None:
        return Choice(False, *found)
    saves = "in padded rows, where it saves a fifth of the tokens; measured on CPUs: 1.1 to 1.7 times as fast"
    return Choice(True, saves, "hardware")


def may_share(config: RunConfig, model: ModelFacts, device: str) -> bool:
    """Whether prompts would be computed once, as far as it is known before memory and engine are planned: both are
    taken to be as is usual where they are left open."""
    if not config.method.shares_prompts:
        return False
    again = config.gradient_checkpointing not in ("auto", "off")
    engine = "single" if config.parallel.engine == "auto" else config.parallel.engine
    return next(_obstacles(config, model, device, again, engine), None) is None


def _obstacles(
    config: RunConfig, model: ModelFacts, device: str, checkpointing: bool, engine: str
) -> Iterator[tuple[str, Source]]:
    if device != "cpu":
        yield f"whether it is faster was not measured on {device}", "hardware"
    if model.structure is None:
        yield "of this family it is not known that a cache of keys and values changes nothing", "family"
    if model.window is not None:
        yield f"layers with a window of {model.window} tokens drop keys of the prompt", "family"
    if model.rotary_switch is not None:
        yield "positions are turned by another table in longer inputs", "family"
    if _drops(config, model):
        yield "dropout would be drawn once for both answers", "user"
    if config.bos.scale != 1:
        yield "a scaled BOS is looked at in whole rows", "user"
    if checkpointing:
        yield "gradient checkpointing keeps no keys and values", "hardware"
    if config.compile != "off":
        yield "the compiled decoder is that of whole rows", "user"
    if engine not in ("single", "ddp"):
        yield f"{engine} gathers weights for one forward pass at a time", "user"


def _drops(config: RunConfig, model: ModelFacts) -> bool:
    own = bool(model.dropouts) or model.attention_dropout > 0
    return own or (config.adapter is not None and config.adapter.dropout > 0)
