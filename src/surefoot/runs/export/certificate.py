"""export.json: what went into an export, what came out, and how far the two are apart. Nothing is published without.

Three models are asked the same texts: the one that was trained (adapter over base), the merged one in memory, and the
one that plain transformers reads back from the written files. The first two compute in fp32 and differ by nothing but
the order of roundings; between the last two lies the rounding of every weight, and every product, to the asked dtype.

That a merge is the adapter is judged by what the adapter does, |adapter - base|: half a weak adapter must not pass for
a whole one. What rounding alone does is measured on the model itself, by moving its embeddings one unit in the last
place. That a cast is a cast is judged weight by weight, where the largest error has a formula; logits may amplify it.
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

# Shares of the largest logit. Measured on ten families with LoRA and DoRA, and on 32 layers of 64 and 256 channels
# (docs/export.md): the narrow deep ones, which amplify every rounding, gave the figures behind the limits. An adapter
# that moves the logits by a tenth and is merged with 1.05 of its scale is off by more than 2e-3.
MERGED_LIMIT = 1e-4  # 7.2e-5 seen; 2.8e-6 on ordinary models
EFFECT_LIMIT = (
    0.02  # of what the adapter does: a merge with 1.03 of its scale is refused; 8.8e-4 seen where it does 1e-3
)
NOISE_LIMIT = 8  # times the noise of one rounding: 2.1 seen, ten families and 32 layers, LoRA and DoRA
CAST_LIMIT = 1.0  # half units in the last place: what rounding to nearest may do to a weight
RELOADED_LIMIT: Mapping[DType, float] = {
    "fp32": 1e-4,  # the same bits, opened again; 0 seen
    "fp16": 0.04,  # eleven bits in every weight and product; 0.020 seen
    "bf16": 0.25,  # eight bits; 0.18 seen
}


def merged_limit(effect: float, noise: float) -> float:
    """The share of the largest logit that merging may change.

    effect: what the adapter changes, as a share of the same.
    noise: what one rounding does (`rounding_noise`), also as a share.

    Numbers that are not finite give the strictest limit.
    """
    limits = [one for one in (EFFECT_LIMIT * effect, NOISE_LIMIT * noise) if math.isfinite(one)]
    return min(MERGED_LIMIT, max(limits, default=0.0))


def require_merged(agreement: Agreement, limit: float) -> None:
    """Raises EnvironmentFault where the merged model is another than adapter and base were: a fault of the program or
    of a library, which no setting cures."""
    if not _within(agreement.share, limit):
        what = f"differs from adapter and base by {_shown(agreement)}; allowed is {limit:.2g}"
        raise EnvironmentFault(Fault("merged model", what, "nothing was written; please report it", code="SF-EXPORT"))


def require_cast(rounding: float, dtype: DType) -> None:
    """rounding: of the worst weight, as `cast_weights` returns it. Raises EnvironmentFault where it is more than the
    dtype's: a fault of the program or of a library."""
    if not _within(rounding, CAST_LIMIT):
        what = f"a weight is off by {rounding:.3g} times what rounding to {dtype} may do"
        raise EnvironmentFault(Fault("cast model", what, "nothing was written; please report it", code="SF-EXPORT"))


def reloaded_limit(dtype: DType, requested: float | None) -> float:
    return RELOADED_LIMIT[dtype] if requested is None else requested


def require_reloaded(agreement: Agreement, dtype: DType, limit: float | None) -> None:
    """limit: the user's own. Raises InputError where rounding to the dtype changes the model too much."""
    allowed = reloaded_limit(dtype, limit)
    if not _within(agreement.share, allowed):
        what = f"in {dtype} it differs from the model in fp32 by {_shown(agreement)}; allowed is {allowed:g}"
        finer = (
            "allow it with --threshold" if dtype == "fp32" else "export with --dtype fp32, or allow it by --threshold"
        )
        raise InputError(Fault("exported model", what, f"nothing was written; {finer}", code="SF-EXPORT"))


def hashes(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Name -> size in bytes and SHA-256."""
    return {
        name: {"size": path.stat().st_size, "sha256": durable.sha256_file(path)} for name, path in sorted(files.items())
    }


def check_record(agreement: Agreement, limit: float) -> dict[str, Any]:
    """One comparison, as export.json holds it."""
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
        f"{agreement.share:.2g} of the largest logit ({agreement.largest:.3g}; the likeliest token is the same at "
        f"{agreement.top1:.1%} of {agreement.positions:,} positions)"
    )
