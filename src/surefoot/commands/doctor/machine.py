"""Checks of the machine without a run: versions, environment variables, threads, disk, hub, and the probes' results.

The table of bad versions lists only what was established. Whether attention computes correctly is measured, not looked
up, because the same fault came and went with versions of cuDNN (PyTorch issues 138649, 196678).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.commands.doctor.findings import NEAR, Finding, caution, fault, ok
from surefoot.planning.disk import DiskForecast
from surefoot.planning.environment import acts_below
from surefoot.planning.measurements import AttentionTrial
from surefoot.planning.plan import DType, EnvironmentFinding
from surefoot.planning.probes.attention import GATE
from surefoot.runs.output_folder import NO_ROOM, disk_words, free_space, least_words
from surefoot.system.hardware import Hardware
from surefoot.system.hub import hub_obstacle, is_signed_in
from surefoot.system.messages import size_text


def environment_lines(
    found: Sequence[EnvironmentFinding], *, compiled: bool = False, advised: Sequence[Finding] = ()
) -> list[Finding]:
    """One finding per known variable that is set. Variables for the user's own choices, such as the number of threads,
    are fine. compiled: whether torch.compile is on. advised: findings whose fix may be to set such a variable; then the
    fix is repeated here."""
    lines = []
    for one in found:
        said = f"{one.name}={one.value}: {one.effect}"
        if one.verdict == "used" and acts_below(one.name, compiled=compiled):
            lines.append(caution("ENV-OVERRIDE", said, f"unset {one.name}", where=one.name))
        elif one.verdict == "used":
            lines.append(ok("ENV-OVERRIDE", said, where=one.name))
        else:
            why = "it has no effect" if one.verdict == "ignored" else "it is overridden"
            to_set = next((line.fix for line in advised if line.fix.startswith(f"set {one.name}=")), "")
            lines.append(caution("ENV-UNREAD", said, to_set or f"unset {one.name}: {why}", where=one.name))
    return lines or [ok("ENV-OVERRIDE", "no relevant variable is set")]


def with_cost(
    lines: Sequence[Finding],
    here: Mapping[DType, float],
    rates_without: Callable[[Sequence[str]], Mapping[DType, float]],
) -> list[Finding]:
    """The same findings; those of variables that act behind the config get their common cost in matrix products. here:
    FLOP/s with them, for the type that the run would use instead of each. rates_without: FLOP/s of the types without
    these variables."""
    names = [line.where for line in lines if line.code == "ENV-OVERRIDE" and line.verdict == "caution"]
    if not names:
        return list(lines)
    there = rates_without(names)
    gains = [there[dtype] / here[dtype] for dtype in here if there.get(dtype)]
    gain = max(gains, default=None)
    return [replace(line, gain=gain) if line.where in names and line.verdict == "caution" else line for line in lines]


def thread_lines(threads: int, cores: int, rates: Mapping[int, float]) -> list[Finding]:
    """threads: the run's thread count. cores: usable by this process. rates: FLOP/s by thread count, if measured."""
    best = max(rates, key=lambda count: rates[count]) if rates else threads
    gain = rates[best] / rates[threads] if threads in rates else None
    fix = f"set OMP_NUM_THREADS={min(best, cores)}"
    if threads > cores:
        return [caution("THREADS", f"{threads} threads compete for {cores} cores", fix, gain=gain)]
    if gain is not None and gain >= NEAR and best < threads:
        return [caution("THREADS", f"{threads} threads are slower than {best}", fix, gain=gain)]
    most, more = max(rates, default=threads), ""
    if threads in rates and most > threads:
        more = f"; with {most}, matrix products alone would be {rates[most] / rates[threads]:.2g} times as fast"
    return [ok("THREADS", f"{threads} on {cores} cores{more}")]


def product_lines(rates: Mapping[DType, float], compute: DType | None, tf32: float | None = None) -> list[Finding]:
    """rates: FLOP/s by type. compute: the run's type, None without one. tf32: FLOP/s, None if not available."""
    named = {**rates, **({} if tf32 is None else {"fp32 by TF32": tf32})}
    shown = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in named.items())
    if compute not in (None, "fp32") and compute in rates and rates[compute] < rates.get("fp32", 0.0):
        return [
            caution(
                "GEMM-SLOW", f"{compute} computes: {shown}", "set precision: fp32", gain=rates["fp32"] / rates[compute]
            )
        ]
    return [ok("GEMM-SLOW", shown)] if rates else []


