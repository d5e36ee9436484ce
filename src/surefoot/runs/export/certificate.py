"""export.json: inputs, outputs and measured differences of an export. Nothing is published without it.

Three models process the same texts: the trained one (adapter over base), the merged one in memory, and the one that
plain transformers loads from the written files. The first two compute in fp32 and differ only by the order of
roundings; between the last two lies the rounding of every weight and product to the requested dtype.

A merge is judged relative to the adapter's effect, |adapter - base|: half of a weak adapter must not pass for the
whole. The effect of rounding alone is measured on the model itself, by perturbing its embeddings by one unit in the
last place. A cast is judged weight by weight, where the largest possible error is known; logits may amplify it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.models.verify import Agreement
from surefoot.planning.plan import DType
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, Fault, InputError

FORMAT = 1

# Fractions of the largest logit. Measured on ten families with LoRA and DoRA, and on 32 layers of 64 and 256 channels
# (docs/export.md): the narrow deep models, which amplify every rounding, gave the measured values next to the limits.
# An adapter that moves the logits by a tenth and is merged with 1.05 of its scale is off by more than 2e-3.
MERGED_LIMIT = 1e-4  # 7.2e-5 measured; 2.8e-6 on ordinary models
EFFECT_LIMIT = (
    0.02  # of the adapter's effect: refuses a merge with 1.03 of its scale; 8.8e-4 measured for an effect of 1e-3
)
NOISE_LIMIT = 8  # times the noise of one rounding: 2.1 measured, ten families and 32 layers, LoRA and DoRA
CAST_LIMIT = 1.0  # half units in the last place: the maximum error of rounding to nearest
RELOADED_LIMIT: Mapping[DType, float] = {
    "fp32": 1e-4,  # the same bits, loaded again; 0 measured
    "fp16": 0.04,  # eleven bits in every weight and product; 0.020 measured
    "bf16": 0.25,  # eight bits; 0.18 measured
}


def merged_limit(effect: float, noise: float) -> float:
    """Return the largest change by merging that is allowed, as a fraction of the largest logit.

    effect: the change by the adapter, as the same fraction.
    noise: the change by one rounding (`rounding_noise`), as the same fraction.

    Non-finite arguments give the strictest limit.
    """
    limits = [one for one in (EFFECT_LIMIT * effect, NOISE_LIMIT * noise) if math.isfinite(one)]
    return min(MERGED_LIMIT, max(limits, default=0.0))


def require_merged(agreement: Agreement, limit: float) -> None:
    """Raise EnvironmentFault if the merged model differs from adapter and base: a bug of surefoot or of a library,
    which no setting fixes."""
    if not _within(agreement.share, limit):
        what = f"differs from adapter and base by {_shown(agreement)}; allowed is {limit:.2g}"
        raise EnvironmentFault(Fault("merged model", what, "nothing was written; please report it", code="SF-EXPORT"))


def require_cast(rounding: float, dtype: DType) -> None:
    """Raise EnvironmentFault if a weight is rounded by more than the dtype requires: a bug of surefoot or of a library.

    rounding: error of the worst weight, as `cast_weights` returns it.
    """
    if not _within(rounding, CAST_LIMIT):
        what = f"a weight is off by {rounding:.3g} times the maximum rounding error of {dtype}"
        raise EnvironmentFault(Fault("cast model", what, "nothing was written; please report it", code="SF-EXPORT"))


def reloaded_limit(dtype: DType, requested: float | None) -> float:
    return RELOADED_LIMIT[dtype] if requested is None else requested


def require_reloaded(agreement: Agreement, dtype: DType, limit: float | None) -> None:
    """Raise InputError if rounding to the dtype changes the model too much. limit: the user's, if any."""
    allowed = reloaded_limit(dtype, limit)
    if not _within(agreement.share, allowed):
        what = f"in {dtype} it differs from the model in fp32 by {_shown(agreement)}; allowed is {allowed:g}"
        finer = (
            "allow it with --threshold" if dtype == "fp32" else "export with --dtype fp32, or allow it with --threshold"
        )
        raise InputError(Fault("exported model", what, f"nothing was written; {finer}", code="SF-EXPORT"))


def hashes(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Name -> size in bytes and SHA-256."""
    return {
        name: {"size": path.stat().st_size, "sha256": durable.sha256_file(path)} for name, path in sorted(files.items())
    }


def check_record(agreement: Agreement, limit: float) -> dict[str, Any]:
    """One comparison, in the format of export.json."""
    found = asdict(agreement)
    return {
        "largest_difference": found["largest"],
        "share_of_largest_logit": found["share"],
        "limit": limit,
        "top1_agreement": found["top1"],
        "positions": found["positions"],
    }


def _within(share: float, limit: float) -> bool:
    return math.isfinite(share) and share <= limit


def _shown(agreement: Agreement) -> str:
    return (
        f"{agreement.share:.2g} of the largest logit ({agreement.largest:.3g}; the top-1 token is the same at "
        f"{agreement.top1:.1%} of {agreement.positions:,} positions)"
    )
