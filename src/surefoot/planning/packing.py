"""Choose between padded rows and packed rows, and whether the common prompt of a pair is computed once.

Padded rows, grouped by length, are the default. Rows are packed if a form passed the accuracy check on this machine and
there is a gain: less padding, or attention that is clearly faster on documents of the run's lengths. Padding is
counted, not timed, and timings must differ clearly, so that the next start of the same run decides the same.

A reward model can compute the common prefix of a pair once in padded rows (`plan_shared_prompts`); a packed row
contains it twice. The alternative with fewer tokens through the model is chosen. Sharing has no config key: it changes
results by rounding only, and is used only where it was measured to be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning.attention import mask_reason
from surefoot.planning.measurements import PADDED, AttentionTrial, LengthFacts, times_of
from surefoot.planning.notes import Notes
from surefoot.planning.parallel import shared_parts
from surefoot.planning.plan import PLAIN, Choice, DType, RunPlan, Source
from surefoot.system.hardware import Hardware

Form = Literal["matmul", "sdpa", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4"]
_PADDING = 0.05  # minimum fraction of padding; less is not worth a different order of summation
_GAIN = 1.5  # minimum speed-up of attention without padding to save
_LOSS = 0.8  # minimum relative speed of attention with padding to save
_CLEAR = 1.2  # minimum speed-up of another form over the usual one


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
    """Return plain, or a form of packed attention.

    longest: tokens of the longest example.
    trials: trials of the forms of `open_forms` and of PADDED; empty if not measured.
    shares: whether padded rows would compute common prompts once.
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
                "data.packing", f"is on, but no kernel for it passed the accuracy check: {failures}", "turn it off"
            )
        return Choice(PLAIN, f"no kernel passed the accuracy check ({failures})", "measured")
    if not passed:
        wrong = [trial.form for trial in timed if trial.failure]
        return _unmeasured(request, [form for form in forms if form not in wrong])
    best = _clearly_best(passed, _usual(forms, compute))
    times = f"milliseconds of attention {times_of(trials)}" + (f"; not used: {failures}" if failures else "")
    if request == "on":
        return Choice(best.form, f"asked for; {times}", "user")
    return _measured(best, trials, lengths, times, shares=shares)


def without_packing(plan: RunPlan, reason: str, source: Source) -> RunPlan:
    """Return the plan with padded rows."""
    attention = plan.attention
    if attention.deterministic.source == "measured":
        weighed = "it was weighed for packed rows, and rows are padded"
        attention = replace(attention, deterministic=Choice(False, weighed, "default"))
    kernels = replace(plan.kernels, documents=Choice(PLAIN, reason, source))
    return replace(plan, attention=attention, kernels=kernels)


def open_forms(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    compute: DType,
    longest: int,
    *,
    pictures: bool = False,
) -> tuple[Form, ...] | str:
    """Return the forms that could run, the usual one first, or the reason why none can.

    pictures: whether some examples have images.
    """
    if pictures:
        return "examples have images, whose 2-D positions are counted per row"
    if not config.method.packs:
        return f"stage {config.stage} does not pack"
    if hardware.kind not in ("cpu", "cuda"):
        return f"there is no packed attention for {hardware.kind}"
    if config.compile != "off":
        return "torch.compile would recompile for each row"
    if config.attention.implementation not in ("auto", "sdpa"):
        return f"attention: {config.attention.implementation} was asked for"
    if model.without_sdpa:
        return model.without_sdpa
    if model.recurrent:
        return "some layers carry a state along the row, from one document into the next"
    if model.attention_dropout:
        return f"no form has dropout, and the model has attention_dropout {model.attention_dropout:g}"
    if masked := mask_reason(model.window, longest):
        return f"{masked[: -len(' needs one')]} is shorter than a document may be"
    request = config.attention
    switched = any(switch != "auto" for switch in (request.flash, request.mem_efficient, request.cudnn, request.math))
    if request.implementation == "sdpa" or switched:  # each document goes through SDPA, kernels as switched
        return ("sdpa",)
    if hardware.kind == "cpu":
        return ("sdpa", "matmul")
    packages: list[Form] = [form for form in get_args(Form) if form in hardware.packages]
    return ("varlen", *packages) if compute != "fp32" else ("sdpa",)


