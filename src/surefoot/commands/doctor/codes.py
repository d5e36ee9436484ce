"""The codes that doctor's lines carry. They stay what they are: people search for them, programs read them.

docs/doctor.md is held against this table by a test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """what: is looked at. limit: what it should be. exit_code: 2 or 3 where it can stop a run, 0 where it only costs
    time or attention. speed: its fix makes a run faster, by a gain that can be measured; others make it right."""

    group: str  # machine | config | data | model | numbers | steps
    what: str
    limit: str
    exit_code: int = 0
    speed: bool = False


# The share of a step that may pass in waiting for its batches, and the share of fp32 arithmetic in a 16-bit run.
WAIT, FP32 = 0.1, 0.05
BACKWARD = 3.5  # times the forward pass: 1 to 2 is usual, 3 with gradient checkpointing
NEAR = 1.2  # a difference in speed that is worth a line

CODES: dict[str, Code] = {
    "ENV-OVERRIDE": Code(
        "machine",
        "an environment variable acts below the config: slower kernels, or other numbers",
        "not set",
        speed=True,
    ),
    "ENV-UNREAD": Code(
        "machine", "an environment variable that nothing reads, or that the config or the machine beats", "not set"
    ),
    "THREADS": Code(
        "machine", "CPU threads against cores, and against the count that multiplies fastest", "≤ cores", speed=True
    ),
    "GEMM-SLOW": Code(
        "machine", "16-bit matrix products against fp32 ones", "no slower, where the run uses them", speed=True
    ),
    "ATTN-KERNEL": Code(
        "machine",
        "every attention kernel, forward and backward, against float64: odd lengths, 64 modulo 128, far logits",
        "right, where the run uses it",
        3,
    ),
    "LIB-KNOWN-BAD": Code("machine", "versions that are known to go wrong, alone or together", "none", 3),
    "LIB-BUILD": Code("machine", "what torch was built for, against what the machine has", "the same"),
    "DISK": Code("machine", "free space for the checkpoints of the run", "all that are kept, and one more", 3),
    "HUB": Code("machine", "whether the hub answers, and whether it knows the user", "it answers"),
    "CONFIG": Code("config", "the config, and the plan that follows from it", "no conflict", 2),
    "ENVIRONMENT": Code("config", "what the run needs from its surroundings", "there", 3),
    "PLAN": Code("config", "what the plan warns of", "nothing"),
    "DTYPE-CONFLICT": Code("config", "types of weights, products and gradients", "they go together", 2),
    "ADAPTER-TARGETS": Code("config", "the modules that the adapter is to train", "each exists and is linear", 2),
    "MEM-OVERSUBSCRIBED": Code(
        "config",
        "the forecast of the peak against the memory that the device has, and that is free",
        "it fits",
        speed=True,
    ),
    "TOK-PAD": Code("data", "the padding token", "a special token that no text contains", 2),
    "TOK-STOP": Code("data", "answers that end with a supervised stop token", "all"),
    "LABEL-NONE": Code("data", "tokens that carry loss", "some in every example", 2),
    "DATA": Code("data", "records, templates and tokens", "every record can be read", 2),
    "DATA-AUDIT": Code("data", "what the audit of the data warns of", "nothing"),
    "MODEL": Code("model", "the model's files and weights", "whole, finite, as config.json says", 2),
    "ROW-ZERO-NORM": Code("model", "rows of weights whose norm DoRA divides by", "none is zero", 2),
    "FAST-PATH": Code(
        "numbers",
        "loss and gradients as the run computes them, against plain fp32, on its own weights",
        "equal up to rounding",
        3,
    ),
    "MICRO-BATCH-SUM": Code("numbers", "k examples at once against k times one", "equal up to rounding", 3),
    "PACK-LEAK": Code("numbers", "the hidden states of documents when others of their batch change", "they stay", 3),
    "GRAD-NONE": Code("numbers", "tensors that train and get no gradient in three steps", "none"),
    "LOSS-FINITE": Code("steps", "loss and gradient norm of ten real steps", "finite", 2),
    "LOSS-ZERO": Code("steps", "the loss of ten real steps", "not 0", 2),
    "GRAD-NORM": Code("steps", "the gradient norm of ten real steps", "between 1e-6 and 1e4"),
    "LOSS-FALLING": Code("steps", "the loss of the first step's examples, after ten steps", "below what it was"),
    "ATTN-MATH": Code(
        "steps",
        "the attention kernel that really runs",
        "none that stores every score, unless it is the fastest",
        speed=True,
    ),
    "BWD-RATIO": Code("steps", "time of the backward pass over that of the forward pass", f"≤ {BACKWARD}", speed=True),
    "GEMM-FP32-SHARE": Code(
        "steps", "share of the products' arithmetic in fp32, in a 16-bit run", f"≤ {FP32:.0%}", speed=True
    ),
    "COMPILE-RECOMPILES": Code("steps", "compilations after the third step", "none", speed=True),
    "DATA-WAIT": Code("steps", "share of a step that passes in waiting for its batches", f"≤ {WAIT:.0%}", speed=True),
    "WORKERS-USELESS": Code(
        "steps",
        "threads that prepare batches, against what preparing costs without them",
        f"none where that is ≤ {WAIT:.0%}",
        speed=True,
    ),
}
