"""The codes that doctor's lines carry, and one finding: what was found, what it should be, and what to do about it.

Codes stay what they are: people search for them, programs read them. A test holds docs/doctor.md against this table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.system.errors import EnvironmentFault, SurefootError


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


Verdict = Literal["ok", "caution", "fault", "unknown"]
FORMAT = 1  # of `--json`
_COMMAND = re.compile(r"`(surefoot (?:data|plan))`")


@dataclass(frozen=True)
class Finding:
    """code: a key of CODES. value, limit: for people, with units. verdict: a fault means that the run would fail, or
    that its numbers would be wrong; unknown that nobody could look, and value says why. fix: one line; empty where
    nothing has to be done. where: what the reader can go to, such as a variable, a key or a module; empty for the
    whole. gain: measured time without the fix over time with it, None where nobody could measure. exit_code: of a
    fault, 2 or 3."""

    code: str
    value: str
    limit: str
    verdict: Verdict
    fix: str = ""
    where: str = ""
    gain: float | None = None
    exit_code: int = 0

    def with_config(self, words: Sequence[str]) -> Finding:
        """Its fix with the config that was examined in surefoot's own commands. words: as the user typed them."""
        return replace(self, fix=_COMMAND.sub(lambda found: f"`{found[1]} {shlex.join(words)}`", self.fix))


def ok(code: str, value: str, *, where: str = "") -> Finding:
    return Finding(code, value, CODES[code].limit, "ok", where=where)


def unknown(code: str, why: str) -> Finding:
    return Finding(code, f"not looked at: {why}", CODES[code].limit, "unknown")


def caution(code: str, value: str, fix: str, *, where: str = "", gain: float | None = None) -> Finding:
    return Finding(code, value, CODES[code].limit, "caution", fix, where, gain)


def fault(code: str, value: str, fix: str, *, where: str = "", gain: float | None = None) -> Finding:
    return Finding(code, value, CODES[code].limit, "fault", fix, where, gain, CODES[code].exit_code)


@dataclass(frozen=True)
class Examination:
    """looked_at: everything, in the order in which it was looked at. facts: what was measured, JSON-able, for readers
    who want to judge for themselves."""

    looked_at: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is not as it should be; faults first."""
        return tuple(one for verdict in ("fault", "caution") for one in self.looked_at if one.verdict == verdict)

    @property
    def exit_code(self) -> int:
        """2 where the user's input would make the run fail, else 3 where the environment would, else 0."""
        return min((one.exit_code for one in self.looked_at if one.verdict == "fault"), default=0)


def to_json(examination: Examination) -> dict[str, Any]:
    """The same for programs. Codes, verdicts and the names here stay as they are from version to version."""
    return {
        "format": FORMAT,
        "exit_code": examination.exit_code,
        "findings": [one.code for one in examination.findings],
        "checks": [
            {
                "code": one.code,
                "verdict": one.verdict,
                "where": one.where,
                "value": one.value,
                "limit": one.limit,
                "fix": one.fix,
                "gain": None if one.gain is None else round(one.gain, 2),
            }
            for one in examination.looked_at
        ],
        "facts": examination.facts,
    }


# doctor's code of a fault: by the fault's own code, or by the key at its place.
_BY_CODE = {"SF-MEMORY": "MEM-OVERSUBSCRIBED", "SF-LABEL-PAD": "TOK-PAD", "SF-LABEL-STOP": "TOK-STOP"}
_BY_PLACE = {
    "adapter.targets": "ADAPTER-TARGETS",
    "attention": "ATTN-KERNEL",
    "data.max_length": "LABEL-NONE",
    "kernels": "FAST-PATH",
    "precision": "DTYPE-CONFLICT",
    "tokenizer.pad": "TOK-PAD",
}


def refusals(error: SurefootError, code: str, zero_rows: Sequence[str] = ()) -> list[Finding]:
    """What the run would be refused for, one finding for each fault. code: for those that nothing names. zero_rows:
    modules at which a refusal means rows of norm zero."""
    exit_code = 3 if isinstance(error, EnvironmentFault) else 2
    found = []
    for one in error.faults:
        named = _BY_CODE.get(one.code) or next(
            (known for key, known in _BY_PLACE.items() if one.where.startswith(key)), None
        )
        named = "ROW-ZERO-NORM" if one.where in zero_rows else named
        named = named or ("ENVIRONMENT" if exit_code == 3 else code)
        found.append(Finding(named, one.what, CODES[named].limit, "fault", one.fix, one.where, exit_code=exit_code))
    return found
