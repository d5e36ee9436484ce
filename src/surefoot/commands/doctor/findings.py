"""The codes of doctor's checks, and a finding: what was found, the limit, and the fix.

Codes never change, because users search for them and programs read them. A test compares docs/doctor.md with this
table.
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
    """A check. what: is checked. limit: the expected value. exit_code: 2 or 3 if it can stop a run, 0 if it only costs
    time or attention. speed: whether its fix makes a run faster, so that a gain can be measured."""

    group: str  # machine | config | data | model | numbers | steps
    what: str
    limit: str
    exit_code: int = 0
    speed: bool = False


# The allowed share of a step spent waiting for batches, and of fp32 arithmetic in a 16-bit run.
WAIT, FP32 = 0.1, 0.05
BACKWARD = 3.5  # times the forward pass: 1 to 2 is usual, 3 with gradient checkpointing
NEAR = 1.2  # factor of speed that is worth reporting

CODES: dict[str, Code] = {
    "ENV-OVERRIDE": Code(
        "machine",
        "an environment variable changes kernels or numbers behind the config",
        "not set",
        speed=True,
    ),
    "ENV-UNREAD": Code(
        "machine", "an environment variable that nothing reads, or that the config or the machine overrides", "not set"
    ),
    "THREADS": Code("machine", "CPU threads, compared with cores and with the fastest count", "≤ cores", speed=True),
    "GEMM-SLOW": Code(
        "machine", "16-bit matrix products, compared with fp32 ones", "not slower, if the run uses them", speed=True
    ),
    "ATTN-KERNEL": Code(
        "machine",
        "every attention kernel, forward and backward, compared with float64: odd lengths, 64 modulo 128, large logits",
        "correct, if the run uses it",
        3,
    ),
    "LIB-KNOWN-BAD": Code("machine", "library versions with known problems, alone or together", "none", 3),
    "LIB-BUILD": Code("machine", "the device that torch was built for, compared with the machine's", "the same"),
    "LIB-KERNELS": Code("machine", "on a GPU: packages with kernels that runs may use", "none is needed"),
    "DISK": Code("machine", "free space for the checkpoints of the run", "all that are kept, plus one", 3),
    "HUB": Code("machine", "whether the hub answers, and whether it knows the user", "it answers"),
    "CONFIG": Code("config", "the config, and the plan that follows from it", "no conflict", 2),
    "ENVIRONMENT": Code("config", "what the run needs of its environment", "available", 3),
    "PLAN": Code("config", "warnings of the plan", "none"),
    "DTYPE-CONFLICT": Code("config", "types of weights, products and gradients", "compatible", 2),
    "ADAPTER-TARGETS": Code("config", "the adapter's target modules", "each exists and is linear", 2),
    "MEM-OVERSUBSCRIBED": Code(
        "config",
        "the forecast peak memory, compared with the device's total and free memory",
        "it fits",
        speed=True,
    ),
    "TOK-PAD": Code("data", "the padding token", "a special token that no text contains", 2),
    "TOK-STOP": Code("data", "answers that end with a supervised stop token", "all"),
    "LABEL-NONE": Code("data", "tokens with loss", "some in every example", 2),
    "DATA": Code("data", "records, templates and tokens", "every record can be read", 2),
    "DATA-AUDIT": Code("data", "warnings of the data audit", "none"),
    "MODEL": Code("model", "the model's files and weights", "complete, finite, as config.json says", 2),
    "ROW-ZERO-NORM": Code("model", "rows of weights whose norm DoRA divides by", "none is zero", 2),
    "FAST-PATH": Code(
        "numbers",
        "loss and gradients of the run, compared with plain fp32 on the same weights",
        "equal up to rounding",
        3,
    ),
    "MICRO-BATCH-SUM": Code("numbers", "k examples at once, compared with one at a time", "equal up to rounding", 3),
    "PACK-LEAK": Code("numbers", "the hidden states of documents when others in the batch change", "unchanged", 3),
    "GRAD-NONE": Code("numbers", "trained tensors without a gradient in three steps", "none"),
    "LOSS-FINITE": Code("steps", "loss and gradient norm of ten real steps", "finite", 2),
    "LOSS-ZERO": Code("steps", "the loss of ten real steps", "not 0", 2),
    "GRAD-NORM": Code("steps", "the gradient norm of ten real steps", "between 1e-6 and 1e4"),
    "LOSS-FALLING": Code("steps", "the loss of the first step's examples, after ten steps", "lower than before"),
    "ATTN-MATH": Code(
        "steps",
        "the attention kernel that actually runs",
        "one that does not store all scores, unless it is the fastest",
        speed=True,
    ),
    "BWD-RATIO": Code("steps", "backward time divided by forward time", f"≤ {BACKWARD}", speed=True),
    "GEMM-FP32-SHARE": Code(
        "steps", "share of the products' arithmetic in fp32, in a 16-bit run", f"≤ {FP32:.0%}", speed=True
    ),
    "COMPILE-RECOMPILES": Code("steps", "compilations after the third step", "none", speed=True),
    "DATA-WAIT": Code("steps", "share of a step spent waiting for batches", f"≤ {WAIT:.0%}", speed=True),
    "WORKERS-USELESS": Code(
        "steps",
        "data workers, compared with the cost of preparing batches without them",
        f"none where that is ≤ {WAIT:.0%}",
        speed=True,
    ),
}


Verdict = Literal["ok", "caution", "fault", "unknown"]
FORMAT = 1  # version of the `--json` output
_COMMAND = re.compile(r"`(surefoot (?:data|plan))`")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    code: a key of CODES.
    value, limit: for people, with units.
    verdict: "fault": the run would fail or compute wrong numbers; "unknown": not checked, and value says why.
    fix: one line; empty if nothing has to be done.
    where: the variable, key or module concerned; empty for the whole.
    gain: measured time without the fix divided by time with it, None if not measured.
    exit_code: of a fault, 2 or 3.
    """

    code: str
    value: str
    limit: str
    verdict: Verdict
    fix: str = ""
    where: str = ""
    gain: float | None = None
    exit_code: int = 0

    def with_config(self, words: Sequence[str]) -> Finding:
        """Return the finding with the user's config words in the surefoot commands of its fix."""
        return replace(self, fix=_COMMAND.sub(lambda found: f"`{found[1]} {shlex.join(words)}`", self.fix))


