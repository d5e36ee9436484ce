"""The machine without any run: versions, environment variables, threads, disk, hub, and what the probes say.

A row of versions says no more than was found out; whether attention computes right is measured, not looked up, because
the same fault came and went with versions of cuDNN (PyTorch issues 138649, 196678).
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
    """One for every variable that surefoot knows of and that is set. Those that the user's own choices are made with,
    such as the number of threads, are as they should be. compiled: torch.compile is on. advised: lines whose fix may be
    to set such a variable; then it is the fix here, too."""
    lines = []
    for one in found:
        said = f"{one.name}={one.value}: {one.effect}"
        if one.verdict == "used" and acts_below(one.name, compiled=compiled):
            lines.append(caution("ENV-OVERRIDE", said, f"unset {one.name}", where=one.name))
        elif one.verdict == "used":
            lines.append(ok("ENV-OVERRIDE", said, where=one.name))
        else:
            why = "it decides nothing" if one.verdict == "ignored" else "it is not followed"
            to_set = next((line.fix for line in advised if line.fix.startswith(f"set {one.name}=")), "")
            lines.append(caution("ENV-UNREAD", said, to_set or f"unset {one.name}: {why}", where=one.name))
    return lines or [ok("ENV-OVERRIDE", "none of the names that matter is set")]


def with_cost(
    lines: Sequence[Finding],
    here: Mapping[DType, float],
    rates_without: Callable[[Sequence[str]], Mapping[DType, float]],
) -> list[Finding]:
    """The same lines; those of variables that act below the config with what they cost together in matrix products.
    here: FLOP/s with them, of what the run would compute in instead of each type. rates_without: FLOP/s of the types
    without these names."""
    names = [line.where for line in lines if line.code == "ENV-OVERRIDE" and line.verdict == "caution"]
    if not names:
        return list(lines)
    there = rates_without(names)
    gains = [there[dtype] / here[dtype] for dtype in here if there.get(dtype)]
    gain = max(gains, default=None)
    return [replace(line, gain=gain) if line.where in names and line.verdict == "caution" else line for line in lines]


def thread_lines(threads: int, cores: int, rates: Mapping[int, float]) -> list[Finding]:
    """threads: that will compute. cores: that this process may run on. rates: FLOP/s by count, where measured."""
    best = max(rates, key=lambda count: rates[count]) if rates else threads
    gain = rates[best] / rates[threads] if threads in rates else None
    fix = f"set OMP_NUM_THREADS={min(best, cores)}"
    if threads > cores:
        return [caution("THREADS", f"{threads} threads on {cores} cores wait for each other", fix, gain=gain)]
    if gain is not None and gain >= NEAR and best < threads:
        return [caution("THREADS", f"{threads} threads multiply slower than {best}", fix, gain=gain)]
    most, more = max(rates, default=threads), ""
    if threads in rates and most > threads:
        more = f"; {most} multiply {rates[most] / rates[threads]:.2g} times as fast"
    return [ok("THREADS", f"{threads} on {cores} cores{more}")]


def product_lines(rates: Mapping[DType, float], compute: DType | None, tf32: float | None = None) -> list[Finding]:
    """rates: FLOP/s by type. compute: of the run, None without one. tf32: FLOP/s, None where there is no such thing."""
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
    """used: the forms that the run may take, none without one. dtype: in which they computed. only: no other form
    computes this model. A kernel that is wrong and stays off is as it should be: it is said, and that is all. Eager
    attention is the textbook's formula, which a plan takes as asked for with the same caution. Said and no more is one
    without which the model cannot be: the probe's far logits may lie beyond the model's caps, and FAST-PATH holds it
    against fp32 on the run's own examples."""
    lines, used = [], set(used)
    for trial in trials:
        if trial.passed:
            worst = max(trial.errors.values(), default=0.0)
            said = f"{1000 * trial.seconds:.2f} ms forward and backward, error {worst:.1g} of {GATE[dtype]:.2g} allowed"
            lines.append(ok("ATTN-KERNEL", said, where=trial.form))
        elif trial.untimed:
            lines.append(ok("ATTN-KERNEL", f"right; not timed: {trial.untimed}", where=trial.form))
        elif trial.form in used and only:
            lines.append(ok("ATTN-KERNEL", f"the only one for this model; {trial.failure}", where=trial.form))
        elif trial.form in used and trial.form == "eager":
            lines.append(caution("ATTN-KERNEL", trial.failure, "set attention: sdpa", where=trial.form))
        elif trial.form in used:
            lines.append(fault("ATTN-KERNEL", trial.failure, f"set attention.{trial.form}: off", where=trial.form))
        else:
            said = f"not used, so nothing is wrong; its check: {trial.failure}"
            lines.append(ok("ATTN-KERNEL", said, where=trial.form))
    return lines


