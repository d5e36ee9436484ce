"""Choose the attention implementation, the SDPA kernels that torch may dispatch to, and the kernel the run must use.
This is for padded rows; attention of packed rows is chosen in `planning.packing`.

The default is SDPA with every kernel that suits the run except cuDNN's: its backward pass has returned NaN for masks,
lengths of 64 modulo 128 and large logits (PyTorch issue 196678), and it builds kernels for each new shape, which took
up to half a second on an H200. The default is replaced only by a clearly faster form that passed the accuracy check; by
cuDNN's only where all examples have one length, and neither a window nor a vision tower gives it masks.

Which kernel can run is decided by rules that need no torch; tests compare them with torch's own dispatch. CPU: flash
(any dtype, with or without mask, no dropout) and math. CUDA, from torch's SDPA source: flash fp16 and bf16 from
capability 8.0, head dims up to 256, no mask; mem_efficient any dtype, bf16 from 8.0; cuDNN like flash, but also with a
mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefoot.config.schema import AttentionConfig
from surefoot.families.family import OddHeads
from surefoot.planning.deterministic import kernel_of
from surefoot.planning.measurements import AttentionTrial, times_of
from surefoot.planning.notes import Notes
from surefoot.planning.plan import NONE, AttentionPlan, Choice, DType, SdpaKernel
from surefoot.system.hardware import Hardware

# In order of preference, as in torch, except that torch puts cuDNN first on Hopper and Blackwell only.
ORDER: tuple[SdpaKernel, ...] = ("cudnn", "flash", "mem_efficient", "math")
_FLASH_HEAD_DIM = 256
_SIXTEEN_BITS = "computes in fp16 and bf16 only, and this run computes in fp32"


def mask_reason(window: int | None, longest: int, both_ways: bool = False) -> str:
    """Return why SDPA needs a mask instead of is_causal; empty if it does not.

    window: size of the sliding window in tokens.
    longest: length of the longest example in tokens.
    both_ways: whether some examples have images whose tokens attend to each other in both directions.
    """
    if both_ways:
        return "the tokens of a picture, which see each other both ways, need one"
    if window is None or longest < window:
        return ""
    return f"a window of {window} tokens over examples of up to {longest} needs one"


def obstacle(
    kernel: SdpaKernel,
    hardware: Hardware,
    compute: DType,
    head_dim: int,
    dropout: float,
    masked: str = "",
    odd_heads: OddHeads = "",
) -> str:
    """Return why this kernel cannot run, as the end of a sentence that begins with its name; empty if it can.

    masked: the run's `mask_reason`.
    """
    if kernel == "math":
        return ""
    if odd_heads == "values" and kernel != "mem_efficient":
        return "takes heads of one width, and those of the values are narrower here"
    if odd_heads == "keys":
        return "takes a head of keys for each head of queries, and here all share one"
    if hardware.kind != "cuda":
        if kernel != "flash" or hardware.kind == "mps":
            return "exists only on NVIDIA GPUs"
        return f"has no dropout on CPU, and the model has attention_dropout {dropout:g}" if dropout else ""
    if kernel == "flash" and masked:
        return f"takes no mask on a GPU, and {masked}"
    capability = hardware.capability or (0, 0)
    if kernel == "mem_efficient":
        return "computes bf16 only from capability 8.0 on" if compute == "bf16" and capability < (8, 0) else ""
    if compute == "fp32":
        return _SIXTEEN_BITS
    if capability < (8, 0):
        return f"needs compute capability 8.0, and {hardware.name} has {capability[0]}.{capability[1]}"
    return f"supports head_dim up to {_FLASH_HEAD_DIM}, not {head_dim}" if head_dim > _FLASH_HEAD_DIM else ""


def flash_attention_2_obstacles(hardware: Hardware, compute: DType) -> list[str]:
    """Return the reasons why the flash-attn package cannot run here, each as the end of a sentence."""
    if hardware.kind != "cuda":
        return ["needs an NVIDIA GPU"]
    found = []
    if (hardware.capability or (0, 0)) < (8, 0):
        found.append(f"needs compute capability 8.0, which {hardware.name} lacks")
    if compute == "fp32":
        found.append(_SIXTEEN_BITS)
    if hardware.flash_attention_2 is False:
        found.append("needs the flash-attn package, which is not installed")
    return found


# Minimum speed-up of a form over the default: it makes a step that spends half of its time on attention faster by a
# fifth. A smaller lead could be reversed at the next start of the same run, except on a GPU, whose clock counts the
# kernels alone.
_GAIN, _GAIN_ON_GPU = 1.5, 1.2
_KEEP_SCORES = ("math", "eager")  # of all pairs of tokens, for the backward pass
EAGER_ROUNDS = "attention: eager rounds"  # start of a caution that doctor reports elsewhere
_FIRST = "the first of them that torch can use here"


def plan_attention(
    request: AttentionConfig,
    *,
    hardware: Hardware,
    compute: DType,
    head_dim: int,
    dropout: float,
    trials: Sequence[AttentionTrial],
    notes: Notes,
    masked: str = "",
    without_sdpa: str = "",
    attends: bool = True,
    odd_heads: OddHeads = "",
    pictures: bool = False,
    uniform: bool = False,
) -> AttentionPlan:
    """Choose the attention implementation, the SDPA kernels that torch may dispatch to, and the expected one.

    compute: dtype of queries and keys.
    dropout: the model's attention dropout.
    trials: measurements; empty if there are none. Those of deterministic forms decide nothing here.
    masked: why SDPA gets a mask (`mask_reason`).
    without_sdpa: why the model does not support SDPA; empty if it does.
    attends: whether any layer has attention; if not, `without_sdpa` says so.
    pictures: whether a vision tower runs with the same kernel. It attends over far more patches than a text has tokens,
        so what keeps all scores is not taken for being faster at the text's length.
    uniform: whether all examples have the same length.
    """
    if not attends:
        plan = _eager_only(without_sdpa, request.implementation == "sdpa" or bool(_switches(request)), notes)
        return replace(plan, expected=Choice(NONE, without_sdpa, "family"))
    obstacles: dict[SdpaKernel, str] = {
        kernel: obstacle(kernel, hardware, compute, head_dim, dropout, masked, odd_heads) for kernel in ORDER
    }
    switches = _switches(request)
    if request.implementation in ("eager", "flash_attention_2"):
        return _not_sdpa(request.implementation, hardware, compute, without_sdpa, notes)
    if without_sdpa:
        return _eager_only(without_sdpa, request.implementation == "sdpa" or bool(switches), notes)
    if switches:
        return _by_switches(switches, obstacles, trials, notes)
    requested = request.implementation == "sdpa"
    trials = [trial for trial in trials if kernel_of(trial.form) == trial.form]
    considered = [trial for trial in trials if not (requested and trial.form == "eager")]
    if pictures and not any(trial.failure for trial in trials if trial.form not in _KEEP_SCORES):
        considered = [trial for trial in considered if trial.form not in _KEEP_SCORES]
    if pictures or masked or not uniform or request.deterministic == "on":
        considered = [trial for trial in considered if trial.form != "cudnn"]
    gain = _GAIN_ON_GPU if hardware.kind == "cuda" else _GAIN
    plan = _default(requested, obstacles, masked, considered, gain)
    winner = _winner(plan.expected.value, considered, gain, notes)
    return plan if winner is None else _measured(winner, plan, considered)


def _switches(request: AttentionConfig) -> dict[SdpaKernel, bool]:
    """Kernels that the user switched on or off."""
    requested: dict[SdpaKernel, str] = {
        "cudnn": request.cudnn,
        "flash": request.flash,
        "mem_efficient": request.mem_efficient,
        "math": request.math,
    }
    return {kernel: switch == "on" for kernel, switch in requested.items() if switch != "auto"}


def _not_sdpa(name: str, hardware: Hardware, compute: DType, without_sdpa: str, notes: Notes) -> AttentionPlan:
    if name == "eager" and compute != "fp32" and not without_sdpa:
        notes.caution(
            f"{EAGER_ROUNDS} all scores to {compute} before the softmax; SDPA keeps them in fp32: set attention: sdpa"
        )
    if name == "flash_attention_2":
        for reason in flash_attention_2_obstacles(hardware, compute):
            fix = "use attention.implementation: sdpa, whose flash kernel is the same algorithm"
            notes.refuse("attention.implementation", f"flash_attention_2 {reason}", fix)
        if hardware.preset:
            notes.caution("flash_attention_2 needs the flash-attn package; it is unknown whether that machine has it")
    return _outside_sdpa(Choice(name, "asked for", "user"))


def _outside_sdpa(implementation: Choice[str]) -> AttentionPlan:
    """An implementation other than SDPA, without kernels to choose from."""
    none: Choice[tuple[SdpaKernel, ...]] = Choice((), "only SDPA has kernels to choose from", "default")
    return AttentionPlan(implementation, none, Choice(implementation.value, "the implementation itself", "default"))


def _eager_only(reason: str, requested: bool, notes: Notes) -> AttentionPlan:
    """requested: whether the user requested SDPA or one of its kernels."""
    if requested:
        notes.refuse(
            "attention", reason, "use attention.implementation: eager, or flash_attention_2 on a GPU that has it"
        )
    return _outside_sdpa(Choice("eager", reason, "family"))


def _by_switches(
    switches: Mapping[SdpaKernel, bool],
    obstacles: Mapping[SdpaKernel, str],
    trials: Sequence[AttentionTrial],
    notes: Notes,
) -> AttentionPlan:
    """Plan with the kernels that the user switched. Kernels on auto keep their default; timings are ignored."""
    failures = {trial.form: trial.failure for trial in trials if trial.failure}
    for kernel, on in switches.items():
        why = obstacles[kernel] or (
            f"failed the accuracy check on this machine: {failures[kernel]}" if kernel in failures else ""
        )
        if on and why:
            notes.refuse(f"attention.{kernel}", f"is on, but the {kernel} kernel {why}", "leave it out")
    left: list[SdpaKernel] = [kernel for kernel in ORDER if switches.get(kernel, True)]
    against = {kernel: obstacles[kernel] for kernel in left}
    if "cudnn" not in switches:
        against["cudnn"] = obstacles["cudnn"] or "runs only when it is switched on"
    kernels: tuple[SdpaKernel, ...] = tuple(kernel for kernel in left if not against[kernel])
    if not kernels:
        if left:  # with every kernel off the config is refused as contradictory
            reasons = "; ".join(f"{kernel} {why}" for kernel, why in against.items())
            notes.refuse("attention", f"no SDPA kernel is left: {reasons}", "leave math on")
        kernels = ("math",)
    named = ", ".join(f"{kernel} {'on' if on else 'off'}" for kernel, on in switches.items())
    return AttentionPlan(
        implementation=Choice("sdpa", "its kernels were switched", "user"),
        kernels=Choice(kernels, f"asked for: {named}", "user"),
        expected=Choice(kernels[0], _FIRST, "default"),
    )


def _default(
    requested: bool, obstacles: Mapping[SdpaKernel, str], masked: str, trials: Sequence[AttentionTrial], gain: float
) -> AttentionPlan:
    kernels: tuple[SdpaKernel, ...] = tuple(kernel for kernel in ORDER if kernel != "cudnn" and not obstacles[kernel])
    notable = [f"flash {obstacles['flash']}"] if obstacles["flash"] else []
    if masked and not obstacles["flash"]:
        notable.append(f"with a mask: {masked}")
    if not obstacles["cudnn"]:
        notable.append("cuDNN is for examples of one length without masks, measured to be faster (PyTorch 196678)")
    expected = Choice(kernels[0], _FIRST, "default")
    usual = next((trial for trial in trials if trial.form == kernels[0]), None)
    if usual and usual.passed:
        expected = Choice(kernels[0], f"nothing was {gain:g} times as fast: {_times(trials)}", "measured")
    elif usual and usual.untimed:
        expected = Choice(kernels[0], f"{_FIRST}; how fast it is, is not known: {usual.untimed}", "default")
    return AttentionPlan(
        implementation=Choice("sdpa", "asked for", "user")
        if requested
        else Choice("sdpa", "fused attention", "default"),
        kernels=Choice(kernels, "; ".join(notable) or "all that are supported here", "default"),
        expected=expected,
    )


def _winner(default: str, trials: Sequence[AttentionTrial], gain: float, notes: Notes) -> AttentionTrial | None:
    """Return the trial that replaces the default kernel: clearly faster, or the fastest if the default failed its
    check."""
    usual = next((trial for trial in trials if trial.form == default), None)
    if usual is None:
        return None
    if all(trial.failure for trial in trials):
        failures = "; ".join(f"{trial.form}: {trial.failure}" for trial in trials)
        what = f"no kernel passed the accuracy check on this machine ({failures})"
        notes.refuse("attention", what, "check the installation of torch, or name one: attention: eager")
        return None
    if usual.untimed:  # without its time nothing can be called faster
        return None
    right = [trial for trial in trials if not trial.failure]
    fastest = min([trial for trial in right if trial.passed] or right, key=lambda trial: trial.seconds)
    if usual.failure:
        notes.caution(f"attention: {default} failed the accuracy check here ({usual.failure}); {fastest.form} is used")
        return fastest
    return fastest if usual.seconds >= gain * fastest.seconds else None


def _measured(winner: AttentionTrial, default: AttentionPlan, trials: Sequence[AttentionTrial]) -> AttentionPlan:
    reason = _times(trials)
    if winner.form == "eager":
        return _outside_sdpa(Choice("eager", reason, "measured"))
    kernels: tuple[SdpaKernel, ...] = tuple(kernel for kernel in ORDER if kernel in (winner.form, "math"))
    return AttentionPlan(
        implementation=default.implementation,
        kernels=Choice(kernels, f"{winner.form} is fastest, math is the fallback: {reason}", "measured"),
        expected=Choice(winner.form, "the fastest that passed the accuracy check", "measured"),
    )


def _times(trials: Sequence[AttentionTrial]) -> str:
    if not any(trial.passed for trial in trials):
        return "; ".join(f"{trial.form}: {trial.trouble}" for trial in trials)
    return f"milliseconds {times_of(trials)}"
