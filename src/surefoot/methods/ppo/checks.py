"""What must hold before the first update of a PPO run: the policy is its reference, and the engine that draws answers
is the policy that learns.

Both are seen in log-probabilities of the first rollout. Where they differ, every ratio and every KL penalty of the run
would be wrong from the start, which shows much later as a reward that falls or a KL that explodes.
"""

from __future__ import annotations

from surefoot.methods.ppo.rollout import Weighed
from surefoot.planning.plan import DType
from surefoot.system.errors import EnvironmentFault, Fault

# Mean difference per token, in nats. fp32: the same sums in another order, over some dozens of layers. The 16-bit types
# round every product (2^-8 and 2^-11), and decoding with a cache does so in another order than a whole sequence.
START_TOLERANCE: dict[DType, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


# Below these the drawn log-probabilities stand for those of the code that learns, in nats per token: the same products
# in fp32, summed in another order. A ratio is clipped two thousand times further from 1.
DRAWN_MEAN, DRAWN_MOST = 1e-5, 1e-4


def check_start(weighed: Weighed, compute: DType) -> tuple[float, float | None]:
    """Of the first rollout: the KL of the policy from its reference per token, and the mean probability ratio between
    the code that learns and the engine that drew, None where that cannot tell. Raises EnvironmentFault where either is
    further from 0 and 1 than the type of the products explains."""
    real, tolerance = weighed.real, START_TOLERANCE[compute]
    logprobs = weighed.logprobs[real].double()
    if not len(logprobs):
        return 0.0, None
    kl = logprobs - weighed.reference[real].double()
    faults = []
    if not kl.abs().mean() <= tolerance:
        what = (
            f"the policy is not its reference before the first update: log-probabilities differ by "
            f"{kl.abs().mean():.3g} per token, and {tolerance:g} is what {compute} explains"
        )
        faults.append(Fault("ppo", what, "the two were not loaded alike: report this with the run folder"))
    drawn = weighed.drawn[real].double()
    known = ~drawn.isnan()
    ratio = None
    if known.any():
        moved = (logprobs - drawn)[known]
        ratio = float(moved.exp().mean())
        if not moved.abs().mean() <= tolerance or not abs(ratio - 1) <= tolerance:
            what = (
                f"answers are drawn from another distribution than is learned from: probability ratio {ratio:.4g}, "
                f"log-probabilities differ by {moved.abs().mean():.3g} per token, and {tolerance:g} is what {compute} "
                "explains"
            )
            faults.append(
                Fault("ppo", what, "check that ppo.engine serves this model; try precision: fp32 or attention: eager")
            )
    if faults:
        raise EnvironmentFault(faults)
    return float(kl.mean()), ratio


def drawn_suffice(weighed: Weighed, compute: DType) -> bool:
    """Whether the engine that drew the answers knows all log-probabilities as the code that learns computes them, up to
    rounding in fp32. In the 16-bit types one rollout that agrees promises nothing: what one rounding moves is far
    above the bounds."""
    if compute != "fp32":
        return False
    apart = (weighed.drawn - weighed.logprobs)[weighed.real].double().abs()
    return bool(len(apart)) and bool(apart.mean() <= DRAWN_MEAN) and bool(apart.max() <= DRAWN_MOST)


def dropout_caution(share: float) -> str | None:
    """`check_start` compares without dropout. share: the highest of the policy's layers while it learns."""
    if share == 0:
        return None
    return (
        f"caution: the policy learns with dropout {share:g}, and answers are drawn without: ratios scatter around 1 "
        "from the first step on, and some are clipped for that alone; leave adapter.dropout and model.dropout out"
    )
