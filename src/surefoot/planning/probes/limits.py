"""How much of a run's shapes the probes take on each kind of device.

On a CPU attention is timed small: time is the same for each token and each head, and there is little of it. A GPU that
is asked for little shows how fast a kernel is started, not how fast it computes; so there the run's own shapes are
timed, as far as memory and the operations of one pass allow.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_ROOM = "its scores have no room"  # why a form is not timed
HELD = "as memory was in use"  # why less is timed than will be once others give it back


@dataclass(frozen=True)
class Limits:
    """seconds: of all probes, besides imports and the start of a GPU. product_rows, product_numbers: of x and of the
    weight in a product, at most; a slice of a large matrix multiplies at the same rate as the whole. copy_bytes: of
    what is copied. attention_tokens, attention_heads: at most, None for the run's own. attention_operations: of a
    forward and backward pass in 16 bits at most, and a quarter of it in fp32, None where tokens and heads bound it.
    pointwise_numbers: of what is timed. pointwise_rows: fewest and most of it."""

    seconds: float
    product_rows: int
    product_numbers: int
    copy_bytes: int
    attention_tokens: int | None
    attention_heads: int | None
    attention_operations: int | None
    pointwise_numbers: int
    pointwise_rows: tuple[int, int]


LIMITS = {
    "cpu": Limits(
        seconds=3.0,  # measured in docs/evidence/probes.md
        product_rows=512,
        product_numbers=2**21,
        copy_bytes=2**26,  # beyond the caches
        attention_tokens=1024,
        attention_heads=4,  # they are independent
        attention_operations=None,
        pointwise_numbers=2**21,  # 8 MiB in fp32
        pointwise_rows=(64, 2048),
    ),
    "cuda": Limits(
        seconds=10.0,
        product_rows=4096,
        product_numbers=2**26,
        copy_bytes=2**29,
        attention_tokens=None,
        attention_heads=None,
        # Four rows of 4,096 tokens with 32 heads of 128 numbers are half of it. At 20 TFLOP/s, which every GPU with
        # 16-bit products reaches, a pass takes a fifth of a second; at the 4 of a small one in fp32 a quarter.
        attention_operations=2**42,
        # Its cache has up to 50 MiB, and a micro-batch there some thousand tokens; of few rows, starting a kernel would
        # be all that is timed.
        pointwise_numbers=2**25,
        pointwise_rows=(1024, 8192),
    ),
}