def ok(code: str, value: str, *, where: str = "") -> Finding:
    return Finding(code, value, CODES[code].limit, "ok", where=where)


def unknown(code: str, why: str) -> Finding:
    return Finding(code, f"not checked: {why}", CODES[code].limit, "unknown")


def caution(code: str, value: str, fix: str, *, where: str = "", gain: float | None = None) -> Finding:
    return Finding(code, value, CODES[code].limit, "caution", fix, where, gain)


def fault(code: str, value: str, fix: str, *, where: str = "") -> Finding:
    return Finding(code, value, CODES[code].limit, "fault", fix, where, exit_code=CODES[code].exit_code)


@dataclass(frozen=True)
class Examination:
    """All results. looked_at: every check in order. facts: the measurements as JSON values, for readers who want to
    judge for themselves."""

    looked_at: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Results that need attention; faults first."""
        return tuple(one for verdict in ("fault", "caution") for one in self.looked_at if one.verdict == verdict)

    @property
    def exit_code(self) -> int:
        """2 if the user's input would make the run fail, else 3 if the environment would, else 0."""
        return min((one.exit_code for one in self.looked_at if one.verdict == "fault"), default=0)


def to_json(examination: Examination) -> dict[str, Any]:
    """The same as JSON. Codes, verdicts and keys are stable across versions."""
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


# doctor's code for a fault: by the fault's code, or by the config key that it names.
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
    """One finding per fault for which the run would be refused. code: for faults without a code of doctor. zero_rows:
    modules for which a refusal means rows with norm zero."""
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
