"""Versions of libraries that are known to go wrong, alone or together, and builds that do not suit the machine.

A row says no more than was found out; whether attention computes right is measured, not looked up, because the same
fault came and went with versions of cuDNN (PyTorch issues 138649, 196678).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from surefoot.commands.doctor.findings import Finding, caution, fault, ok
from surefoot.system.hardware import Hardware

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