def packed_lines(trials: Iterable[AttentionTrial], form: str, dtype: DType) -> list[Finding]:
    """form: by which the run keeps the documents of a packed row apart, plain where rows are padded. trials: of such
    forms, where the plan measured them, in dtype."""
    fix = "set data.packing: off"
    lines = kernel_lines([trial for trial in trials if trial.form == form], [form], dtype)
    return [replace(line, where=f"packed rows by {form}", fix=line.fix and fix) for line in lines]


def disk_line(folder: Path, needed: DiskForecast | None) -> Finding:
    """folder: where the run will be, which need not exist. needed: None without a run."""
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
    """Asks the hub one small question. names: what a run reads from it, in which case it is left alone where that is
    nothing; None without a run."""
    if names is not None and not names:
        return ok("HUB", "not needed: model and data are local folders")
    where = ", ".join(names or ())
    obstacle = hub_obstacle()
    if obstacle:
        return caution("HUB", obstacle, "local folders and what is in the cache work all the same", where=where)
    said = "it answers; " + ("a token is stored" if is_signed_in() else "no token: public models only")
    return ok("HUB", said, where=where)


Version = tuple[int, ...]


@dataclass(frozen=True)
class KnownBad:
    """Versions of `library` from `since` on (included) and before `until` (excluded). why: completes "torch 2.9.0: …".
    grave: the run's numbers or the machine's safety are at stake."""

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
    KnownBad("deepspeed", "0", "0.15.1", "runs what it is sent (CVE-2024-43497)", "take 0.15.1 or later", True),
    KnownBad("litellm", "1.82.7", "1.82.9", "is poisoned (PYSEC-2026-2)", "remove it, and change your secrets", True),
)
_OF_TORCH = ("torchvision", "torchaudio")  # compiled against one version of torch; transformers imports both


def library_findings(hardware: Hardware, accelerators: int, version: Callable[[str], str | None]) -> list[Finding]:
    """accelerators: NVIDIA devices that the machine has. version: of an installed library, None where it is not."""
    found = [*_known_bad(version), *_too_old(version), *_pairs(version), *_broken(version)]
    return [
        *(found or [ok("LIB-KNOWN-BAD", "no installed version is known to go wrong")]),
        *_builds(hardware, accelerators),
    ]


def installed_version(name: str) -> str | None:
    """None where it is not installed; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> Version:
    """(2, 13, 0) of 2.13.0+cpu; what follows the numbers does not count."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _known_bad(version: Callable[[str], str | None]) -> Iterator[Finding]:
    for row in ROWS:
        here = version(row.library)
        if here is not None and numbers(row.since) <= numbers(here) < numbers(row.until):
            make = fault if row.grave else caution
            yield make("LIB-KNOWN-BAD", f"{row.library} {here}: {row.why}", row.fix, where=row.library)


def _too_old(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Against what surefoot's own package asks for: an upgrade of another package may have taken one back."""
    for name, least in minimums().items():
        here = version(name)
        if here is not None and numbers(here) < numbers(least):
            what = f"{name} {here}: surefoot was made with {least} or later"
            yield fault("LIB-KNOWN-BAD", what, f"pip install '{name}>={least}'", where=name)


def minimums() -> Mapping[str, str]:
    """Library -> the least version, of what surefoot requires without extras."""
    required = importlib.metadata.requires("surefoot") or []
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
                yield caution("LIB-KNOWN-BAD", what, f"remove {name}, or take the one of torch {torch}", where=name)


def _broken(version: Callable[[str], str | None]) -> Iterator[Finding]:
    """flash-attn is compiled for one torch and one CUDA; of another it is there and cannot be imported."""
    if version("flash-attn") is None:
        return
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # a native library that does not load fails in its own ways
        what = f"flash-attn is installed and cannot be imported: {str(error).splitlines()[0][:120]}"
        yield caution("LIB-KNOWN-BAD", what, "remove it: torch has flash attention of its own", where="flash-attn")


def _builds(hardware: Hardware, accelerators: int) -> Iterator[Finding]:
    import torch

    if hardware.kind == "cpu" and accelerators and not torch.backends.cuda.is_built():
        what = f"torch {torch.__version__} is a build for CPUs, and the machine has {accelerators} NVIDIA devices"
        yield caution("LIB-BUILD", what, "install a build of torch for its CUDA version", where="torch")
    elif hardware.kind == "cpu" and accelerators:
        what = f"torch {torch.__version__} does not see any of {accelerators} NVIDIA devices"
        yield caution("LIB-BUILD", what, "look at the driver (nvidia-smi), and at CUDA_VISIBLE_DEVICES", where="torch")
    elif hardware.kind == "cuda" and not torch.backends.cuda.is_flash_attention_available():
        what = f"torch {torch.__version__} was built without flash attention"
        yield caution("LIB-BUILD", what, "install an official build of torch", where="torch")
    else:
        yield ok("LIB-BUILD", f"torch {torch.__version__} on {hardware.kind}")