def kernel_lines(
    trials: Iterable[AttentionTrial], used: Iterable[str], dtype: DType, *, only: bool = False
) -> list[Finding]:
    """Findings about attention kernels.

    used: kernels that the run may use, none without a run.
    dtype: the type they computed in.
    only: no other kernel can compute this model.

    A wrong kernel that is not used is no problem and only mentioned. Eager attention is the textbook formula, which a
    plan accepts on request with the same caution. The only kernel of a model is also just mentioned: the probe's large
    logits may lie beyond the model's caps, and FAST-PATH compares it with fp32 on the run's own examples.
    """
    lines, used = [], set(used)
    for trial in trials:
        if trial.passed:
            worst = max(trial.errors.values(), default=0.0)
            said = f"{1000 * trial.seconds:.2f} ms forward and backward, error {worst:.1g} of {GATE[dtype]:.2g} allowed"
            lines.append(ok("ATTN-KERNEL", said, where=trial.form))
        elif trial.untimed:
            lines.append(ok("ATTN-KERNEL", f"correct; not timed: {trial.untimed}", where=trial.form))
        elif trial.form in used and only:
            lines.append(ok("ATTN-KERNEL", f"the only one for this model; {trial.failure}", where=trial.form))
        elif trial.form in used and trial.form == "eager":
            lines.append(caution("ATTN-KERNEL", trial.failure, "set attention: sdpa", where=trial.form))
        elif trial.form in used:
            lines.append(fault("ATTN-KERNEL", trial.failure, f"set attention.{trial.form}: off", where=trial.form))
        else:
            said = f"not used, so harmless; its check: {trial.failure}"
            lines.append(ok("ATTN-KERNEL", said, where=trial.form))
    return lines


def packed_lines(trials: Iterable[AttentionTrial], form: str, dtype: DType) -> list[Finding]:
    """form: the kernel that separates documents in a packed row, "plain" for padded rows. trials: of such kernels in
    dtype, if the plan measured them."""
    fix = "set data.packing: off"
    lines = kernel_lines([trial for trial in trials if trial.form == form], [form], dtype)
    return [replace(line, where=f"packed rows by {form}", fix=line.fix and fix) for line in lines]


def disk_line(folder: Path, needed: DiskForecast | None) -> Finding:
    """folder: the future run folder, which need not exist. needed: None without a run."""
    place, free = free_space(folder)
    if needed is None:
        return ok("DISK", f"{size_text(free)} free")
    said = f"{size_text(free)} free, {disk_words(needed)}"
    if free < needed.least:
        return fault("DISK", f"{size_text(free)} free; {least_words(needed)}", NO_ROOM, where=str(place))
    if free < needed.total:
        return caution("DISK", said, "make room, or lower checkpoint.keep", where=str(place))
    return ok("DISK", said)


def hub_line(names: Sequence[str] | None = None) -> Finding:
    """Ask the hub one small question. names: what a run reads from it; if empty, the hub is not contacted. None without
    a run."""
    if names is not None and not names:
        return ok("HUB", "not needed: model and data are local folders")
    where = ", ".join(names or ())
    obstacle = hub_obstacle()
    if obstacle:
        return caution("HUB", obstacle, "local folders and cached files still work", where=where)
    said = "it answers; " + ("a token is stored" if is_signed_in() else "no token: public models only")
    return ok("HUB", said, where=where)


Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownBad:
    """A range of bad versions of `library`: from `since` (included) to `until` (excluded). why: completes "torch 2.9.0:
    …".
    grave: whether the run's numbers or the machine's safety are at risk."""

    library: str
    since: str
    until: str
    why: str
    fix: str
    grave: bool = False


ROWS = (
    KnownBad("torch", "0", "2.10", "weights_only=True can corrupt memory (CVE-2026-24747)", "take 2.10 or later", True),
    KnownBad(
        "transformers",
        "4.56",
        "5.3",
        "a field of a model's config can load code from the hub (CVE-2026-4372)",
        "take 5.3 or later",
        True,
    ),
    KnownBad("jinja2", "0", "3.1.6", "templates can leave the sandbox (CVE-2025-27516)", "take 3.1.6 or later", True),
    KnownBad("deepspeed", "0", "0.15.1", "runs code that it is sent (CVE-2024-43497)", "take 0.15.1 or later", True),
    KnownBad(
        "litellm", "1.82.7", "1.82.9", "contains malware (PYSEC-2026-2)", "remove it, and change your secrets", True
    ),
)
_OF_TORCH = ("torchvision", "torchaudio")  # compiled against one version of torch; transformers imports both