def _unmeasured(request: str, forms: Sequence[Form]) -> Choice[str]:
    if request == "on":
        return Choice(forms[0], "asked for; nothing was measured", "user")
    return Choice(PLAIN, "padded rows of similar lengths, because nothing was measured", "default")


def _usual(forms: Sequence[Form], compute: DType) -> Form:
    """The usual one of the measured forms. On a CPU in 16 bits whole steps took a tenth longer with sdpa, whose
    backward pass compiles a kernel for each length; timing one length repeatedly does not show that."""
    return "matmul" if "matmul" in forms and compute != "fp32" else forms[0]


def _clearly_best(passed: Sequence[AttentionTrial], usual: str) -> AttentionTrial:
    """The usual form if it passed and none is clearly faster, so that the next start decides the same."""
    best = min(passed, key=lambda trial: trial.seconds)
    plain = next((trial for trial in passed if trial.form == usual), best)
    return best if plain.seconds >= _CLEAR * best.seconds else plain


def _measured(
    best: AttentionTrial, trials: Sequence[AttentionTrial], lengths: LengthFacts | None, times: str, *, shares: bool
) -> Choice[str]:
    padded = next((trial.seconds for trial in trials if trial.form == PADDED), 0.0)
    padding = lengths.padding if lengths else 0.0
    share = f"{padding:.0%} of the tokens of padded rows are padding"
    # Compared by count, not by time: both are fractions of the tokens of padded rows.
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


def plan_shared_prompts(
    config: RunConfig, model: ModelFacts, *, device: str, checkpointing: bool, sharder: str, pictures: bool
) -> Choice[bool]:
    """Choose whether the common prefix of a pair is computed once.

    model: facts with the dropout that it is trained with.
    device: cpu | cuda | mps.
    checkpointing: whether gradient checkpointing is on.
    sharder: the planned engine if it shards weights, else empty.
    pictures: whether some examples have images.
    """
    if pictures:
        return Choice(False, "rows with pictures are computed whole", "default")
    reasons = _obstacles(config, model, device, checkpointing, sharder)
    if (found := next(reasons, None)) is not None:
        return Choice(False, *found)
    saves = "in padded rows, where it saves a fifth of the tokens; measured on CPUs: 1.1 to 1.7 times as fast"
    return Choice(True, saves, "hardware")


def may_share(config: RunConfig, model: ModelFacts, device: str) -> bool:
    """Whether common prompts would be computed once, as far as known before memory and engine are planned; if these are
    left open, the usual choice is assumed."""
    if not config.method.shares_prompts:
        return False
    again = config.gradient_checkpointing not in ("auto", "off")
    engine, stage = config.parallel.engine, config.parallel.zero_stage
    sharder = engine if "weights" in shared_parts(engine, stage) else ""
    return next(_obstacles(config, model, device, again, sharder), None) is None


def _obstacles(
    config: RunConfig, model: ModelFacts, device: str, checkpointing: bool, sharder: str
) -> Iterator[tuple[str, Source]]:
    if device != "cpu":
        yield f"whether it is faster was not measured on {device}", "hardware"
    if model.structure is None:
        yield "of this family it is not known that a cache of keys and values changes nothing", "family"
    if model.window is not None:
        yield f"layers with a window of {model.window} tokens drop keys of the prompt", "family"
    if model.rotary_switch is not None:
        yield "longer inputs use another rotary table", "family"
    if _drops(config, model):
        yield "dropout would be drawn once for both answers", "user"
    if config.bos.scale != 1:
        yield "a scaled BOS needs whole rows", "user"
    if checkpointing:
        yield "gradient checkpointing keeps no keys and values", "hardware"
    if config.compile != "off":
        yield "the decoder is compiled for whole rows", "user"
    if sharder:
        yield f"{sharder} gathers weights for one forward pass at a time", "user"


def _drops(config: RunConfig, model: ModelFacts) -> bool:
    own = bool(model.dropouts) or model.attention_dropout > 0
    return own or (config.adapter is not None and config.adapter.dropout > 0)
