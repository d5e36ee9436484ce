"""One thing that was looked at: what was found, what it should be, and what to do where it is not so."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.commands.doctor.codes import CODES
from surefoot.system.errors import EnvironmentFault, SurefootError

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

    def with_gain(self, gain: float | None) -> Finding:
        return replace(self, gain=gain)


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