def library_findings(hardware: Hardware, accelerators: int, version: Callable[[str], str | None]) -> list[Finding]:
    """accelerators: number of NVIDIA devices. version: returns that of an installed library, None if not installed."""
    found = [*_known_bad(version), *_too_old(version), *_pairs(version), *_broken(version)]
    return [
        *(found or [ok("LIB-KNOWN-BAD", "no installed version has known problems")]),
        *_builds(hardware, accelerators),
        *(_kernels(version) if hardware.kind == "cuda" else ()),
    ]


def installed_version(name: str) -> str | None:
    """Return None if it is not installed; imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> Version:
    """(2, 13, 0) for 2.13.0+cpu; suffixes are ignored."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _known_bad(version: Callable[[str], str | None]) -> Iterator[Finding]:
    for row in ROWS:
        here = version(row.library)
        if here is not None and numbers(row.since) <= numbers(here) < numbers(row.until):
            make = fault if row.grave else caution
            yield make("LIB-KNOWN-BAD", f"{row.library} {here}: {row.why}", row.fix, where=row.library)


def _too_old(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compare with surefoot's requirements: installing another package may have downgraded one."""
    for name, least in minimums().items():
        here = version(name)
        if here is not None and numbers(here) < numbers(least):
            what = f"{name} {here}: surefoot needs {least} or later"
            yield fault("LIB-KNOWN-BAD", what, f"pip install '{name}>={least}'", where=name)


def minimums() -> Mapping[str, str]:
    """Library -> minimum version, for surefoot's requirements without extras; empty if it runs from its source folder
    without being installed."""
    try:
        required = importlib.metadata.requires("surefoot") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pairs = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", one.replace(" ", "")) for one in required if "extra" not in one)
    return {found[1]: found[2] for found in pairs if found}


def _pairs(version: Callable[[str], str | None]) -> Iterator[Finding]:
    torch = version("torch")
    for name in _OF_TORCH:
        if torch is None or version(name) is None:
            continue
        wanted = [re.match(r"torch ?\(?==([\d.]+)", one) for one in importlib.metadata.requires(name) or []]
        for one in filter(None, wanted):
            if numbers(one[1]) != numbers(torch):
                what = f"{name} {version(name)} was compiled for torch {one[1]}, and torch {torch} is installed"
                yield caution("LIB-KNOWN-BAD", what, f"remove {name}, or install the one for torch {torch}", where=name)


def _broken(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """flash-attn is compiled for one torch and one CUDA version; with others it cannot be imported."""
    if version("flash-attn") is None:
        return
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # a native library may fail with any exception
        what = f"flash-attn is installed and cannot be imported: {str(error).splitlines()[0][:120]}"
        yield caution("LIB-KNOWN-BAD", what, "remove it: torch has its own flash attention", where="flash-attn")


# Packages whose kernels a run on a GPU uses: the first four if they are right and fast, the others if it asks for them.
_KERNELS = {
    "liger-kernel": "norms, rotary embeddings, gated activations",
    **dict.fromkeys(("flash-attn", "flash-attn-3", "flash-attn-4"), "packed rows"),
    "bitsandbytes": "nf4, int8, adamw_8bit",
    "torchao": "precision.qat",
}


def _kernels(version: Callable[[str], str | None]) -> Iterator[Finding]:
    here = [f"{name} {found} ({use})" for name, use in _KERNELS.items() if (found := version(name))]
    missing = [f"{name} ({use})" for name, use in _KERNELS.items() if version(name) is None]
    yield ok("LIB-KERNELS", f"{', '.join(here) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _builds(hardware: Hardware, accelerators: int) -> Iterator[Finding]:
    import torch

    if hardware.kind == "cpu" and accelerators and not torch.backends.cuda.is_built():
        what = f"torch {torch.__version__} is a CPU build, but the machine has {accelerators} NVIDIA devices"
        yield caution("LIB-BUILD", what, "install a build of torch for its CUDA version", where="torch")
    elif hardware.kind == "cpu" and accelerators:
        what = f"torch {torch.__version__} does not see any of {accelerators} NVIDIA devices"
        yield caution("LIB-BUILD", what, "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES", where="torch")
    elif hardware.kind == "cuda" and not torch.backends.cuda.is_flash_attention_available():
        what = f"torch {torch.__version__} was built without flash attention"
        yield caution("LIB-BUILD", what, "install an official build of torch", where="torch")
    else:
        yield ok("LIB-BUILD", f"torch {torch.__version__} on {hardware.kind}")
